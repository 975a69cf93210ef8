"""ReMixMatch: MixMatch with aligned guesses, many strong views and a rotation task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import CLASSES, UNLABELED, assert_rows, assert_terms, layers_of, make_models, make_step, same, take_steps

from conftest import tiny_spec, training_of
from crmatch.data.settings import parse_setting
from crmatch.methods import ReMixMatch
from crmatch.methods.base import Refresh
from crmatch.methods.mixup import draw_mixing
from crmatch.spec.recipes import recipe
from reference import baseline_formulas as reference

SMALL = {"strong_views": 2, "memory_batches": 2, "average_decay": 0.8}
VARIANTS = [
    {},
    {"strong_views": 1, "rotation_weight": 2.0},
    {"temperature": 0.8, "mixup_alpha": 0.4, "mixed_weight": 0.7, "strong_weight": 1.1},
    {"mixed_pass": "interleaved"},
    {"memory_batches": 1, "average_decay": 0.5, "strong_views": 3},
    {"share_per": "batch"},
]
SIZES = [{}, {"labeled": 3, "unlabeled": 8}]


def make_method(**changes):
    return ReMixMatch(**{**SMALL, **changes})


def names_of(method):
    return ["labeled", "weak", "strong", *(f"strong_{number}" for number in range(2, method.strong_views + 1))]


def run_steps(method, steps=4, models=None, start=100, **sizes):
    return take_steps(method, steps, models, start, **sizes)


def guess_pass(case):
    (record,) = [record for record in case.passes if not record.with_gradient]
    return record


def further_pass(case):
    """The pass over unmixed strong and rotated images: with gradient, after the mixed ones."""
    return [record for record in case.passes if record.with_gradient][-1]


def mixed_passes(method, case):
    with_gradient = [record for record in case.passes if record.with_gradient]
    return with_gradient[:-1] if method.strong_weight or method.rotation_weight else with_gradient


def draws(method, case):
    union = torch.cat([case.batch.views[name] for name in names_of(method)])
    mixing = draw_mixing(union, method.mixup_alpha, case.step.generator("mixup"), per=method.share_per)
    return mixing.share.tolist(), mixing.partner.tolist()


def groups(method, case):
    rows = sum(len(case.batch.views[name]) for name in names_of(method))
    return reference.interleaved(rows, len(names_of(method)) if method.mixed_pass == "interleaved" else 1)


def mixed_logits(method, case):
    rows = {}
    for group, record in zip(groups(method, case), mixed_passes(method, case), strict=True):
        rows |= dict(zip(group, record.outputs.logits.tolist(), strict=True))
    return [rows[row] for row in range(len(rows))]


def expected_terms(method, case, guessed):
    labels = [reference.one_hot(label, CLASSES) for label in case.batch.labels.tolist()]
    labeled, unlabeled = len(labels), len(guessed)
    targets = reference.mixed(labels + guessed * (1 + method.strong_views), *draws(method, case)).tolist()
    rows = mixed_logits(method, case)
    _, turns = reference.quarter_turns(case.batch.views["strong"].numpy())
    ((weight, bias),) = layers_of(case.models.student.heads["rotation"])
    further = further_pass(case).outputs
    turned = [reference.linear(row, weight, bias) for row in further.features[unlabeled:].tolist()]
    return {
        "supervised": reference.soft_cross_entropy(targets[:labeled], rows[:labeled]),
        "mixed": reference.soft_cross_entropy(targets[labeled:], rows[labeled:]),
        "strong": reference.soft_cross_entropy(guessed, further.logits[:unlabeled].tolist()),
        "rotation": reference.supervised(turns, turned),
    }


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_term_of_successive_steps_equals_the_loop_over_images(changes, sizes):
    method = make_method(**changes)
    alignment = reference.ReMixMatchAlignment(CLASSES, method.memory_batches, method.average_decay)
    for case in run_steps(method, **sizes):
        guessed = alignment.step(case.batch.labels.tolist(), guess_pass(case).outputs.logits.tolist(), method.temperature)
        ramp = reference.ramp_in_run(case.step.number, 16_384, case.step.total)
        weights = {
            "supervised": 1.0,
            "mixed": ramp * method.mixed_weight,
            "strong": ramp * method.strong_weight,
            "rotation": method.rotation_weight,
        }
        assert_terms(case, expected_terms(method, case, guessed), weights)


def test_by_the_usb_recipe_every_term_of_successive_steps_equals_usb_s_loop():
    """Its alignment, one share of MixUp per step, and weak labeled images."""
    chosen = recipe(parse_setting("cifar10@25"), "remixmatch", "usb").method
    assert [view.augmentation for view in chosen.views] == ["weak", "weak", "strong", "strong"]
    assert (chosen.share_per, chosen.average_decay) == ("batch", 0.999)
    method = chosen.model_copy(update={"average_decay": 0.8})
    models, labels = make_models(method), [0, 0, 0, 1, 2, 2, 3]
    method.refresh(Refresh(models, make_step(0), torch.tensor(labels), None))
    alignment = reference.UsbAlignment(CLASSES, labels, 0.8)
    for case in run_steps(method, models=models):
        guessed = alignment.step(guess_pass(case).outputs.logits.tolist(), method.temperature)
        assert len(set(draws(method, case)[0])) == 1
        assert_terms(case, expected_terms(method, case, guessed))


def test_p_data_is_set_once_from_all_labels(stripes: Path):
    spec = tiny_spec(stripes, "remixmatch", **{"method.alignment": "average"})
    training = training_of(spec, stripes)
    training.batches.labels[training.batches.labeled[:2]] = 2
    data, found = training.network.state("alignment")["data"], []
    for _ in range(3):
        training.take_step()
        found.append(data.tolist())
    assert found == [[0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]] * 3


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_images_that_go_in_are_the_weak_view_the_mixed_union_and_the_first_strong_view_upright_and_turned(changes, sizes):
    method = make_method(**changes)
    (case,) = run_steps(method, steps=1, **sizes)
    views = case.batch.views
    assert torch.equal(guess_pass(case).images, views["weak"])
    union = torch.cat([views[name] for name in names_of(method)]).numpy()
    expected = torch.from_numpy(reference.mixed(union, *draws(method, case)))
    for group, record in zip(groups(method, case), mixed_passes(method, case), strict=True):
        assert same(record.images, expected[group])
    turned, _ = reference.quarter_turns(views["strong"].numpy())
    turned = torch.stack([torch.from_numpy(image.copy()) for image in turned])
    assert torch.equal(further_pass(case).images, torch.cat([views["strong"], turned]))


def test_a_quarter_of_the_batch_is_turned_by_each_angle():
    assert reference.quarter_turns([torch.zeros(1, 2, 2).numpy()] * 8)[1] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert reference.quarter_turns([torch.zeros(1, 2, 2).numpy()] * 6)[1] == [0, 0, 1, 2, 2, 3]


def test_guesses_carry_no_gradient_and_serve_all_views():
    method = make_method()
    (case,) = run_steps(method, steps=1)
    logits = guess_pass(case).outputs.logits
    assert not logits.requires_grad
    alignment = reference.ReMixMatchAlignment(CLASSES, method.memory_batches, method.average_decay)
    guessed = alignment.step(case.batch.labels.tolist(), logits.tolist(), method.temperature)
    record = further_pass(case)
    rows = record.outputs.logits[:UNLABELED].tolist()
    assert_rows(case.gradient("strong", record.images[:UNLABELED]), reference.cross_entropy_gradient(guessed, rows))
