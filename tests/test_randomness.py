from __future__ import annotations

import torch

from crmatch.randomness import generator


def draw(*key: object) -> list[float]:
    return torch.rand(4, generator=generator(*key)).tolist()  # type: ignore[arg-type]


def test_seed_stream_and_step_each_change_the_numbers_and_nothing_else_does() -> None:
    keys = [(seed, stream, step) for seed in (0, 1, 11) for stream in ("weak", "strong") for step in (0, 1, 11)]
    assert len({tuple(draw(*key)) for key in keys + keys}) == len(keys)


def test_neighboring_keys_are_uncorrelated() -> None:
    series = torch.stack([torch.rand(64, generator=generator(0, "weak", step)) for step in range(256)])
    correlation = torch.corrcoef(series)
    assert (correlation - torch.eye(256)).abs().max() < 0.75
    assert abs(series.mean().item() - 0.5) < 0.01


def test_global_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = draw(0, "init/backbone", 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    assert draw(0, "init/backbone", 0) == first
