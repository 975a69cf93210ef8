"""`plan.start_size`: a run begins with smaller images than it ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import experiment_of, tiny_spec, training_of
from crmatch.augment.batches import Normalizer
from crmatch.cli.display import Display
from crmatch.data.settings import parse_setting
from crmatch.errors import RequestError, StoppedError
from crmatch.methods import METHODS
from crmatch.networks.config import PretrainedConfig
from crmatch.runs import timing
from crmatch.runs.cost import estimate
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import quick_start_size, recipe
from crmatch.spec.run_spec import replace
from crmatch.training.loop import Training, train
from finished import result_of
from reference.reduction import reduced

GROWING = {"plan.start_size": 12, "plan.start_share": 0.25}  # `stripes` has 16 pixels


@pytest.mark.parametrize(("side", "size", "channels"), [(32, 20, 3), (16, 12, 1), (9, 8, 3)])
def test_images_are_reduced_as_in_the_slow_version(side: int, size: int, channels: int) -> None:
    images = torch.randint(0, 256, (2, channels, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = [0.4] * channels, [0.3] * channels
    normalized = Normalizer(mean, std, torch.float64)(images)
    found = Normalizer(mean, std, torch.float64, size=size)(images)
    assert found.is_contiguous(memory_format=torch.channels_last)
    for one, expected in zip(found, normalized, strict=True):
        torch.testing.assert_close(one, torch.from_numpy(reduced(expected.numpy(), size)))


def test_the_first_steps_have_small_images_that_show_what_the_full_size_would(stripes: Path) -> None:
    growing, plain = (training_of(tiny_spec(stripes, **keys), stripes) for keys in (GROWING, {}))
    for step, side in ((0, 12), (4, 12), (5, 16), (19, 16)):
        views, full = growing.batches.batch(step).views, plain.batches.batch(step).views
        for name, images in views.items():
            assert images.shape[2:] == (side, side)
            expected = full[name] if side == 16 else torch.nn.functional.interpolate(
                full[name], size=(side, side), mode="bilinear", antialias=True
            )  # fmt: skip
            assert torch.equal(images, expected)
    assert [len(block[0, 0]) for step in (4, 5) for block in growing.batches.pool("labeled", "weak", step)] == [12, 16]


@pytest.mark.parametrize("keys", [{}, {"method.projection": "mlp"}])
def test_heads_take_feature_maps_of_one_size(stripes: Path, keys: dict[str, Any]) -> None:
    """The projection flattens the feature map, so the small images' map is enlarged to its size; evaluation leaves it alone."""
    training = training_of(tiny_spec(stripes, **GROWING, **{"method.threshold": 0.0}, **keys), stripes)
    shapes: list[Any] = []
    training.network.heads["projection"].register_forward_pre_hook(lambda head, inputs: shapes.append(inputs[0].shape[1]))
    for _ in range(6):
        training.take_step()
    assert len(shapes) == 12  # two views per step
    assert len(set(shapes)) == 1
    training.network.eval()
    assert training.network(torch.zeros(1, 3, 12, 12)).feature_map.shape[2:] != training.network.map_size


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_trains_at_both_sizes(stripes: Path, method: str) -> None:
    network = {**tiny_spec(stripes, method).network.model_dump(), "kind": "fast"}
    keys = {name: network[name] for name in ("kind", "normalize_features")} | {"filters": 4}
    training = training_of(tiny_spec(stripes, method, **GROWING, **{"plan.steps": 8, "network": keys}), stripes)
    for _ in range(8):
        _, loss = training.take_step()
        assert loss.total.isfinite()


def test_models_are_evaluated_at_the_size_on_which_they_were_trained_last(stripes: Path) -> None:
    experiment = experiment_of(tiny_spec(stripes, **GROWING), stripes)
    training, sizes = experiment.training(), []
    training.ema.network.register_forward_pre_hook(lambda network, inputs: sizes.append(inputs[0].shape[2]))
    train(training, experiment.observers(lambda line: None))
    assert sizes == [12, 16, 16, 16]  # after 5, 10, 15 and 20 steps
    assert experiment.measure(training.models.teacher) is not None
    assert sizes[-1] == 16


