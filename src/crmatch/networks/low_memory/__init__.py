"""Memory-saving versions of plain code, chosen by one switch: `save_memory`. Everything else in networks/ is plain."""

from torch import nn


def save_memory(network: nn.Module, **switches: bool) -> None:
    """Choose how the blocks of `network` train.

    Args:
        network: its modules that have an attribute of that name are switched.
        switches: `lean` fuses norm, activation and convolution (`norm_act_conv.py`): less memory, a little faster, CPU only.
            `recompute` recomputes activations in the backward pass (`recompute.py`): far less memory, a third slower.
    """
    for module in network.modules():
        for name, value in switches.items():
            if hasattr(module, name):
                setattr(module, name, value)
