"""What the papers and public codes fix for each method on each data set, by recipe."""

from __future__ import annotations

import pytest

from crmatch.data.settings import parse_setting
from crmatch.methods import METHODS
from crmatch.spec.recipes import RECIPES, recipe
from crmatch.spec.run_spec import flatten

ADAM = {
    "plan.optimizer": "adam",
    "plan.learning_rate": 0.002,
    "plan.decay_rule": "decoupled",
    "plan.weight_decay": 0.02,
}
RERUN = {
    "plan.optimizer": "sgd",
    "plan.nesterov": True,
    "plan.momentum": 0.9,
    "plan.learning_rate": 0.03,
    "plan.weight_decay": 5e-4,
    "plan.steps": 2**20,
    "plan.ema_decay": 0.999,
    "plan.labeled_batch_size": 64,
    "data.unlabeled": "all",
    "augmentation.variant": "google",
    "headline": "median_last_20",
}


def batches(labeled, unlabeled, rate):
    return {"plan.labeled_batch_size": labeled, "plan.unlabeled_batch_size": unlabeled, "plan.learning_rate": rate}


LP_PLAN = {
    "plan.steps": None,
    "plan.unlabeled_epochs": 180,
    "plan.decay_parameters": "all",
    "data.unlabeled": "remaining",
    "network.normalize_features": True,
}
PLCB_PLAN = batches(16, 84, 0.1) | {"plan.nesterov": False, "plan.steps": None, "plan.unlabeled_epochs": 400}
PLCB_PLAN |= {"plan.decay_parameters": "all"}
MEAN_TEACHER_LP = {"network.normalize_features": False, "plan.decay_parameters": "all", "method.joint_batch": True}
OLDER = ("mean_teacher", "pi_model", "pseudo_label", "ict", "mixmatch", "remixmatch")
CASES = [
    *((method, "paper", "cifar10@25", RERUN | {"plan.unlabeled_batch_size": 64}) for method in OLDER),
    *(
        (method, "paper", "cifar10@25", RERUN | {"plan.unlabeled_batch_size": 448})
        for method in ("fixmatch", "uda", "flexmatch")
    ),
    ("fixmatch", "paper", "cifar100@4", {"plan.weight_decay": 1e-3, "method.ties": "include"}),
    ("mean_teacher", "paper", "cifar10@25", {"method.consistency_weight": 50, "method.ramp_share": 0.4}),
    ("mean_teacher", "original", "cifar10@25", ADAM | {"plan.weight_decay": 0.2, "method.label_smoothing": 0.001}),
    ("mean_teacher", "original", "svhn@25", ADAM | {"method.consistency_weight": 150}),
    ("mean_teacher", "paper", "mini_imagenet@40", {"plan.unlabeled_epochs": 180, "plan.labeled_batch_size": 31}),
    ("mean_teacher", "paper", "mini_imagenet@40", {"plan.unlabeled_batch_size": 97, "method.logit_distance_weight": 0.01}),
    ("mean_teacher", "paper", "mini_imagenet@40", {"plan.ema_decay": 0.97, "plan.ema_warmup": "mean"}),
    ("mean_teacher", "paper", "mini_imagenet@40", {"augmentation.padding": 8, "augmentation.rotation": 10.0}),
    *(("mean_teacher", name, "mini_imagenet@100", MEAN_TEACHER_LP) for name in ("paper", "original")),
    ("uda", "original", "cifar100@25", {"plan.weight_decay": 5e-4}),
    *(("freematch", "usb", f"svhn@{labels}", {"method.free_clip": 0.95}) for labels in (4, 25, 100)),
    ("freematch", "usb", "cifar10@25", {"method.free_clip": None}),
    ("freematch", "paper", "svhn@25", {"method.free_clip": None}),
    ("fixmatch", "usb", "svhn@25", {"method.free_clip": None}),
    ("uda", "usb", "cifar10@25", {"method.temperature": 1.0}),
    ("remixmatch", "paper", "stl10@4", {"method.strong_views": 1, "method.weak_augmentation": "none"}),
    (
        "mixmatch",
        "paper",
        "cifar10@25",
        {"method.consistency_weight": 100, "method.mixup_alpha": 0.5, "method.ramp_steps": 16384},
    ),
    ("mixmatch", "original", "cifar10@25", ADAM | {"method.consistency_weight": 75, "method.mixup_alpha": 0.75}),
    ("mixmatch", "original", "svhn@25", ADAM | {"method.consistency_weight": 250, "method.mixed_pass": "interleaved"}),
    ("mixmatch", "original", "cifar100@100", ADAM | {"plan.weight_decay": 0.04, "method.consistency_weight": 150}),
    ("mixmatch", "original", "stl10@100", ADAM | {"method.consistency_weight": 50}),
    ("mixmatch", "usb", "cifar10@25", {"method.share_per": "batch", "plan.unlabeled_batch_size": 64}),
    ("uda", "paper", "cifar10@25", {"method.temperature": 0.4, "method.threshold": 0.8, "method.ties": "include"}),
    ("uda", "original", "cifar10@25", {"plan.steps": 500_000, "plan.ema_decay": 0.9999, "plan.unlabeled_batch_size": 448}),
    ("remixmatch", "paper", "cifar10@25", {"method.strong_views": 8, "method.rotation_weight": 0.5}),
    ("remixmatch", "paper", "cifar10@25", {"augmentation.policy": "ctaugment", "augmentation.cutout": False}),
    ("remixmatch", "paper", "cifar10@4", {"method.strong_views": 1, "method.rotation_weight": 2, "method.ramp_steps": 131_072}),
    ("remixmatch", "paper", "svhn@4", {"method.strong_views": 1, "method.rotation_weight": 3, "method.ramp_steps": 16_384}),
    ("remixmatch", "paper", "cifar100@4", {"method.strong_views": 8, "method.rotation_weight": 0.5}),
    ("remixmatch", "paper", "stl10@100", {"method.strong_views": 4, "method.weak_augmentation": "none"}),
    ("remixmatch", "original", "cifar10@25", ADAM),
    ("remixmatch", "usb", "cifar10@25", {"method.strong_views": 2, "augmentation.policy": "randaugment"}),
    ("pseudo_label", "paper", "svhn@25", {"method.pseudo_label_weight": 2}),
    ("pseudo_label", "paper", "cifar10@25", {"method.pseudo_label_weight": 1}),
    ("pi_model", "original", "svhn@25", ADAM | {"method.consistency_weight": 5}),
    ("pi_model", "original", "cifar10@25", ADAM | {"method.consistency_weight": 20}),
    ("vat", "paper", "cifar10@25", ADAM | {"method.perturbation": 6.0, "method.entropy_weight": 0.06}),
    ("ict", "original", "cifar10@25", ADAM | {"method.consistency_weight": 1000, "method.mixup_alpha": 0.75}),
    ("ict", "original", "svhn@25", ADAM | {"method.consistency_weight": 20, "method.mixup_alpha": 0.5}),
    ("supervised", "original", "cifar10@25", ADAM | {"method.label_smoothing": 0.001}),
    ("label_propagation", "paper", "cifar10@4", LP_PLAN | batches(50, 50, 0.05)),
    ("label_propagation", "paper", "mini_imagenet@40", LP_PLAN | batches(31, 97, 0.2) | {"augmentation.padding": 8}),
    ("label_propagation", "paper", "mini_imagenet@40", {"augmentation.padding_mode": "zero", "augmentation.rotation": 10}),
    ("plcb", "paper", "cifar10@4", PLCB_PLAN | {"method.label_images": "plain", "augmentation.padding": 2}),
    ("plcb", "paper", "mini_imagenet@40", PLCB_PLAN | {"method.label_images": "augmented", "augmentation.padding": 6}),
    ("plcb", "paper", "mini_imagenet@40", {"augmentation.jitter": True, "network.weight_norm": True, "network.dropout": 0.1}),
    ("featmatch", "paper", "cifar10@25", batches(64, 128, 0.04) | {"plan.steps": 183_000, "plan.momentum": 0.95}),
    ("featmatch", "paper", "cifar10@25", {"plan.weight_decay": 2e-4, "plan.decay_parameters": "all"}),
    ("featmatch", "paper", "cifar10@25", {"augmentation.padding": 2, "augmentation.padding_mode": "zero"}),
    ("featmatch", "paper", "cifar10@25", {"augmentation.cutout": False, "network.slope": 0.0, "network.block": "usb"}),
    ("featmatch", "paper", "mini_imagenet@40", {"network.kind": "resnet18", "network.weight_norm": False}),
    ("softmatch", "quick", "digits@4", {"method.average_decay": None, "plan.ema_decay": 0.99}),
    ("remixmatch", "quick", "digits@4", {"method.strong_views": 1, "method.rotation_weight": 2, "method.memory_batches": 13}),
]


