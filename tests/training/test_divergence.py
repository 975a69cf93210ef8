"""Loss and gradients that leave the finite numbers: found at once on a CPU, by a flag and a replay elsewhere."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import experiment_of, tiny_spec, training_of
from crmatch.errors import DivergedError
from crmatch.methods import METHODS
from crmatch.runs.directory import RunDirectory, run_directory
from crmatch.runs.resume import locate_divergence
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import setting_of
from crmatch.training.checkpoint import checkpoint_files
from crmatch.training.health import ONE_CLASS_CHECKS, CollapseWatch, FiniteWatch, LateDivergenceError
from crmatch.training.loop import Observers, Training, train
from crmatch.training.runtime import Runtime


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_any_value_that_is_not_finite_is_seen_and_the_largest_finite_ones_are_not(value: float, where: str) -> None:
    largest = torch.finfo(torch.float32).max
    total, gradients = torch.tensor(largest), [torch.full((300, 7), -largest), torch.zeros(3)]
    watch, late = FiniteWatch(immediate=True), FiniteWatch(immediate=False)
    assert not watch.bad_step(total, gradients)
    late.bad_step(total, gradients)
    assert not late.bad_since_last_check()
    if where == "loss":
        total = torch.tensor(value)
    else:
        gradients[0][123, 4] = value
    assert watch.bad_step(total, gradients)
    assert not late.bad_step(total, gradients)
    late.bad_step(torch.tensor(0.0), [torch.zeros(2)])
    assert late.bad_since_last_check()
    assert not late.bad_since_last_check()


def spoil(training: Training, step: int) -> None:
    """Make one weight's gradient infinite at `step`, the loss staying finite."""
    weight = training.network.classifier.weight
    weight.register_hook(lambda gradient: gradient / 0.0 if training.step == step else gradient)


def test_a_gradient_that_is_not_finite_stops_before_weights_move(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes), stripes)
    spoil(training, 2)
    for _ in range(2):
        training.take_step()
    before = training.network.classifier.weight.detach().clone()
    with pytest.raises(DivergedError, match=r"the gradient is not finite at step 2: supervised = \d.*rotation = \d"):
        training.take_step()
    assert torch.equal(before, training.network.classifier.weight)


def test_where_the_device_must_not_wait_the_flag_is_read_at_log_points(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes), stripes)
    training.divergence_watch.immediate = False
    spoil(training, 4)
    lines: list[dict[str, Any]] = []
    with pytest.raises(LateDivergenceError, match="found after step 5"):
        train(training, Observers(log=lines.append))
    assert [line["step"] for line in lines] == [3]


