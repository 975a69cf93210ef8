"""Forward passes with batch statistics that do not update the running statistics of batch norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crmatch.networks.network import Network, Outputs


def forward_without_bn_update(network: Network, images: Tensor) -> Outputs:
    """Forward pass with batch statistics that does not update the running mean and variance.

    Mean Teacher's teacher, guessed labels and VAT's perturbed images use it. The network's mode is restored afterwards.
    """
    training = network.training
    network.train()
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        outputs: Outputs = network(images)
        return outputs
    finally:
        for norm in norms:
            norm.track_running_stats = True
        network.train(training)


def forward_interleaved(network: Network, images: Tensor, groups: int) -> Tensor:
    """Logits (N, K) from `groups` passes, each over every `groups`-th image, so that every pass has the same mix of sources.

    Only the first pass updates the running statistics, as in MixMatch's code.
    """
    parts = [images[start::groups] for start in range(groups)]
    logits = [
        network(part).logits if index == 0 else forward_without_bn_update(network, part).logits
        for index, part in enumerate(parts)
    ]
    rows = torch.cat([torch.arange(start, len(images), groups, device=images.device) for start in range(groups)])
    return torch.cat(logits).index_select(0, rows.argsort())
