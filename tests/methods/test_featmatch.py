"""FeatMatch: guessed labels for all views of an image, two branches of one classifier, prototypes that are renewed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_spec, training_of
from crmatch.augment.views import Batch
from crmatch.data.settings import parse_setting
from crmatch.methods import FeatMatch
from crmatch.methods.base import Models, Step
from crmatch.methods.mixup import draw_mixing
from crmatch.networks.build import build_network
from crmatch.networks.config import NETWORKS, WideResNetConfig
from crmatch.predict.model import load
from crmatch.runs.directory import run_directory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from reference import featmatch_formulas as reference

WARM = Step(3, 1000, lambda stream: torch.Generator().manual_seed(5))
LATE = Step(205, 1000, lambda stream: torch.Generator().manual_seed(5))
"""Half of the ramp: 75,000 of 183,000 steps are 410 of 1,000."""


def make_student(method: FeatMatch) -> Any:
    config = WideResNetConfig(filters=4, repeat=1)
    student = build_network(config, channels=2, image_size=8, classes=3, unlabeled=8, heads=method.heads).double()
    refiner: Any = student.heads["refiner"]
    random = torch.Generator().manual_seed(2)
    filled = torch.rand(len(refiner.filled), generator=random) < 0.7
    refiner.remember(torch.rand(refiner.prototypes.shape, generator=random), filled)
    return student


def make_batch(method: FeatMatch) -> Batch:
    random = torch.Generator().manual_seed(0)
    images = {"labeled": 3, "unlabeled": 4}
    views = {
        view.name: torch.randn(images[view.source], 2, 8, 8, generator=random, dtype=torch.float64) for view in method.views
    }
    return Batch(torch.tensor([0, 1, 2]), views, torch.tensor([7, 0, 3, 5]))


def loss_of(method: FeatMatch, step: Step = LATE) -> Any:
    student = make_student(method)
    return method.loss(make_batch(method), Models(student, student), step)


def branches(student: Any, images: torch.Tensor) -> tuple[list[list[float]], list[list[float]], torch.Tensor]:
    """Logits of x_g and of x from features, by the reference's attention."""
    with torch.no_grad():
        features = student(images).features
    refiner, classifier = student.heads["refiner"], student.classifier
    width, heads = refiner.width, refiner.heads
    embedding = [
        (
            refiner.embedding.weight[h * width : (h + 1) * width].tolist(),
            refiner.embedding.bias[h * width : (h + 1) * width].tolist(),
        )
        for h in range(heads)
    ]
    mixers = [(mixer.weight.tolist(), mixer.bias.tolist()) for mixer in refiner.mixers]
    combination = (refiner.combination.weight.tolist(), refiner.combination.bias.tolist())
    there = refiner.prototypes[refiner.filled].tolist()
    last = (classifier.weight.tolist(), classifier.bias.tolist())
    refined = [reference.refined(row, there, embedding, mixers, combination) for row in features.tolist()]
    plain = [reference.linear(*last, row) for row in features.tolist()]
    return [reference.linear(*last, row) for row in refined], plain, features


@pytest.mark.parametrize("step", [WARM, LATE])
def test_every_term_equals_the_loop_over_mixed_views(step: Step) -> None:
    method = FeatMatch(strong_views=2)
    batch, student = make_batch(method), make_student(method)
    found = method.loss(batch, Models(student, student), step)

    attended, plain, _ = branches(make_student(method), torch.cat([batch.views["labeled"], batch.views["weak"]]))
    guesses = [reference.softmax(row) for row in (attended if step is LATE else plain)[3:]]
    targets = [[float(label == k) for k in range(3)] for label in batch.labels.tolist()] * 3
    targets += [reference.sharpened(guess, 0.75) for guess in guesses] * 3
    names = ["labeled", "labeled_strong_1", "labeled_strong_2", "weak", "strong_1", "strong_2"]
    images = torch.cat([batch.views[name] for name in names])
    mixing = draw_mixing(21, 0.75, step.generator("mixup"), images.device, per="batch")
    share, partners = mixing.share[0].item(), mixing.partner.tolist()
    assert share >= 0.5
    mixed = torch.stack([share * images[i] + (1 - share) * images[partners[i]] for i in range(21)])
    labels = [[share * a + (1 - share) * b for a, b in zip(targets[i], targets[partners[i]], strict=True)] for i in range(21)]
    attended, plain, _ = branches(make_student(method), mixed)

    def mean(logits: list[list[float]], first: int, last: int) -> float:
        return sum(reference.cross_entropy(labels[i], logits[i]) for i in range(first, last)) / (last - first)

    predicted = attended if step is LATE else plain
    expected = {"supervised": mean(predicted, 0, 9), "consistency": mean(predicted, 9, 21)}
    if step is LATE:
        expected["plain_consistency"] = mean(plain, 9, 21)
    assert {name: term.item() for name, term in found.terms.items()} == pytest.approx(expected, rel=1e-9)
    ramp = step.number / 410
    weights = {"supervised": 1.0, "consistency": 0.5 * ramp, "plain_consistency": 2.0 * ramp}
    assert found.weights == pytest.approx({name: weights[name] for name in expected})
    assert found.pseudo_labels is not None
    assert found.pseudo_labels.labels.tolist() == [guess.index(max(guess)) for guess in guesses]