def test_a_late_notice_is_replayed_from_the_last_checkpoint_to_the_first_bad_step(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a GPU, forced on a CPU: step 10 is bad, noticed at the log point after step 12, saved last after step 8."""
    monkeypatch.setattr(Runtime, "host_sync_is_free", property(lambda self: False))
    begin = Training.__post_init__
    monkeypatch.setattr(Training, "__post_init__", lambda self: (begin(self), spoil(self, 10))[0])
    spec = tiny_spec(stripes, **{"plan.evaluate_every": 100, "plan.log_every": 6})
    with pytest.raises(DivergedError) as caught:
        run(spec, Workspace.at(tmp_path, stripes))
    first, second = str(caught.value).splitlines()
    assert first.startswith("the gradient is not finite at step 10: supervised = ")
    (newest, _) = checkpoint_files(run_directory(tmp_path, spec, setting_of(spec, stripes)).checkpoints)
    assert newest.name.startswith("step-00000008")
    assert second == f"Try a smaller plan.learning_rate; the last good checkpoint is {newest.name}."


def test_a_divergence_before_the_first_checkpoint_says_so(stripes: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"is not finite at step \d.*\n.*no checkpoint had been saved before"):
        run(tiny_spec(stripes, **{"plan.learning_rate": 1e15}), Workspace.at(tmp_path, stripes))


def test_a_replay_that_stays_finite_keeps_the_late_notice(stripes: Path, tmp_path: Path) -> None:
    late = LateDivergenceError("noticed after step 2.\nAdvice.")
    found = locate_divergence(late, lambda: training_of(tiny_spec(stripes), stripes), RunDirectory(tmp_path), 2)
    assert str(found).startswith("noticed after step 2.\n")


def collapse_watch(caplog: pytest.LogCaptureFixture, steps: int = 1000) -> CollapseWatch:
    caplog.set_level(logging.WARNING)
    return CollapseWatch(("cat", "dog"), steps)


def test_a_class_that_takes_all_predictions_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = collapse_watch(caplog)
    dogs, both = torch.ones(40, dtype=torch.int64), torch.tensor([0, 1])
    steps = iter(range(250, 1000, 10))
    for predicted in [dogs] * (ONE_CLASS_CHECKS - 1) + [both]:
        watch.check_predictions(next(steps), lambda predicted=predicted: predicted)
    assert not caplog.records
    for _ in range(3 * ONE_CLASS_CHECKS):
        watch.check_predictions(next(steps), lambda: dogs)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "predicts 'dog' for 100 % of a sample of images; it may have collapsed" in text
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize(("steps", "log_every"), [(300, 10), (600, 20), (1000, 10), (1200, 12), (524_288, 512)])
def test_one_class_is_named_in_the_first_quarter_of_a_run_of_any_length(
    caplog: pytest.LogCaptureFixture, steps: int, log_every: int
) -> None:
    """Lengths and log points of the recipes tune, head, quick (1,000 and 1,200) and paper."""
    watch = collapse_watch(caplog, steps)
    for step in range(log_every, steps // 4 + 1, log_every):
        watch.check_predictions(step, lambda: torch.ones(40, dtype=torch.int64))
    assert len(caplog.records) == 1


def test_pseudo_labels_that_are_never_used_are_noticed_once_and_late(caplog: pytest.LogCaptureFixture) -> None:
    watch = collapse_watch(caplog)
    for step in range(10, 210, 10):
        watch.check_use(step, 0.0)
    assert not caplog.records
    for step in range(210, 600, 10):
        watch.check_use(step, 0.0)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "hardly any pseudo-label is confident enough to be used (0 %)" in text
    assert "Lower method.threshold" in text


ALIGNED = {"method.alignment": "uniform"}


@pytest.mark.parametrize(
    ("method", "keys"), [*((name, {}) for name in METHODS), ("fixmatch", ALIGNED), ("crmatch", ALIGNED)], ids=str
)
def test_a_run_that_predicts_one_class_is_reported_within_its_first_quarter(
    stripes: Path, caplog: pytest.LogCaptureFixture, method: str, keys: dict[str, Any]
) -> None:
    """Collapse is forced by a bias. Alignment hides it from pseudo-labels, and first stages have none."""
    caplog.set_level(logging.WARNING)
    plan = {"plan.steps": 220, "plan.log_every": 2, "plan.evaluate_every": 220, "plan.learning_rate": 1e-9}
    experiment = experiment_of(tiny_spec(stripes, method, **plan, **keys), stripes)
    training = experiment.training()
    training.network.classifier.weight.data.zero_()
    training.network.classifier.bias.data.copy_(torch.tensor([0.0, 4.0, 0.0]))
    train(training, experiment.observers(lambda line: None, stop=lambda: training.step == 55))
    texts = [record.getMessage() for record in caplog.records]
    assert sum("predicts 'stripe 1' for 100 % of a sample of images" in text for text in texts) == 1


def test_a_run_feeds_the_watch(
    stripes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.training.health.UNUSED_STEPS", 0)
    caplog.set_level(logging.WARNING)
    run(tiny_spec(stripes, **{"method.threshold": 1.0, "plan.log_every": 1}), Workspace.at(tmp_path, stripes))
    assert sum("hardly any pseudo-label" in record.getMessage() for record in caplog.records) == 1
