"""Deep label propagation: two stages, propagation before every epoch of the second, and a weight for every image."""

from __future__ import annotations

from pathlib import Path

import torch
from kit import LABELED, assert_terms, first_stage_batch, make_batch, make_models, take

from conftest import tiny_spec, training_of
from crmatch.methods import LabelPropagation
from reference import label_propagation as reference
from reference.crmatch_formulas import supervised_loss


def test_the_terms_of_the_second_stage_equal_the_loop_over_images():
    case = take(LabelPropagation())
    memory, images = case.models.student.state("memory"), case.batch.unlabeled
    labels, certainty = memory["labels"][images].tolist(), memory["certainty"][images].tolist()
    supervised, pseudo_label = reference.loss_terms(
        case.logits("labeled"),
        case.batch.labels.tolist(),
        case.logits("weak"),
        labels,
        certainty,
        memory["class_weights"].tolist(),
    )
    assert_terms(case, {"supervised": supervised, "pseudo_label": pseudo_label}, {"supervised": 1.0, "pseudo_label": 1.0})
    assert case.found.pseudo_labels.labels.tolist() == labels
    assert case.found.pseudo_labels.used.tolist() == certainty


def test_the_first_stage_is_supervised_and_sees_labeled_images_only():
    case = take(LabelPropagation(), batch=first_stage_batch(LabelPropagation()))
    assert case.images_by_network() == ([LABELED], [])
    assert_terms(case, {"supervised": supervised_loss(case.batch.labels.tolist(), case.logits("labeled"))})


def test_without_the_pseudo_label_weight_labels_are_never_propagated():
    assert LabelPropagation(pseudo_label_weight=0).refresh_every(5, 100) is None


def test_an_image_of_no_certainty_gives_no_gradient():
    method = LabelPropagation()
    batch, models = make_batch(method), make_models(method)
    models.student.state("memory")["certainty"].zero_()
    models.student.eval()  # batch statistics would connect the images
    images = batch.views["weak"].requires_grad_()
    take(method, batch=batch, models=models).found.total.backward()
    assert not images.grad.any()


def test_labels_are_propagated_before_every_epoch_of_the_second_stage_and_never_else(stripes: Path):
    training = training_of(tiny_spec(stripes, "label_propagation"), stripes)  # 180 passes would be longer than half of the run
    memory = training.network.state("memory")
    changed = []
    for step in range(20):
        before = memory["certainty"].clone()
        training.take_step()
        if not torch.equal(before, memory["certainty"]):
            changed.append(step)
    assert training.steps_per_epoch == 3
    assert changed == [10, 13, 16, 19]
    assert float(memory["certainty"].max()) <= 1
