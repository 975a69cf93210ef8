"""Runs that tune the whole pretrained network."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from conftest import Command, options
from crmatch.data.settings import parse_setting
from crmatch.errors import StoppedError
from crmatch.predict.model import load
from crmatch.runs.run import make_experiment, run
from crmatch.runs.timing import fit_steps
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import head_of, recipe
from crmatch.spec.run_spec import replace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime
from pretrained_runs import SMALL, needs_backbone, spec_of, tuned

pytestmark = [needs_backbone, pytest.mark.usefixtures("fast_heads")]


@pytest.mark.parametrize("name", ["head", "tune"])
def test_pretrained_recipes_of_crmatch_are_fixmatch(name: str) -> None:
    ours, other = (recipe(parse_setting("digits@4"), method, name) for method in ("crmatch", "fixmatch"))
    assert [view.name for view in ours.method.views] == [view.name for view in other.method.views]
    assert ours.method.weights == other.method.weights
    assert ours.plan == other.plan


@pytest.mark.parametrize("name", ["head", "tune"])
def test_a_stopped_run_ends_as_if_it_had_never_been_stopped(workspace: Workspace, tmp_path: Path, name: str) -> None:
    other = Workspace(shutil.copytree(workspace.out, tmp_path / "stopped"), workspace.data_dir)
    spec = spec_of(workspace, name)
    straight = run(spec, workspace)
    remaining = iter([False] * 3)
    with pytest.raises(StoppedError):
        run(spec, other, stop=lambda: next(remaining, True))
    assert run(spec, other).ema == straight.ema
    files = [place.run_directory(spec).model.read_bytes() for place in (workspace, other)]
    assert files[0] == files[1]


def test_tuning_starts_from_the_head_and_moves_all_but_the_first_layers_and_the_running_statistics(
    workspace: Workspace,
) -> None:
    experiment = tuned(workspace)
    training, spec = experiment.training(), experiment.spec
    head = load(workspace.run_directory(head_of(spec, workspace.setting_of(spec))).path)
    before = {name: value.clone() for name, value in training.network.state_dict().items()}
    for name, value in head.network.state_dict().items():
        assert torch.equal(before[name], value), name
    images = experiment.normalizer(experiment.data.train.images[:8])
    assert torch.equal(training.ema.network(images).logits, head.network(images).logits)
    for _ in range(2):
        training.take_step()
    after = training.network.state_dict()
    assert all("running" not in name or torch.equal(value, before[name]) for name, value in after.items())
    still = [name for name, _ in training.network.named_parameters() if torch.equal(after[name], before[name])]
    body = [f"backbone.body.{name}" for name, _ in training.network.backbone.body.named_parameters()]
    assert still == body[: int(0.31 * len(body))]
    assert still[-1].startswith("backbone.body.blocks.4.")  # stem and five of the 16 blocks


def test_the_backbone_has_a_learning_rate_of_its_own(workspace: Workspace) -> None:
    experiment = tuned(workspace)
    training = experiment.training()
    rates = {id(parameter): group["rate"] for group in training.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in training.network.named_parameters():
        if not parameter.requires_grad:
            continue
        assert rates[id(parameter)] == (experiment.spec.plan.backbone_rate if name.startswith("backbone.") else 1), name


def test_a_tuned_network_is_the_start_of_the_next_round(workspace: Workspace) -> None:
    spec = spec_of(workspace, "tune")
    before = run(spec, workspace)
    weights = json.loads(workspace.run_directory(spec).model_config.read_text())["checksum"][:8]
    start = f"{workspace.run_directory(spec).path}#{weights}"
    again, elsewhere = replace(spec, start_from=start), Workspace(workspace.out / "elsewhere", workspace.data_dir)
    experiment = make_experiment(
        again, *workspace.load(again), choose_runtime(Execution("cpu")), elsewhere, Execution(), None, bool
    )
    kept = safetensors.torch.load_file(workspace.run_directory(spec).model)
    state = experiment.training().models.student.state_dict()
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    assert not elsewhere.out.exists()  # no head was trained for it
    assert run(again, elsewhere).final["loss/total"] != before.final["loss/total"]


def test_as_many_steps_as_fit_into_the_time_are_planned(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tuned(workspace, **{"plan.minutes": 1.0})
    clock = itertools.count(step=0.25)  # a step takes 0.25 s, and an evaluation as long
    monkeypatch.setattr("crmatch.runs.timing.time", SimpleNamespace(perf_counter=clock.__next__))
    plan = fit_steps(experiment, 200.0).plan
    assert plan.steps == int((0.95 * 200 - 10 * 0.25) / 0.25)
    assert next(clock) == 0.25 * (1 + 8 + 2)  # a hundredth of the time: eight steps
    assert plan.evaluate_every * 4 < plan.steps <= plan.evaluate_every * 5
    assert fit_steps(experiment, -1.0).plan.steps == 1


def test_minutes_are_kept_with_their_steps_so_that_the_same_command_resumes(
    crmatch: Command, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.runs.timing.RESERVE", 0.1)  # plan for half a second
    monkeypatch.setattr("crmatch.cli.session.LEAST_TUNING_STEPS", 1)
    command = ["train", "stripes@4", "--backbone", "efficientnet-lite0", "--minutes", "0.1"]
    places = [*options(SMALL), "--data-dir", workspace.data_dir, "--out", workspace.out, "--json"]
    first, second = (crmatch(*command, *places) for _ in range(2))
    assert first.code == 0, first.err
    assert first.out == second.out
    assert '"minutes": 0.1' in first.out


def test_if_the_time_is_too_short_to_tune_the_head_is_kept(
    crmatch: Command, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.cli.session.LEAST_TUNING_STEPS", 10_000)  # too many for any machine
    command = ["train", "stripes@4", "--backbone", "efficientnet-lite0", "--minutes", "0.1", "--name", "mine"]
    outcome = crmatch(*command, *options(SMALL), "--data-dir", workspace.data_dir, "--out", workspace.out)
    assert outcome.code == 0, outcome.err
    assert "Use more --minutes" in outcome.err
    assert "crmatch-head" in outcome.out
    assert not (workspace.out / "stripes@4" / "mine").exists()