def test_features_before_attention_and_confidences_after_it_are_remembered_for_the_images_seen() -> None:
    method = FeatMatch(strong_views=1)
    batch, student = make_batch(method), make_student(method)
    attended, _, features = branches(make_student(method), torch.cat([batch.views["labeled"], batch.views["weak"]]))
    method.loss(batch, Models(student, student), LATE)
    memory = student.state("memory")
    torch.testing.assert_close(memory["features"][batch.unlabeled], features[3:])
    best = [max(reference.softmax(row)) for row in attended[3:]]
    assert memory["confidence"][batch.unlabeled].tolist() == pytest.approx(best)
    assert memory["classes"][batch.unlabeled].tolist() == [row.index(max(row)) for row in attended[3:]]
    others = torch.tensor([1, 2, 4, 6])
    assert not bool(memory["confidence"][others].any())
    assert not any(memory[name].requires_grad for name in ("features", "confidence"))


def test_the_warm_up_remembers_nothing() -> None:
    method = FeatMatch(strong_views=1)
    batch, student = make_batch(method), make_student(method)
    method.loss(batch, Models(student, student), WARM)
    assert not bool(student.state("memory")["confidence"].any())


def test_guessed_labels_carry_no_gradient_and_leave_running_statistics_alone() -> None:
    method = FeatMatch(strong_views=1)
    batch, student = make_batch(method), make_student(method)
    passes = []
    student.register_forward_hook(lambda module, inputs, outputs: passes.append(outputs.logits.requires_grad))
    method.loss(batch, Models(student, student), LATE)
    assert passes == [False, True]
    assert student.backbone.norm.num_batches_tracked == 1


@pytest.mark.parametrize("term", ["supervised", "consistency", "plain_consistency"])
def test_doubling_a_weight_adds_exactly_its_weighted_term(term: str) -> None:
    once = loss_of(FeatMatch(strong_views=1))
    default = getattr(FeatMatch(), f"{term}_weight")
    twice = loss_of(FeatMatch(strong_views=1, **{f"{term}_weight": 2 * default}))
    added = once.weights[term] * once.terms[term].item()
    assert added > 0
    assert twice.total.item() - once.total.item() == pytest.approx(added, rel=1e-9)


def test_a_weight_of_zero_removes_its_term_and_without_both_the_unlabeled_images() -> None:
    assert "plain_consistency" not in loss_of(FeatMatch(plain_consistency_weight=0)).terms
    assert "consistency" not in loss_of(FeatMatch(consistency_weight=0)).terms
    method = FeatMatch(plain_consistency_weight=0, consistency_weight=0)
    assert {view.source for view in method.views} == {"labeled"}
    loss = loss_of(method)
    assert list(loss.terms) == ["supervised"]
    assert loss.pseudo_labels is None


def test_it_asks_for_one_weak_and_k_strong_views_of_each_image() -> None:
    views = FeatMatch().views
    assert len(views) == 18
    counts = {(source, kind): 0 for source in ("labeled", "unlabeled") for kind in ("weak", "strong")}
    for view in views:
        counts[view.source, view.augmentation] += 1
    assert list(counts.values()) == [1, 8, 1, 8]


def test_prototypes_are_renewed_at_the_end_of_the_warm_up_and_every_interval_after_it(stripes: Path) -> None:
    keys = {"method.warmup_steps": 36_600, "method.refresh_steps": 45_750}  # 4 and 5 of 20 steps
    training = training_of(tiny_spec(stripes, "featmatch", **keys), stripes)
    refiner = training.network.heads["refiner"]
    changed = []
    for step in range(20):
        before = refiner.prototypes.clone()
        training.take_step()
        changed += [step] * (not torch.equal(before, refiner.prototypes))
        assert bool(refiner.ready) == (step >= 4)
    assert changed == [4, 9, 14, 19]


