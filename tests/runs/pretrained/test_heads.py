"""Classifiers on frozen features, and what cross-validation over the labels says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from conftest import Command, options
from crmatch.errors import RequestError
from crmatch.predict.model import load
from crmatch.runs.cross_validation import Evidence, compare, cross_validate, folds
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace
from finished import write_photos
from pretrained_runs import SHORT_HEAD, head_experiment, needs_backbone, spec_of

pytestmark = [needs_backbone, pytest.mark.usefixtures("fast_heads")]


@pytest.mark.parametrize(
    "method", ["crmatch", "fixmatch", "freematch", "softmatch", "adamatch", "uda", "pseudo_label", "supervised"]
)
def test_a_head_is_trained_by_every_method_that_needs_weak_and_strong_views_only(workspace: Workspace, method: str) -> None:
    record = run(spec_of(workspace, method=method), workspace)
    assert record.error is not None
    assert record.error < 40  # of three classes


def test_a_method_that_needs_more_views_is_refused(workspace: Workspace) -> None:
    with pytest.raises(RequestError, match=r"mixmatch needs more\.\nUse one of crmatch"):
        recipe(workspace.setting("stripes@4"), "mixmatch", "head")


def test_cr_match_on_a_frozen_backbone_is_fixmatch_to_the_bit(workspace: Workspace) -> None:
    weights = [
        safetensors.torch.load_file(workspace.run_directory(spec).model)["classifier.weight"]
        for spec in (spec_of(workspace), spec_of(workspace, method="fixmatch"))
        if run(spec, workspace)
    ]
    assert torch.equal(*weights)


def test_the_model_of_a_head_predicts_images_as_it_was_measured_on_features(workspace: Workspace) -> None:
    spec = spec_of(workspace)
    record = run(spec, workspace)
    data, _ = workspace.load(spec)
    assert data.test is not None
    model = load(workspace.run_directory(spec).path)
    wrong = model.predict_probabilities(data.test.images).argmax(dim=1) != data.test.labels
    # Half-precision features may move an image that lies on the border of two classes.
    assert abs(100 * wrong.float().mean().item() - record.error) <= 100 / len(data.test)
    assert model.config["architecture"] == {"size": 0}


def test_a_head_trains_in_double_precision_too(workspace: Workspace) -> None:
    assert run(spec_of(workspace, precision="fp64"), workspace).error == run(spec_of(workspace), workspace).error


@pytest.mark.parametrize("changes", [{"augmentation.policy": "ctaugment"}, {"method.rotation_weight": 1.0}])
def test_what_a_frozen_backbone_cannot_do_is_refused(workspace: Workspace, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"frozen.*\nUse "):
        head_experiment(workspace, spec_of(workspace, **changes))


def test_folds_hold_out_every_label_once_but_never_the_only_one_of_its_class() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    masks = torch.stack(folds(labels, seed=0))
    assert masks.sum(dim=0).tolist() == [1] * 9 + [0]
    for label in range(3):
        assert all((~mask & (labels == label)).any() for mask in masks)
    assert all(torch.equal(*pair) for pair in zip(folds(labels, 0), folds(labels, 0), strict=True))


def test_cross_validation_predicts_labels_that_were_not_trained_on(workspace: Workspace) -> None:
    experiment = head_experiment(workspace, spec_of(workspace))
    found = cross_validate(experiment)
    assert found is not None
    assert sorted(found[1].tolist()) == sorted(experiment.data.train.labels[experiment.split.labeled].tolist())
    assert (found[0].argmax(dim=1) == found[1]).double().mean() > 0.66
    shuffled = experiment.data.train.labels.clone()
    shuffled[experiment.split.labeled] = shuffled[experiment.split.labeled].roll(2)
    object.__setattr__(experiment.data.train, "labels", shuffled)
    wrong = cross_validate(experiment)
    assert wrong is not None
    assert (wrong[0].argmax(dim=1) == wrong[1]).double().mean() < 0.66  # labels that follow no rule cannot be predicted


def test_a_head_is_calibrated_on_labels_that_were_held_out_and_measured_on_the_test_set(workspace: Workspace) -> None:
    spec = spec_of(workspace)
    record, supervised = run(spec, workspace), run(spec_of(workspace, method="supervised"), workspace)
    model = load(workspace.run_directory(spec).path)
    assert model.calibration is not None
    assert (model.calibration.fitted_on, model.calibration.fitted_images) == ("labels", 12)
    assert model.calibration.above(0.0)[0] == record.test_images
    evidence = compare(supervised, record)
    assert evidence is not None
    assert evidence[1:] == (record.cross_validation.error, 12, 3)


@pytest.mark.process
def test_without_a_test_set_the_error_is_estimated_by_cross_validation(crmatch: Command, tmp_path: Path) -> None:
    folder, places = write_photos(tmp_path / "photos", labeled=12, unlabeled=12), ["--data-dir", tmp_path, "--out", tmp_path]
    outcome = crmatch("train", folder, "--no-baseline", *options(SHORT_HEAD), *places)
    assert outcome.code == 0, outcome.err
    assert "estimated error" in outcome.out
    assert "by cross-validation over 12 labels" in outcome.out
    (card,) = tmp_path.rglob("README.md")
    assert "not measured; estimated" in card.read_text()
    assert "fitted on labels held out in cross-validation (12 images)" in card.read_text()


def test_without_a_label_to_hold_out_there_is_no_cross_validation(workspace: Workspace) -> None:
    spec = replace(recipe(workspace.setting("stripes@1"), "crmatch", "head"), **SHORT_HEAD)
    assert cross_validate(head_experiment(workspace, spec)) is None


def test_two_classes_at_chance_are_features_that_do_not_fit() -> None:
    assert not Evidence(48, 50, 40, 2).features_fit
    assert Evidence(20, 30, 40, 2).features_fit


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(30, 22, 40, 10), ["30 % error from the labels alone, 22 % with the unlabeled images", "images help"]),
        (Evidence(22, 30, 40, 10), ["the labels alone are the better choice"]),  # a standard error is 6.5 points
        (Evidence(22, 28, 40, 10), ["28 % with the unlabeled images, which is no clear difference"]),
        (Evidence(78, 80, 40, 10), ["hardly separate these classes", "--backbone none"]),
    ],
)
def test_evidence_is_told_in_words_and_features_that_do_not_fit_are_named(evidence: Evidence, words: list[str]) -> None:
    text = "\n".join(evidence.lines())
    assert all(word in text for word in words)
    assert ("hardly separate" in text) is not evidence.features_fit
