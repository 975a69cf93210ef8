"""FeatMatch: guessed labels for all views of an image, two branches of one classifier, and prototypes of all classes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from kit import CLASSES, LABELED, POOL, assert_terms, make_batch, make_network, make_step, same, take

from conftest import tiny_spec, training_of
from crmatch.data.load import load_data
from crmatch.data.settings import parse_setting
from crmatch.evaluation import measure
from crmatch.methods import FeatMatch
from crmatch.methods.mixup import draw_mixing
from crmatch.predict.model import load
from crmatch.runs.directory import run_directory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from reference import featmatch_formulas as reference
from reference.baseline_formulas import cross_entropy, ramp_in_run, sharpened, softmax

WARM, LATE = 3, 205  # of 1,000 steps, 16 are the warm-up


def branches(student, features):
    """Logits of x_g and of x from features x, by the reference's attention."""
    refiner, (weight, bias) = student.heads["refiner"], weights_of(student.classifier)
    width = refiner.width
    embeddings = [weights_of(refiner.embedding, slice(h * width, (h + 1) * width)) for h in range(refiner.heads)]
    layers = embeddings, [weights_of(mixer) for mixer in refiner.mixers], weights_of(refiner.combination)
    prototypes = refiner.prototypes[refiner.filled].tolist()
    refined = [reference.refined(row, prototypes, *layers) for row in features.tolist()]
    return tuple([reference.linear(weight, bias, row) for row in rows] for rows in (refined, features.tolist()))


def weights_of(layer, rows=slice(None)):
    return layer.weight[rows].tolist(), layer.bias[rows].tolist()


def guessing_and_mixed_pass(case):
    guessing, mixed = case.passes
    assert torch.equal(guessing.images, torch.cat([case.batch.views["labeled"], case.batch.views["weak"]]))
    assert (guessing.with_gradient, mixed.with_gradient) == (False, True)
    return guessing, mixed


@pytest.mark.parametrize("number", [WARM, LATE])
def test_every_term_equals_the_loop_over_mixed_views(number):
    method = FeatMatch(strong_views=2)
    case = take(method, number=number, total=1000, labeled=3, unlabeled=4)
    batch, student = case.batch, case.models.student
    guessing, record = guessing_and_mixed_pass(case)
    attended, plain = branches(student, guessing.outputs.features)
    guesses = [softmax(row) for row in (attended if number == LATE else plain)[3:]]
    targets = [[float(label == k) for k in range(CLASSES)] for label in batch.labels.tolist()] * 3
    targets += [sharpened(guess, 0.75) for guess in guesses] * 3
    names = ["labeled", "labeled_strong_1", "labeled_strong_2", "weak", "strong_1", "strong_2"]
    images = torch.cat([batch.views[name] for name in names])
    mixing = draw_mixing(images, 0.75, case.step.generator("mixup"), per="batch")
    share, partners = mixing.share[0].item(), mixing.partner.tolist()
    assert share >= 0.5
    assert same(record.images, torch.stack([share * images[i] + (1 - share) * images[partners[i]] for i in range(21)]))
    labels = [[share * a + (1 - share) * b for a, b in zip(targets[i], targets[partners[i]], strict=True)] for i in range(21)]
    attended, plain = branches(student, record.outputs.features.detach())

    def mean(logits, first, last):
        return sum(cross_entropy(labels[i], logits[i]) for i in range(first, last)) / (last - first)

    predicted = attended if number == LATE else plain
    terms = {"supervised": mean(predicted, 0, 9), "consistency": mean(predicted, 9, 21)}
    if number == LATE:
        terms["plain_consistency"] = mean(plain, 9, 21)
    ramp = ramp_in_run(number, 75_000, 1000, published=183_000)
    weights = {"supervised": 1.0, "consistency": 0.5 * ramp, "plain_consistency": 2.0 * ramp}
    assert_terms(case, terms, {name: weights[name] for name in terms})
    assert case.found.pseudo_labels.labels.tolist() == [guess.index(max(guess)) for guess in guesses]


def test_features_before_attention_and_confidences_after_it_are_stored_for_the_images_seen():
    case = take(FeatMatch(strong_views=1), number=LATE, total=1000)
    features = guessing_and_mixed_pass(case)[0].outputs.features
    attended, _ = branches(case.models.student, features)
    memory, seen = case.models.student.state("memory"), case.batch.unlabeled
    torch.testing.assert_close(memory["features"][seen], features[LABELED:])
    assert memory["confidence"][seen].tolist() == pytest.approx([max(softmax(row)) for row in attended[LABELED:]])
    assert memory["classes"][seen].tolist() == [row.index(max(row)) for row in attended[LABELED:]]
    others = torch.ones(POOL, dtype=torch.bool)
    others[seen] = False
    assert not memory["confidence"][others].any()
    assert not any(memory[name].requires_grad for name in ("features", "confidence"))


def test_the_warm_up_stores_nothing():
    case = take(FeatMatch(strong_views=1), number=WARM, total=1000)
    assert not case.models.student.state("memory")["confidence"].any()


def test_prototypes_are_computed_at_the_end_of_the_warm_up_and_every_interval_after_it(stripes: Path):
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


def test_unlabeled_prototypes_come_from_the_last_interval_which_is_then_forgotten(stripes: Path):
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


def test_evaluation_and_the_saved_model_use_the_refined_features(stripes: Path, tmp_path: Path):
    spec = tiny_spec(stripes, "featmatch")
    record = run(spec, Workspace(tmp_path, stripes))
    model = load(run_directory(tmp_path, spec, parse_setting(spec.setting, stripes)).path)
    test = load_data("stripes", stripes, spec.data.image_size).test
    assert measure(model.predict_probabilities(test.images), test.labels).error == record.error
    with torch.no_grad():
        outputs = model.network(model.normalizer(test.images))
        refined = model.network.head("refiner", outputs.features)
    assert not torch.allclose(refined, outputs.features)
    torch.testing.assert_close(outputs.logits, model.network.classifier(refined))
    assert list(model.network.heads) == ["refiner"]


def test_in_training_mode_the_network_gives_plain_logits():
    student, images = make_network(FeatMatch()), make_batch(FeatMatch()).views["weak"]
    outputs = student(images)
    torch.testing.assert_close(outputs.logits, student.classifier(outputs.features))
    still = copy.deepcopy(student).eval()(images)
    assert not torch.allclose(still.logits, student.classifier(still.features))


def test_a_run_of_the_published_length_has_the_published_warm_up_and_interval():
    assert (FeatMatch().refresh_start(make_step(total=183_000)), FeatMatch().refresh_every(1, 183_000)) == (3_000, 500)
