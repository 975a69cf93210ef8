"""What holds for every method: it is in the table, checks its values, and trains all its parameters."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import get_args

import pytest
import torch
from kit import EXTRA, make, make_batch, make_models, take
from pydantic import ValidationError

import crmatch
from crmatch.errors import RequestError
from crmatch.methods import METHODS, build_method, method_class
from crmatch.methods.base import LossTerms, Method, StoredMethod

VARIANTS = [
    *((name, {}) for name in METHODS),
    ("fixmatch", {"mask": "free"}),
    ("crmatch", {"distance": "l2", "pair": "weak-weak", "projection": "mlp"}),
    ("crmatch", {"distance": "js", "pair": "strong-strong", "feature_point": "b"}),
    ("crmatch", {"distance": "squared_l2", "direction": "invariance", "detach_weak": True}),
    ("crmatch", {"rotation_source": "extra", "rotation_images": EXTRA}),
    ("crmatch", {"rotation_source": "labeled+unlabeled", "rotation_images": 2, "pseudo_labels": "soft"}),
]


def subclasses(cls):
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_the_table_holds_every_method_of_the_package():
    for module in pkgutil.walk_packages(crmatch.__path__, "crmatch."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {cls for cls in subclasses(Method) if not inspect.isabstract(cls) and cls.__module__.startswith("crmatch.")}
    assert found - {StoredMethod} == {method_class(name) for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_carries_its_name_and_what_tables_and_help_need(name):
    method = build_method(name)
    assert method.name == name
    assert build_method(name, method.model_dump()) == method
    assert METHODS[name].title
    assert METHODS[name].summary
    assert METHODS[name].paper
    assert method.evaluated in ("ema", "raw")


@pytest.mark.parametrize(("wrong", "near"), [("crmach", "crmatch"), ("fixmatchs", "fixmatch"), ("supervise", "supervised")])
def test_an_unknown_method_is_answered_with_the_nearest_name(wrong, near):
    with pytest.raises(RequestError, match=f"(?s){wrong}.*Did you mean '{near}'") as caught:
        build_method(wrong)
    assert caught.value.exit_code == 2


LIMITS = [
    ((-0.1, 1.1), "threshold free_quantile"),
    ((-0.1, 1), "average_decay label_smoothing diffusion attention_dropout"),
    ((0, 1.1), "free_clip ramp_share"),
    ((0, 1), "prototype_confidence"),
    ((0, -1), "soft_sigmas temperature mixup_alpha perturbation probe similarity_power"),
    ((-1e-6,), "solver_tolerance"),
    ((0, -1, 1.5), "projection_width rotation_images ramp_steps memory_batches neighbors solver_iterations"),
    ((0, -1, 1.5), "attention_heads warmup_steps refresh_steps"),
    ((0, 33), "strong_views"),
    ((1, 2.5), "prototypes"),
    ((0, 1.5), "supervised_epochs supervised_batch_size warmup_epochs warmup_batch_size"),
]
BAD_VALUES = {field: values for values, fields in LIMITS for field in fields.split()}


def kinds(info):
    return {info.annotation, *get_args(info.annotation)}


@pytest.mark.parametrize("name", METHODS)
def test_a_bad_value_is_refused_with_the_name_of_its_field(name):
    for field, info in method_class(name).model_fields.items():
        values = ["nonsense", object(), *BAD_VALUES.get(field, ())]
        values += [-1] if field.endswith("_weight") else []
        values += [float("nan"), float("inf")] if kinds(info) & {float} else []
        for value in values if field not in ("name", "code") else []:
            with pytest.raises(ValidationError) as caught:
                build_method(name, {field: value})
            assert {error["loc"][0] for error in caught.value.errors()} == {field}
    with pytest.raises(ValidationError, match="treshold"):
        build_method(name, {"treshold": 0.9})


def test_every_number_of_a_method_has_tested_limits():
    fields = {field: info for name in METHODS for field, info in method_class(name).model_fields.items()}
    numbers = {field for field, info in fields.items() if kinds(info) & {int, float}}
    assert BAD_VALUES.keys() == {field for field in numbers if not field.endswith("_weight")}


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_frozen(name):
    method = build_method(name)
    for field in type(method).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(method, field, getattr(method, field))


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("fixmatch", {"supervised_weight": 0, "pseudo_label_weight": 0}, "weight"),
        ("fixmatch", {"supervised_weight": 0, "unlabeled_weight": 0}, "weight"),
        ("crmatch", {"supervised_weight": 0, "unlabeled_weight": 0, "rotation_weight": 0}, "weight"),
        ("fixmatch", {"supervised_weight": 0, "mask": "ada"}, "supervised_weight"),
        ("crmatch", {"supervised_weight": 0, "alignment": "labeled"}, "supervised_weight"),
        ("crmatch", {"distance": "squared_l2"}, "squared_l2.*use direction invariance"),
        ("crmatch", {"detach_weak": True, "pair": "weak-weak"}, "detach_weak needs pair weak-strong"),
        ("crmatch", {"detach_weak": True, "pair": "strong-strong"}, "detach_weak needs pair weak-strong"),
        ("crmatch", {"rotation_source": "extra"}, "needs rotation_images"),
    ],
)
def test_values_that_contradict_each_other_are_refused(name, values, field):
    with pytest.raises(ValidationError, match=field):
        build_method(name, values)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_after_three_steps_every_trainable_parameter_has_moved(name, changes):
    method = make(name, {"threshold": 0} | changes if "threshold" in method_class(name).model_fields else changes)
    models = make_models(method, confidence=1.0)
    student = models.student
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    for seed in range(3):
        loss = take(method, batch=make_batch(method, seed), models=models).found
        optimizer.zero_grad()
        loss.total.backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
        optimizer.step()
    assert [name for name, parameter in student.named_parameters() if torch.equal(parameter, before[name])] == []


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_terms_and_weights_have_the_same_names_and_meet_in_the_total_only(name, changes):
    loss = take(make(name, changes)).found
    assert loss.terms.keys() == loss.weights.keys()
    assert all(term.shape == () for term in loss.terms.values())
    assert not any(value.requires_grad for value in loss.monitors.values())
    assert loss.pseudo_labels is None or not any(values.requires_grad for values in loss.pseudo_labels)
    expected = sum(loss.weights[term] * value.item() for term, value in loss.terms.items())
    assert loss.total.item() == pytest.approx(expected, rel=1e-12)


def test_the_total_is_the_weighted_sum_of_its_terms():
    terms = {"one": torch.tensor(2.0), "two": torch.tensor(3.0), "three": torch.tensor(5.0)}
    assert LossTerms(terms, {"one": 0.5, "two": 1.0, "three": 10.0}).total.item() == 54
    assert LossTerms({"one": torch.tensor(2.0)}, {"one": 0.25}).total.item() == 0.5
