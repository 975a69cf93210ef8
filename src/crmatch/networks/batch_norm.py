"""Passes in training mode that leave no trace in the running statistics of batch norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crmatch.networks.network import Network, Outputs


def forward_without_bn_update(network: Network, images: Tensor) -> Outputs:
    """Outputs with the statistics of this batch, which the running ones do not take in; the network's mode is kept.

    Public code calls this "freezing" batch norms. Mean Teacher's teacher, guessed labels and perturbed images go through here.
    """
    with _batch_statistics_only(network):
        outputs: Outputs = network(images)
    return outputs


@contextmanager
def _batch_statistics_only(network: Network) -> Iterator[None]:
    training = network.training
    network.train()
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
        network.train(training)


def forward_interleaved(network: Network, images: Tensor, groups: int) -> Tensor:
    """Logits (N, K) from `groups` passes, each over every `groups`-th image, so that all see the same mixture of sources.

    Only the first pass moves the running statistics (MixMatch's code; spec 4.3).
    """
    parts = [images[start::groups] for start in range(groups)]
    logits = [
        network(part).logits if index == 0 else forward_without_bn_update(network, part).logits
        for index, part in enumerate(parts)
    ]
    rows = torch.cat([torch.arange(start, len(images), groups, device=images.device) for start in range(groups)])
    return torch.cat(logits).index_select(0, rows.argsort())