def test_unlabeled_prototypes_come_from_the_last_interval_and_are_then_forgotten(stripes: Path) -> None:
    keys = {"method.warmup_steps": 18_300, "method.refresh_steps": 91_500, "method.prototypes": 4}  # 2 and 10 of 20 steps
    training = training_of(tiny_spec(stripes, "featmatch", **keys, **{"method.prototype_confidence": 0.01}), stripes)
    memory, refiner = training.network.state("memory"), training.network.heads["refiner"]
    for _ in range(12):
        training.take_step()
    memory["classes"].copy_(torch.arange(30) % 3)
    memory["confidence"].fill_(0.9)
    memory["features"].fill_(7.0)
    training.take_step()
    rows = refiner.prototypes.reshape(3, 4, -1)
    assert bool((rows == 7).all(dim=2).any(dim=1).all())
    assert int((memory["confidence"] > 0).sum()) <= 12


def test_evaluation_and_the_saved_model_use_the_refined_features(stripes: Path, tmp_path: Path) -> None:
    spec = tiny_spec(stripes, "featmatch")
    record = run(spec, Workspace.at(tmp_path, stripes))
    directory = run_directory(tmp_path, spec, parse_setting(spec.setting, stripes))
    model = load(directory.path)
    from crmatch.data.load import load_data
    from crmatch.evaluation import measure

    test = load_data("stripes", stripes, spec.data.image_size).test
    assert test is not None
    assert measure(model.predict_probabilities(test.images), test.labels).error == record.error
    images = model.normalizer(test.images)
    with torch.no_grad():
        outputs = model.network(images)
        refined = model.network.head("refiner", outputs.features)
    assert not torch.allclose(refined, outputs.features)
    torch.testing.assert_close(outputs.logits, model.network.classifier(refined))
    assert list(model.network.heads) == ["refiner"]


def test_in_training_mode_the_network_gives_plain_logits() -> None:
    student = make_student(FeatMatch())
    images = make_batch(FeatMatch()).views["weak"]
    outputs = student(images)
    torch.testing.assert_close(outputs.logits, student.classifier(outputs.features))
    still = copy.deepcopy(student).eval()(images)
    assert not torch.allclose(still.logits, student.classifier(still.features))


def test_the_papers_recipe_has_its_own_phases_batches_and_views() -> None:
    spec = recipe(parse_setting("cifar10@25"), "featmatch", "paper")
    rates = [spec.plan.learning_rate * spec.plan.rate_factor(step, 183_000) for step in (0, 3_000, 78_000, 153_000, 183_000)]
    assert rates == pytest.approx([0.0004, 0.004, 0.04, 0.004, 4e-6])
    assert (spec.plan.steps, spec.plan.labeled_batch_size, spec.plan.unlabeled_batch_size) == (183_000, 64, 128)
    assert (spec.plan.momentum, spec.plan.weight_decay, spec.plan.decay_parameters) == (0.95, 2e-4, "all")
    assert (spec.padding, spec.augmentation.padding_mode, spec.augmentation.cutout) == (2, "zero", False)
    assert spec.network == NETWORKS["wrn-28-2"].model_copy(update={"slope": 0.0, "block": "usb"})
    assert recipe(parse_setting("mini_imagenet@40"), "featmatch", "paper").network == NETWORKS["resnet-18"]
    method = spec.method
    assert isinstance(method, FeatMatch)
    assert (method.refresh_start(183_000), method.refresh_every(1, 183_000)) == (3_000, 500)


@pytest.mark.slow
def test_one_full_size_step_on_84_pixel_images() -> None:
    """1,728 views at once: four minutes on one busy core, 6 GiB."""
    method = FeatMatch()
    student = build_network(NETWORKS["resnet-18"], channels=3, image_size=84, classes=100, unlabeled=200, heads=method.heads)
    random = torch.Generator().manual_seed(0)
    images = {"labeled": 64, "unlabeled": 128}
    views = {view.name: torch.randn(images[view.source], 3, 84, 84, generator=random) for view in method.views}
    loss = method.loss(Batch(torch.arange(64), views, torch.arange(128)), Models(student, student), LATE)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert all(torch.isfinite(parameter.grad).all() for parameter in student.parameters())


@pytest.mark.slow
def test_it_beats_the_labels_alone_on_digits(tmp_path: Path) -> None:
    record = run(recipe(parse_setting("digits@4"), "featmatch", "quick"), tmp_path)
    assert record.error is not None
    assert record.error < 9  # supervised only: 10.2 on this split
