"""Deep label propagation: two stages, a refresh before every epoch of the second, and every image's own weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_spec, training_of
from crmatch.augment.views import Batch
from crmatch.data.settings import parse_setting
from crmatch.methods import LabelPropagation
from crmatch.methods.base import Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import NETWORKS, WideResNetConfig
from crmatch.spec.recipes import recipe
from reference import label_propagation as reference

LATE = Step(9, 10, lambda stream: torch.Generator())
EARLY = Step(4, 10, lambda stream: torch.Generator())


def make_student(method: LabelPropagation) -> Any:
    config = WideResNetConfig(filters=4, repeat=1)
    student = build_network(config, channels=2, image_size=8, classes=3, unlabeled=8, heads=method.heads).double()
    if "memory" in student.heads:
        memory: Any = student.state("memory")
        memory["labels"].copy_(torch.tensor([0, 1, 2, 0, 1, 2, 2, 2]))
        memory["certainty"].copy_(torch.linspace(0, 1, 8))
        memory["class_weights"].copy_(torch.tensor([2.0, 1.0, 0.5]))
    return student


def make_batch() -> Batch:
    random = torch.Generator().manual_seed(0)
    images = {"labeled": 4, "weak": 6}
    views = {name: torch.randn(count, 2, 8, 8, generator=random, dtype=torch.float64) for name, count in images.items()}
    return Batch(torch.tensor([0, 1, 2, 1]), views, torch.tensor([7, 0, 3, 5, 1, 2]))


def loss_of(method: LabelPropagation, step: Step = LATE) -> Any:
    student = make_student(method)
    return method.loss(make_batch(), Models(student, student), step)


def test_the_terms_of_the_second_stage_equal_the_loop_over_images() -> None:
    method, batch = LabelPropagation(), make_batch()
    student = make_student(method)
    found = method.loss(batch, Models(student, student), LATE)
    logits = make_student(method)(torch.cat([batch.views["labeled"], batch.views["weak"]])).logits.tolist()
    memory = student.state("memory")
    expected = reference.loss_terms(
        logits[:4],
        batch.labels.tolist(),
        logits[4:],
        memory["labels"][batch.unlabeled].tolist(),
        memory["certainty"][batch.unlabeled].tolist(),
        memory["class_weights"].tolist(),
    )
    assert [term.item() for term in found.terms.values()] == pytest.approx(expected, rel=1e-10)
    assert list(found.terms) == ["supervised", "pseudo_label"]
    assert found.total.item() == pytest.approx(sum(expected), rel=1e-10)
    assert found.pseudo_labels is not None
    assert found.pseudo_labels.labels.tolist() == [2, 0, 0, 2, 1, 2]


def test_the_first_stage_is_supervised_and_sees_labeled_images_only() -> None:
    method, batch = LabelPropagation(), make_batch()
    student = make_student(method)
    seen: list[int] = []
    student.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    found = method.loss(batch, Models(student, student), EARLY)
    logits = make_student(method)(batch.views["labeled"]).logits
    assert seen == [4]
    assert list(found.terms) == ["supervised"]
    assert found.total.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.labels).item(), rel=1e-10)


@pytest.mark.parametrize("term", ["supervised", "pseudo_label"])
def test_doubling_a_weight_adds_exactly_its_term(term: str) -> None:
    once, twice = loss_of(LabelPropagation()), loss_of(LabelPropagation(**{f"{term}_weight": 2.0}))
    assert twice.total.item() - once.total.item() == pytest.approx(once.terms[term].item(), rel=1e-10)


def test_without_the_pseudo_label_weight_it_is_supervised_to_the_end() -> None:
    method = LabelPropagation(pseudo_label_weight=0)
    assert [view.name for view in method.views] == ["labeled"]
    assert method.refresh_every(5, 100) is None
    assert method.heads(None) == {}  # type: ignore[arg-type]
    assert list(loss_of(method).terms) == ["supervised"]


def test_an_image_of_no_certainty_gives_no_gradient() -> None:
    method, batch = LabelPropagation(), make_batch()
    student = make_student(method)
    student.state("memory")["certainty"].zero_()
    images = batch.views["weak"].requires_grad_()
    student.eval()  # batch statistics would connect the images
    method.loss(batch, Models(student, student), LATE).total.backward()
    assert images.grad is not None
    assert not bool(images.grad.any())


def test_labels_are_propagated_before_every_epoch_of_the_second_half_and_never_else(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes, "label_propagation"), stripes)
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


def test_the_learning_rate_starts_again_with_the_second_stage() -> None:
    plan = recipe(parse_setting("cifar10@4"), "label_propagation", "paper").plan
    factors = [plan.rate_factor(step, 1000) for step in (0, 499, 500, 999)]
    assert factors[0] == factors[2] == 1
    assert factors[1] == pytest.approx(factors[3]) == pytest.approx(0.05, abs=0.01)


def test_the_papers_recipe_has_its_own_batches_rates_and_length() -> None:
    small, large = (recipe(parse_setting(name), "label_propagation", "paper") for name in ("cifar10@4", "mini_imagenet@40"))
    assert (small.plan.labeled_batch_size, small.plan.unlabeled_batch_size, small.plan.learning_rate) == (50, 50, 0.05)
    assert (large.plan.labeled_batch_size, large.plan.unlabeled_batch_size, large.plan.learning_rate) == (31, 97, 0.2)
    assert large.plan.unlabeled_epochs == 360
    assert large.plan.steps is None
    assert large.network.normalize_features
    assert (large.padding, large.augmentation.padding_mode, large.augmentation.rotation) == (8, "zero", 10)
    assert large.data.unlabeled == "remaining"


@pytest.mark.slow
def test_one_full_size_step_on_84_pixel_images() -> None:
    method = LabelPropagation()
    config = NETWORKS["resnet-18"].model_copy(update={"normalize_features": True})
    student = build_network(config, channels=3, image_size=84, classes=100, unlabeled=200, heads=method.heads)
    random = torch.Generator().manual_seed(0)
    views = {"labeled": torch.randn(31, 3, 84, 84, generator=random), "weak": torch.randn(97, 3, 84, 84, generator=random)}
    batch = Batch(torch.arange(31), views, torch.arange(97))
    student.state("memory")["certainty"].fill_(0.5)
    loss = method.loss(batch, Models(student, student), LATE)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert all(torch.isfinite(parameter.grad).all() for parameter in student.parameters())


@pytest.mark.slow
def test_it_beats_the_labels_alone_on_digits(tmp_path: Path) -> None:
    from crmatch.runs.run import run

    record = run(recipe(parse_setting("digits@4"), "label_propagation", "quick"), tmp_path)
    assert record.error is not None
    assert record.error < 9  # supervised only: 10.2 on this split
