"""First stages of label propagation and PLCB: whole batches of labeled images, counted in passes over them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from conftest import tiny_spec, training_of
from crmatch.data.settings import parse_setting
from crmatch.spec.recipes import recipe
from reference.first_stage import batch_sizes

FIELDS = {"label_propagation": "method.supervised_epochs", "plcb": "method.warmup_epochs"}


@pytest.mark.parametrize(
    ("method", "setting", "labeled", "passes", "batch"),
    [
        ("label_propagation", "mini_imagenet@40", 4000, 180, 128),  # 31 steps per pass
        ("label_propagation", "mini_imagenet@100", 10_000, 180, 128),
        ("label_propagation", "cifar10@400", 4000, 180, 100),
        ("plcb", "mini_imagenet@40", 4000, 10, 100),  # 40 steps per pass
        ("plcb", "cifar10@400", 4000, 10, 100),
    ],
)
@pytest.mark.parametrize("name", ["paper", "original"])
def test_it_has_the_passes_and_batches_of_the_official_code(method, setting, labeled, passes, batch, name):
    spec = recipe(parse_setting(setting), method, name)
    sizes, stage = batch_sizes(labeled, batch, passes), spec.method.first_stage(labeled)
    assert stage == (len(sizes), sizes[0])
    epoch = spec.plan.steps_per_epoch(unlabeled=46_000)
    assert spec.plan.total_steps(46_000, stage.steps) == stage.steps + spec.plan.unlabeled_epochs * epoch


@pytest.mark.parametrize("method", FIELDS)
@pytest.mark.parametrize(("labels", "labeled", "batch"), [(2, 6, 6), (8, 24, 16)])
def test_a_run_starts_with_passes_over_its_labels_and_then_uses_all_images(stripes: Path, method, labels, labeled, batch):
    spec = tiny_spec(stripes, method, f"stripes@{labels}", **{FIELDS[method]: 4, "plan.unlabeled_batch_size": 3})
    training = training_of(spec, stripes)
    assert training.first_stage == len(batch_sizes(labeled, 16, 4)) == 4
    found = [(len(taken.labels), sorted(taken.views), loss.pseudo_labels is None) for taken, loss in steps(training, 5)]
    assert found == [(batch, ["labeled"], True)] * 4 + [(6, ["labeled", "weak"], False)]


@pytest.mark.parametrize("method", FIELDS)
@pytest.mark.parametrize("setting", ["digits@4", "svhn@25"])
def test_in_short_runs_it_has_at_least_ten_passes_and_at_most_half_of_the_steps(stripes: Path, method, setting):
    spec = recipe(parse_setting(setting), method, "quick")
    labeled = {"digits@4": 40, "svhn@25": 250}[setting]
    stage = spec.method.first_stage(labeled)
    assert 10 * labeled <= stage.steps * stage.batch_size * 1.3  # batches at the end of a pass are dropped
    assert stage.batch_size == spec.plan.labeled_batch_size  # larger batches overfit few labels
    assert training_of(tiny_spec(stripes, method, **{FIELDS[method]: 100}), stripes).first_stage == 10  # of 20 steps


def test_the_first_stage_has_the_first_phase_of_the_schedule_for_itself():
    propagation, plcb = (recipe(parse_setting("mini_imagenet@40"), method, "paper").plan for method in FIELDS)
    cosine = [(1 + math.cos(math.pi * epoch / 210)) / 2 for epoch in range(180)]
    for stage, start, length in [(180, 0, 180), (180, 180, 180)]:
        factors = [propagation.rate_factor(start + epoch, 360, stage) for epoch in range(length)]
        assert factors == pytest.approx(cosine)
    expected = [1.0] * (10 + 250) + [0.1] * 100 + [0.01] * 50
    assert [plcb.rate_factor(epoch, 410, 10) for epoch in range(410)] == pytest.approx(expected)


def steps(training, count):
    return [training.take_step() for _ in range(count)]
