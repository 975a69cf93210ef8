"""What holds for every method: it is in the table, its values are checked and frozen, and all its parameters learn."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
from pydantic import ValidationError

import crmatch
from crmatch.augment.views import Batch
from crmatch.errors import RequestError
from crmatch.methods import METHODS, build_method
from crmatch.methods.base import LossTerms, Method, Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig

CLASSES = 3
STEP = Step(2, 3, lambda stream: torch.Generator())  # late, when stages and ramps have begun
SIZES = {"labeled": 4, "unlabeled": 8, "extra": 3}
VARIANTS = [
    *((name, {}) for name in METHODS),
    ("crmatch", {"distance": "l2", "pair": "weak-weak", "projection": "mlp"}),
    ("crmatch", {"distance": "js", "pair": "strong-strong", "feature_point": "b"}),
    ("crmatch", {"distance": "squared_l2", "direction": "invariance", "detach_weak": True}),
    ("crmatch", {"rotation_source": "extra", "rotation_images": 3}),
    ("crmatch", {"rotation_source": "labeled+unlabeled", "rotation_images": 2, "pseudo_labels": "soft"}),
]


def subclasses(cls):
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def entry_class(entry):
    return entry if isinstance(entry, type) else entry.method


def make_batch(method, seed):
    generator = torch.Generator().manual_seed(seed)
    views = {view.name: torch.randn(SIZES[view.source], 2, 8, 8, generator=generator) for view in method.views}
    return Batch(torch.arange(SIZES["labeled"]) % CLASSES, views, torch.arange(SIZES["unlabeled"]))


def make_student(method):
    config, pool = WideResNetConfig(filters=4, repeat=1), SIZES["unlabeled"]
    return build_network(config, channels=2, image_size=8, classes=CLASSES, unlabeled=pool, heads=method.heads)


def test_the_table_holds_every_method_of_the_package():
    for module in pkgutil.walk_packages(crmatch.__path__, "crmatch."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {cls for cls in subclasses(Method) if not inspect.isabstract(cls) and cls.__module__.startswith("crmatch.")}
    assert found == {entry_class(entry) for entry in METHODS.values()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_carries_the_name_it_has_in_the_table(name):
    method = build_method(name)
    assert method.name == name
    assert type(method) is entry_class(METHODS[name])
    assert build_method(name, method.model_dump()) == method


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_tables_and_help_need(name):
    method = build_method(name)
    assert method.title
    assert method.summary
    assert method.paper
    assert method.evaluated in ("ema", "raw")
    names = [view.name for view in method.views]
    assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize(("wrong", "near"), [("crmach", "crmatch"), ("fixmatchs", "fixmatch"), ("supervise", "supervised")])
def test_an_unknown_method_is_answered_with_the_nearest_name(wrong, near):
    with pytest.raises(RequestError, match=rf"unknown method '{wrong}'\.\nDid you mean '{near}'\? Known: .*{near}") as caught:
        build_method(wrong)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_hyper_parameter_is_refused_by_name(name):
    with pytest.raises(ValidationError, match="treshold"):
        build_method(name, {"treshold": 0.9})


BAD_VALUES = {
    "threshold": [-0.1, 1.1, float("nan"), "high"],
    "ties": ["maybe"],
    "pseudo_labels": ["firm"],
    "supervised_weight": [-1, float("nan"), "one"],
    "pseudo_label_weight": [-1, float("nan")],
    "unlabeled_weight": [-1, float("nan")],
    "feature_distance_weight": [-1, float("nan")],
    "rotation_weight": [-1, float("nan")],
    "distance": ["euclid", ""],
    "direction": ["apart"],
    "clamp": ["perhaps", 2],
    "feature_point": ["c"],
    "projection": ["conv"],
    "projection_width": [0, -3, 1.5],
    "distance_uses_threshold": ["perhaps"],
    "pair": ["strong-weak", "weak"],
    "detach_weak": ["perhaps"],
    "rotation_source": ["labeled", "both"],
    "rotation_images": [0, -1, 2.5],
    "mask": ["firm"],
    "alignment": ["labels"],
    "average_decay": [-0.1, 1, float("nan")],
    "free_quantile": [-0.1, 1.1],
    "free_clip": [0, 1.1],
    "soft_sigmas": [0, -1],
    "fairness_weight": [-1, float("nan")],
    "label_smoothing": [-0.1, 1],
    "consistency_weight": [-1, float("nan")],
    "logit_distance_weight": [-1, float("nan")],
    "entropy_weight": [-1, float("nan")],
    "ramp_share": [0, 1.1],
    "ramp_shape": ["cubic"],
    "ramp_steps": [0, 1.5],
    "temperature": [0, -1],
    "mixup_alpha": [0, -1],
    "share_per": ["image"],
    "mixed_pass": ["apart"],
    "tsa": ["on"],
    "perturbation": [0, -1],
    "probe": [0, -1],
    "strong_views": [0, 33],
    "mixed_weight": [-1, float("nan")],
    "strong_weight": [-1, float("nan")],
    "memory_batches": [0, 1.5],
    "weak_augmentation": ["strong"],
    "supervised_epochs": [0, 360, 1.5],
    "neighbors": [0, -1, 2.5],
    "similarity_power": [0, -1, float("nan")],
    "diffusion": [-0.1, 1, float("nan")],
    "solver_iterations": [0, 1.5],
    "solver_tolerance": [-1e-6, float("nan")],
    "warmup_epochs": [0, 410, 1.5],
    "label_images": ["weak"],
    "class_balance_weight": [-1, float("nan")],
    "prototypes": [1, 0, 2.5],
    "prototype_confidence": [0, 1, float("nan")],
    "attention_heads": [0, 1.5],
    "attention_dropout": [-0.1, 1],
    "warmup_steps": [0, 1.5],
    "refresh_steps": [0, 1.5],
    "plain_consistency_weight": [-1, float("nan")],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values])
def test_a_bad_value_is_refused_with_the_name_of_its_field(field, value):
    for name in METHODS:
        if field in entry_class(METHODS[name]).model_fields:
            with pytest.raises(ValidationError) as caught:
                build_method(name, {field: value})
            assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize("name", METHODS)
def test_every_hyper_parameter_refuses_what_is_no_value_at_all(name):
    for field in entry_class(METHODS[name]).model_fields.keys() - {"name"}:
        with pytest.raises(ValidationError) as caught:
            build_method(name, {field: object()})
        assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_the_bad_values_above_are_of_hyper_parameters_that_exist():
    assert BAD_VALUES.keys() <= {field for entry in METHODS.values() for field in entry_class(entry).model_fields}


@pytest.mark.parametrize("weight", [field for field in BAD_VALUES if field.endswith("_weight")])
def test_an_infinite_weight_is_refused(weight):
    with pytest.raises(ValidationError, match=weight):
        build_method(
            next(name for name in METHODS if weight in entry_class(METHODS[name]).model_fields), {weight: float("inf")}
        )


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("fixmatch", {"supervised_weight": 0, "pseudo_label_weight": 0}),
        ("fixmatch", {"supervised_weight": 0, "unlabeled_weight": 0}),
        ("crmatch", {"supervised_weight": 0, "unlabeled_weight": 0, "rotation_weight": 0}),
    ],
)
def test_a_method_left_without_any_term_is_refused(name, weights):
    with pytest.raises(ValidationError, match="weight"):
        build_method(name, weights)


@pytest.mark.parametrize("name", ["fixmatch", "crmatch"])
@pytest.mark.parametrize("rule", [{"mask": "ada"}, {"alignment": "labeled"}])
def test_a_rule_that_looks_at_labeled_images_needs_them(name, rule):
    with pytest.raises(ValidationError, match="supervised_weight"):
        build_method(name, rule | {"supervised_weight": 0})


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_frozen(name):
    method = build_method(name)
    for field in type(method).model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(method, field, getattr(method, field))


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_after_three_steps_every_trainable_parameter_has_moved(name, changes):
    fields = entry_class(METHODS[name]).model_fields
    everything_counts = {field: value for field, value in {"threshold": 0, "clamp": False}.items() if field in fields}
    method = build_method(name, everything_counts | changes)
    student = make_student(method)
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    for step in range(3):
        loss = method.loss(make_batch(method, seed=step), Models(student, student), STEP)
        optimizer.zero_grad()
        loss.total.backward()
        assert all(parameter.grad is not None for parameter in student.parameters())
        optimizer.step()
    still = [name for name, parameter in student.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_terms_and_weights_have_the_same_names_and_meet_in_the_total_only(name, changes):
    method = build_method(name, changes)
    student = make_student(method)
    loss = method.loss(make_batch(method, seed=0), Models(student, student), STEP)
    assert loss.terms.keys() == loss.weights.keys()
    assert all(term.shape == () for term in loss.terms.values())
    expected = sum(loss.weights[term] * value.item() for term, value in loss.terms.items())
    assert loss.total.item() == pytest.approx(expected, rel=1e-6)


def test_the_total_is_the_weighted_sum_of_its_terms():
    terms = {"one": torch.tensor(2.0), "two": torch.tensor(3.0), "three": torch.tensor(5.0)}
    assert LossTerms(terms, {"one": 0.5, "two": 1.0, "three": 10.0}).total.item() == 54
    assert LossTerms({"one": torch.tensor(2.0)}, {"one": 0.25}).total.item() == 0.5
