"""Recomputing in the backward pass: the same weights and running statistics to the bit, from less that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import tiny_spec, training_of
from crmatch.errors import RequestError
from crmatch.networks.build import build_network
from crmatch.networks.config import ResNet18Config, WideResNetConfig
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

NETWORKS = {
    "wide": {},
    "wide, one block": {"network.repeat": 1},
    "wide, usb": {"network": {"kind": "wide_resnet", "block": "usb", "repeat": 3, "filters": 4}},
    "fast": {"network": {"kind": "fast", "filters": 4}},
    "resnet18": {"network": {"kind": "resnet18"}},
    "resnet18, dropout": {"network": {"kind": "resnet18", "dropout": 0.3, "weight_norm": True}},
}


def after(steps: int, training: Any) -> dict[str, Tensor]:
    """Losses of all steps, and weights, running statistics and their average after the last one."""
    losses = {f"loss/{step}": training.take_step()[1].total.detach() for step in range(steps)}
    return losses | training.checkpoint().tensors


def same(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> bool:
    return expected.keys() == actual.keys() and all(torch.equal(value, actual[name]) for name, value in expected.items())


@pytest.mark.parametrize("network", NETWORKS)
def test_two_steps_are_equal_to_the_bit(stripes: Path, network: str) -> None:
    spec = tiny_spec(stripes, **NETWORKS[network])
    expected, actual = (after(2, training_of(spec, stripes, recompute=recompute)) for recompute in (False, True))
    tracked = {int(value) for name, value in actual.items() if name.startswith("network/") and "tracked" in name}
    assert tracked == ({2, 0} if network == "wide, usb" else {2})  # USB's blocks have norms that they do not use
    assert same(expected, actual)


@pytest.mark.parametrize("method", ["vat", "ict", "mean_teacher", "mixmatch", "featmatch", "plcb"])
def test_methods_that_keep_running_statistics_still_in_some_passes_are_equal_to_the_bit(stripes: Path, method: str) -> None:
    spec = tiny_spec(stripes, method)
    assert same(*(after(2, training_of(spec, stripes, recompute=recompute)) for recompute in (False, True)))


@pytest.mark.parametrize("config", [WideResNetConfig(filters=8, repeat=4), ResNet18Config()], ids=["wide", "resnet18"])
def test_less_is_kept_for_the_backward_pass(config: Any) -> None:
    """Bytes that autograd holds between the passes: group inputs instead of everything."""

    def kept(recompute: bool) -> int:
        network = build_network(config, channels=3, image_size=32, classes=10)
        network.save_memory(lean=True, recompute=recompute)
        own = {value.data_ptr() for value in network.state_dict().values()}
        sizes: dict[int, int] = {}

        def pack(value: Tensor) -> Tensor:
            if value.data_ptr() not in own:
                sizes[value.data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            outputs = network(torch.randn(4, 3, 32, 32))
        assert outputs.logits.requires_grad
        return sum(sizes.values())

    assert kept(recompute=True) < kept(recompute=False) / (4 if isinstance(config, WideResNetConfig) else 1.5)


def test_compiling_and_recomputing_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="--compile and --recompute exclude each other"):
        choose_runtime(Execution("cpu", compile=True, recompute=True))