@pytest.mark.parametrize(
    ("method", "policy"), [("crmatch", "randaugment"), ("crmatch", "ctaugment"), ("label_propagation", "randaugment")]
)
def test_resuming_equals_never_having_stopped(stripes: Path, tmp_path: Path, method: str, policy: str) -> None:
    spec = tiny_spec(stripes, method, **GROWING, **{"plan.steps": 8, "augmentation.policy": policy})
    places = [Workspace.at(tmp_path / out, stripes) for out in ("straight", "stopped")]
    run(spec, places[0])
    for polls in (1, 1, 3):  # stopped after 1, 2 and 5 steps; the first two have small images
        steps = iter([False] * polls)
        with pytest.raises(StoppedError):
            run(spec, places[1], stop=lambda steps=steps: next(steps, True))
    run(spec, places[1])
    expected, actual = (result_of(place.run_directory(spec)) for place in places)
    assert actual == expected


@pytest.mark.parametrize("seconds", [1e3, 1e5])
def test_time_is_planned_for_both_sizes(stripes: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """By a clock on which small steps take 1 s and others 3 s: 2.5 s on average, however many steps are timed."""
    experiment = experiment_of(tiny_spec(stripes, "supervised", **GROWING), stripes)
    clock = [0.0]

    def take_step(training: Training) -> None:
        clock[0] += 1.0 if training.batches.normalizer_at(training.step) is not training.batches.normalizer else 3.0
        training.step += 1

    monkeypatch.setattr(Training, "take_step", take_step)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert timing.fit_steps(experiment, seconds).plan.steps == pytest.approx(0.95 * seconds / 2.5, rel=0.001, abs=1)


def test_the_time_left_counts_small_images_in_proportion_to_their_pixels(
    stripes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five steps take 9/16 s each and fifteen take 1 s each, so 14 s are left after six steps."""
    display = Display(tiny_spec(stripes, **GROWING))
    display.start(0, 20)
    for step, now in ((1, 0.0), (6, 4 * 9 / 16 + 1)):
        monkeypatch.setattr("time.perf_counter", lambda now=now: now)
        display.advance(step)
    assert "0.65 s per step: about 14 s for the rest" in capsys.readouterr().err
    display = Display(tiny_spec(stripes, **GROWING, **{"plan.steps": 80}))
    display.start(0, 80)
    for step, now in ((1, 0.0), (6, 5 * 9 / 16)):
        monkeypatch.setattr("time.perf_counter", lambda now=now: now)
        display.advance(step)
    assert "0.56 s per step at first: about 68 s for the rest" in capsys.readouterr().err


def test_the_estimated_time_is_the_mean_of_both_sizes() -> None:
    setting = parse_setting("cifar10@25")
    spec = replace(recipe(setting, "crmatch", "quick"), **{"data.image_size": 32})
    small, large = (estimate(replace(spec, **{"data.image_size": size}), setting) for size in (20, 32))
    mixed = estimate(replace(spec, **{"plan.start_size": 20, "plan.start_share": 0.75}), setting)
    assert small.cpu_seconds is not None
    assert large.cpu_seconds is not None
    assert mixed.cpu_seconds == pytest.approx(0.75 * small.cpu_seconds + 0.25 * large.cpu_seconds)
    assert mixed.memory_bytes == large.memory_bytes


@pytest.mark.parametrize(
    ("minutes", "changes", "start"),
    [
        (4.9, {"data.image_size": 32}, None),
        (5, {"data.image_size": 32}, 20),
        (60, {"data.image_size": 24}, None),
        (5, {"data.image_size": 64}, 40),
        (5, {"data.image_size": 32, "network": "wrn-28-2"}, None),
    ],
)
def test_long_runs_of_quick_begin_with_small_images(minutes: float, changes: dict[str, Any], start: int | None) -> None:
    spec = replace(recipe("cifar10@25", "crmatch", "quick"), **changes)
    assert quick_start_size(spec, minutes) == start
    assert quick_start_size(recipe("digits@4"), minutes) is None


def test_a_start_size_that_makes_no_sense_is_refused(stripes: Path) -> None:
    with pytest.raises(RequestError, match=r"plan\.start_size 16 must be below data\.image_size 16"):
        tiny_spec(stripes, **{"plan.start_size": 16})
    with pytest.raises(RequestError, match=r"plan\.start_size is for networks without pretrained weights"):
        tiny_spec(stripes, **{"plan.start_size": 8, "network": PretrainedConfig()})
