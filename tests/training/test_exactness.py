"""Equal to the bit: resuming, replaying one step, and FixMatch as CR-Match without its two terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import QUICK, Trained, tiny_spec, training_of
from crmatch.errors import StoppedError
from crmatch.methods import METHODS
from crmatch.methods.base import Step
from crmatch.randomness import generator
from crmatch.runs.directory import RunDirectory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.training.checkpoint import load_checkpoint
from finished import result_of

EAGER = {"method.threshold": 0.4}  # so that all terms are active within 20 steps


def stop_after(steps: int) -> Any:
    remaining = iter([False] * steps)
    return lambda: next(remaining, True)


STOPS = (4,) if QUICK else (1, 4, 7)


@pytest.mark.parametrize(
    ("method", "policy"), [*((method, "randaugment") for method in sorted(METHODS)), ("crmatch", "ctaugment")]
)
def test_stopping_and_resuming_equals_never_having_stopped(stripes: Path, tmp_path: Path, method: str, policy: str) -> None:
    keys = EAGER if "threshold" in tiny_spec(stripes, method).method.model_dump() else {}
    spec = tiny_spec(stripes, method, **keys, **{"plan.steps": 8, "augmentation.policy": policy})
    places = [Workspace.at(tmp_path / out, stripes) for out in ("straight", "stopped")]
    straight = run(spec, places[0])
    before = 0
    for stop in STOPS:
        with pytest.raises(StoppedError, match=f"stopped after step {stop} of 8"):
            run(spec, places[1], stop=stop_after(stop - before))
        before = stop
    run(spec, places[1])
    expected, actual = (result_of(place.run_directory(spec)) for place in places)
    assert {"network", "average", "optimizer"} <= {name.partition("/")[0] for name in expected.state}
    assert actual == expected
    assert (straight.policy is not None) == (policy == "ctaugment")


def test_a_kill_loses_no_more_than_one_interval_and_nothing_of_the_result(trained: Trained, tmp_path: Path) -> None:
    spec, workspace = tiny_spec(trained.data_dir), Workspace(tmp_path, trained.data_dir)

    class Killed(BaseException):
        pass

    class KilledAtStep11:
        def start(self, done: int, total: int) -> None: ...
        def log(self, line: dict[str, Any]) -> None: ...
        def advance(self, done: int) -> None:
            if done == 11:
                raise Killed

    with pytest.raises(Killed):
        run(spec, workspace, progress=KilledAtStep11())
    directory = workspace.run_directory(spec)
    checkpoint = load_checkpoint(directory.checkpoints)
    assert checkpoint is not None
    assert checkpoint.step == 8
    assert directory.read_metrics()[-1]["step"] == 10
    run(spec, workspace)
    assert result_of(directory) == result_of(RunDirectory(trained.run))


def test_fixmatch_is_crmatch_without_its_two_terms_over_20_steps(stripes: Path) -> None:
    fixmatch = training_of(tiny_spec(stripes, "fixmatch", **EAGER), stripes)
    without = {"method.feature_distance_weight": 0, "method.rotation_weight": 0}
    crmatch = training_of(tiny_spec(stripes, "crmatch", **EAGER, **without), stripes)
    used = 0.0
    for _ in range(20):
        _, one = fixmatch.take_step()
        _, two = crmatch.take_step()
        assert torch.equal(one.total, two.total)
        assert one.pseudo_labels is not None
        used += one.pseudo_labels.used.sum().item()
    assert used > 0
    first, second = fixmatch.checkpoint().tensors, crmatch.checkpoint().tensors
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("step", [0, 7])
def test_replaying_a_step_alone_gives_the_same_batch_views_and_loss(stripes: Path, step: int) -> None:
    spec = tiny_spec(stripes, **EAGER)
    training = training_of(spec, stripes)
    for _ in range(step):
        training.take_step()
    checkpoint = training.checkpoint()
    state = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    batch, loss = training.take_step()

    replay = training_of(spec, stripes)
    replay.restore(checkpoint._replace(tensors=state))
    alone = replay.batches.batch(step)
    assert torch.equal(alone.labels, batch.labels)
    assert torch.equal(alone.unlabeled, batch.unlabeled)
    assert alone.views.keys() == batch.views.keys()
    assert all(torch.equal(images, batch.views[name]) for name, images in alone.views.items())
    again = spec.method.loss(alone, replay.models, Step(step, 20, lambda stream: generator(spec.seed, stream, step)))
    assert {name: term.item() for name, term in again.terms.items()} == {name: term.item() for name, term in loss.terms.items()}


def test_training_touches_no_global_random_state(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes), stripes)
    before = torch.get_rng_state()
    training.take_step()
    assert torch.equal(before, torch.get_rng_state())
