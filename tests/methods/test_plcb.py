"""PLCB: soft labels replaced at the end of epochs, one MixUp share per batch, and two regularizers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kit import CLASSES, LABELED, assert_terms, first_stage_batch, make_network, take

from conftest import tiny_spec, training_of
from crmatch.methods import PLCB
from crmatch.methods.mixup import draw_mixing
from reference import plcb_formulas as reference


def take_stage(warm_up, **changes):
    method = PLCB(**changes)
    return take(method, batch=first_stage_batch(method) if warm_up else None)


def memory_of(case):
    return case.models.student.state("memory")


@pytest.mark.parametrize("warm_up", [True, False])
def test_every_term_equals_the_loop_over_mixed_images(warm_up):
    case = take_stage(warm_up)
    batch, record = case.batch, case.passes[-1]
    images, labels = batch.views["labeled"], torch.eye(CLASSES, dtype=torch.float64)[batch.labels]
    if not warm_up:
        images = torch.cat([images, batch.views["weak"]])
        labels = torch.cat([labels, memory_of(case)["labels"][batch.unlabeled]])
    mixing = draw_mixing(images, 1.0, case.step.generator("mixup"), per="batch", keep_larger=False)
    share = mixing.share[0].item()
    mixed = [share * one + (1 - share) * images[other] for one, other in zip(images, mixing.partner, strict=True)]
    torch.testing.assert_close(record.images, torch.stack(mixed))
    logits = record.outputs.logits.tolist()
    terms = {
        "mixed": reference.mixed(logits, labels.tolist(), labels[mixing.partner].tolist(), share),
        "class_balance": reference.class_balance(logits),
        "entropy": reference.entropy(logits),
    }
    assert_terms(case, terms, {"mixed": 1.0, "class_balance": 0.8, "entropy": 0.4})
    assert (case.found.pseudo_labels is None) == warm_up


def test_the_warm_up_sees_labeled_images_only_and_writes_no_labels():
    case, before = take_stage(warm_up=True), make_network(PLCB()).state("memory")
    assert case.images_by_network() == ([LABELED], [])
    assert all(torch.equal(before[name], labels) for name, labels in memory_of(case).items())


@pytest.mark.parametrize("images", ["augmented", "plain"])
def test_the_next_labels_are_predictions_on_the_images_asked_for_and_the_current_ones_stay(images):
    case = take_stage(False, label_images=images)
    names = ("labeled", "weak") if images == "augmented" else ("plain_labeled", "plain")
    logits = case.outputs(torch.cat([case.batch.views[name] for name in names])).logits
    expected = make_network(PLCB()).state("memory")
    expected["next_labels"][case.batch.unlabeled] = logits[LABELED:].softmax(dim=1)
    for name, labels in memory_of(case).items():
        torch.testing.assert_close(labels, expected[name])
        assert not labels.requires_grad


def test_labels_change_only_at_the_ends_of_epochs(stripes: Path):
    training = training_of(tiny_spec(stripes, "plcb", **{"method.warmup_epochs": 4}), stripes)  # one batch holds all 6 labels
    memory = training.network.state("memory")
    changed, written = [], []
    for step in range(20):
        labels, following = memory["labels"].clone(), memory["next_labels"].clone()
        training.take_step()
        changed += [step] * (not torch.equal(labels, memory["labels"]))
        written += [step] * (not torch.equal(following, memory["next_labels"]))
        if step in (7, 10):
            assert torch.equal(memory["labels"], following)
    assert training.steps_per_epoch == 3
    assert changed == [4, 7, 10, 13, 16, 19]
    assert written == list(range(4, 20))
    torch.testing.assert_close(memory["labels"].sum(dim=1), torch.ones(30))


def test_the_first_labels_are_predictions_of_the_warmed_up_network(stripes: Path):
    training = training_of(tiny_spec(stripes, "plcb"), stripes)
    training.take_step()
    network = copy.deepcopy(training.network).eval()
    with torch.no_grad():
        expected = torch.cat([network(images).logits for images in training.batches.pool("unlabeled")]).softmax(dim=1)
    training.take_step()
    torch.testing.assert_close(training.network.state("memory")["labels"], expected)
