"""PLCB: soft labels swapped at the end of epochs, one MixUp share per batch, and two regularizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_spec, training_of
from crmatch.augment.views import Batch
from crmatch.data.settings import parse_setting
from crmatch.methods import PLCB
from crmatch.methods.base import Models, Step
from crmatch.methods.mixup import draw_mixing
from crmatch.networks.build import build_network
from crmatch.networks.config import NETWORKS, WideResNetConfig
from crmatch.networks.dropout import dropout_from
from crmatch.spec.recipes import recipe
from reference import plcb_formulas as reference

WARM = Step(0, 10, lambda stream: torch.Generator().manual_seed(5))
LATE = Step(9, 10, lambda stream: torch.Generator().manual_seed(5))


def make_student(method: PLCB) -> Any:
    config = WideResNetConfig(filters=4, repeat=1)
    student = build_network(config, channels=2, image_size=8, classes=3, unlabeled=8, heads=method.heads).double()
    memory: Any = student.state("memory")
    memory["labels"].copy_(torch.rand(8, 3, generator=torch.Generator().manual_seed(1)).softmax(dim=1))
    return student


def make_batch(method: PLCB) -> Batch:
    random = torch.Generator().manual_seed(0)
    images = {"labeled": 4, "unlabeled": 6}
    views = {
        view.name: torch.randn(images[view.source], 2, 8, 8, generator=random, dtype=torch.float64) for view in method.views
    }
    return Batch(torch.tensor([0, 1, 2, 1]), views, torch.tensor([7, 0, 3, 5, 1, 2]))


def loss_of(method: PLCB, step: Step = LATE) -> Any:
    student = make_student(method)
    return method.loss(make_batch(method), Models(student, student), step)


@pytest.mark.parametrize("step", [WARM, LATE])
def test_every_term_equals_the_loop_over_mixed_images(step: Step) -> None:
    method = PLCB()
    batch, student = make_batch(method), make_student(method)
    images, labels = batch.views["labeled"], torch.eye(3, dtype=torch.float64)[batch.labels]
    if step is LATE:
        images = torch.cat([images, batch.views["weak"]])
        labels = torch.cat([labels, student.state("memory")["labels"][batch.unlabeled]])
    found = method.loss(batch, Models(student, student), step)
    mixing = draw_mixing(len(images), 1.0, step.generator("mixup"), torch.device("cpu"), per="batch", keep_larger=False)
    share = mixing.share[0].item()
    inputs = [share * one + (1 - share) * images[other] for one, other in zip(images, mixing.partner, strict=True)]
    logits = make_student(method)(torch.stack(inputs)).logits.tolist()
    expected = {
        "mixed": reference.mixed(logits, labels.tolist(), labels[mixing.partner].tolist(), share),
        "class_balance": reference.class_balance(logits),
        "entropy": reference.entropy(logits),
    }
    assert {name: term.item() for name, term in found.terms.items()} == pytest.approx(expected, rel=1e-9)
    total = expected["mixed"] + 0.8 * expected["class_balance"] + 0.4 * expected["entropy"]
    assert found.total.item() == pytest.approx(total, rel=1e-9)
    assert (found.pseudo_labels is None) == (step is WARM)


def test_the_warm_up_sees_labeled_images_only_and_writes_no_labels() -> None:
    method = PLCB()
    batch, student = make_batch(method), make_student(method)
    before = copy.deepcopy(student.state("memory"))
    seen: list[int] = []
    student.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    method.loss(batch, Models(student, student), WARM)
    assert seen == [4]
    assert all(torch.equal(before[name], student.state("memory")[name]) for name in ("labels", "next_labels"))


@pytest.mark.parametrize("images", ["augmented", "plain"])
def test_the_next_labels_are_predictions_on_the_images_asked_for_and_the_current_ones_stay(images: str) -> None:
    method = PLCB(label_images=images)  # type: ignore[arg-type]
    batch, student = make_batch(method), make_student(method)
    names = ("labeled", "weak") if images == "augmented" else ("plain_labeled", "plain")
    with torch.no_grad():
        logits = make_student(method)(torch.cat([batch.views[name] for name in names])).logits
    expected = student.state("memory")["next_labels"].clone()
    expected[batch.unlabeled] = logits[4:].softmax(dim=1)
    before = student.state("memory")["labels"].clone()
    method.loss(batch, Models(student, student), LATE)
    torch.testing.assert_close(student.state("memory")["next_labels"], expected)
    assert torch.equal(student.state("memory")["labels"], before)
    assert not student.state("memory")["next_labels"].requires_grad


def test_only_the_mixed_pass_moves_running_statistics() -> None:
    method = PLCB()
    student, other = make_student(method), make_student(method)
    batch = make_batch(method)
    method.loss(batch, Models(student, student), LATE)
    images = torch.cat([batch.views["labeled"], batch.views["weak"]])
    mixing = draw_mixing(10, 1.0, LATE.generator("mixup"), images.device, per="batch", keep_larger=False)
    other(mixing.apply(images))
    torch.testing.assert_close(student.backbone.norm.running_mean, other.backbone.norm.running_mean)
    assert student.backbone.norm.num_batches_tracked == 1


@pytest.mark.parametrize("term", ["class_balance", "entropy"])
def test_doubling_a_weight_adds_exactly_its_weighted_term_and_none_removes_it(term: str) -> None:
    once = loss_of(PLCB())
    weight = once.weights[term]
    twice, without = (loss_of(PLCB(**{f"{term}_weight": factor * weight})) for factor in (2, 0))
    assert twice.total.item() - once.total.item() == pytest.approx(weight * once.terms[term].item(), rel=1e-9)
    assert once.total.item() - without.total.item() == pytest.approx(weight * once.terms[term].item(), rel=1e-9)
    assert term not in without.terms


def test_labels_change_only_at_the_ends_of_epochs(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes, "plcb", **{"method.warmup_epochs": 82}), stripes)  # 4 of 20 steps
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


def test_the_first_labels_are_predictions_of_the_warmed_up_network(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes, "plcb"), stripes)
    training.take_step()
    network = copy.deepcopy(training.network).eval()
    with torch.no_grad():
        expected = torch.cat([network(images).logits for images in training.batches.pool("unlabeled")]).softmax(dim=1)
    training.take_step()
    torch.testing.assert_close(training.network.state("memory")["labels"], expected)


def test_the_papers_recipe_has_its_own_batches_rates_network_and_weak_view() -> None:
    cifar, mini = (recipe(parse_setting(name), "plcb", "paper") for name in ("cifar10@4", "mini_imagenet@40"))
    for spec in (cifar, mini):
        assert (spec.plan.labeled_batch_size, spec.plan.unlabeled_batch_size, spec.plan.learning_rate) == (16, 84, 0.1)
        assert not spec.plan.nesterov
        assert [spec.plan.rate_factor(epoch, 410) for epoch in (0, 259, 260, 359, 360, 409)] == pytest.approx(
            [1, 1, 0.1, 0.1, 0.01, 0.01]
        )
    assert cifar.method.label_images == "plain"  # type: ignore[attr-defined]
    assert cifar.padding == 2
    assert mini.network == NETWORKS["resnet-18"].model_copy(update={"weight_norm": True, "dropout": 0.1})
    assert (mini.padding, mini.augmentation.jitter) == (6, True)


@pytest.mark.slow
def test_one_full_size_step_on_84_pixel_images() -> None:
    method = PLCB()
    config = NETWORKS["resnet-18"].model_copy(update={"weight_norm": True, "dropout": 0.1})
    student = build_network(config, channels=3, image_size=84, classes=100, unlabeled=200, heads=method.heads)
    random = torch.Generator().manual_seed(0)
    views = {"labeled": torch.randn(16, 3, 84, 84, generator=random), "weak": torch.randn(84, 3, 84, 84, generator=random)}
    with dropout_from(student, torch.Generator().manual_seed(0)):
        loss = method.loss(Batch(torch.arange(16), views, torch.arange(84)), Models(student, student), LATE)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert all(torch.isfinite(parameter.grad).all() for parameter in student.parameters())


@pytest.mark.slow
def test_it_beats_the_labels_alone_on_digits(tmp_path: Path) -> None:
    from crmatch.runs.run import run

    record = run(recipe(parse_setting("digits@4"), "plcb", "quick"), tmp_path)
    assert record.error is not None
    assert record.error < 9  # supervised only: 10.2 on this split
