from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from crmatch.data.splits import batch_positions


@given(size=st.integers(1, 50), batch=st.integers(1, 70), seed=st.integers(0, 5), steps=st.integers(1, 6))
def test_a_stream_is_a_concatenation_of_permutations(size: int, batch: int, seed: int, steps: int) -> None:
    stream = torch.cat([batch_positions(size, batch, seed, "unlabeled", step) for step in range(steps)])
    assert len(stream) == steps * batch
    for epoch in stream.split(size):
        assert len(set(epoch.tolist())) == len(epoch)
        assert 0 <= int(epoch.min()) <= int(epoch.max()) < size


def test_every_image_is_used_equally_often() -> None:
    stream = torch.cat([batch_positions(40, 64, 0, "labeled", step) for step in range(5)])
    assert torch.bincount(stream, minlength=40).tolist() == [8] * 40


def test_any_step_can_be_asked_for_alone_and_in_any_order() -> None:
    forward = [batch_positions(97, 16, 3, "unlabeled", step).tolist() for step in range(40)]
    backward = [batch_positions(97, 16, 3, "unlabeled", step).tolist() for step in reversed(range(40))]
    assert forward == backward[::-1]


def test_streams_and_seeds_are_independent() -> None:
    batches = [batch_positions(500, 32, seed, stream, 0).tolist() for seed in (0, 1) for stream in ("unlabeled", "extra")]
    assert len({tuple(batch) for batch in batches}) == 4