@pytest.mark.parametrize(("method", "name", "setting", "expected"), CASES)
def test_a_recipe_has_the_numbers_of_the_specification(method, name, setting, expected):
    spec = dict(flatten(recipe(parse_setting(setting), method, name).to_json()))
    assert {key: spec[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("method", "length", "rates"),
    [
        ("featmatch", 183_000, {0: 0.0004, 3_000: 0.004, 78_000: 0.04, 153_000: 0.004, 183_000: 4e-6}),
    ],
)
def test_the_learning_rate_has_the_phases_of_the_paper(method, length, rates):
    plan = recipe(parse_setting("cifar10@25"), method, "paper").plan
    assert {step: plan.learning_rate * plan.rate_factor(step, length) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean_teacher", {"method.consistency_weight": 180}),
        ("mixmatch", {"method.consistency_weight": 250, "method.mixup_alpha": 0.25}),
    ],
)
def test_with_its_extra_images_svhn_has_numbers_of_its_own(method, expected):
    setting = parse_setting("svhn@25")._replace(data="svhn_extra")
    spec = dict(flatten(recipe(setting, method, "original").to_json()))
    assert {key: spec[key] for key in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", ["digits@4", "cifar10@4", "cifar100@25", "svhn@100", "stl10@100", "mini_imagenet@40"])
def test_every_recipe_of_every_method_on_every_set_is_a_valid_spec(method, name, setting):
    assert recipe(parse_setting(setting), method, name).method.name == method


@pytest.mark.parametrize("method", METHODS)
def test_in_quick_all_methods_share_rate_length_and_batches(method):
    plan = recipe(parse_setting("digits@4"), method, "quick").plan
    assert (plan.steps, plan.optimizer, plan.learning_rate) == (1200, "sgd", 0.03)
    assert (plan.labeled_batch_size, plan.unlabeled_batch_size) == (16, 32)
