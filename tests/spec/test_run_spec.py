from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import write_packed
from crmatch.data.settings import GENERIC, Setting, parse_setting
from crmatch.errors import RequestError
from crmatch.methods import METHODS
from crmatch.runs.directory import run_directory, variant
from crmatch.spec.recipes import RECIPES, recipe
from crmatch.spec.run_spec import RunSpec, differences, flatten, parse_assignments, parse_spec, replace


def of(setting: str, method: str = "crmatch", name: str | None = None, data_dir: Path | None = None) -> RunSpec:
    return recipe(parse_setting(setting, data_dir), method, name)


def value(spec: RunSpec, key: str) -> Any:
    return dict(flatten(spec.to_json()))[key]


# What the recipes must contain: (setting, method, recipe) -> key: value
TABLE: list[tuple[str, str, str, dict[str, Any]]] = [
    ("cifar10@4", "crmatch", "paper", {
        "augmentation.variant": "paper", "method.ties": "exclude", "data.unlabeled": "remaining", "plan.steps": 524_288,
        "network.filters": 32, "network.repeat": 4, "plan.labeled_batch_size": 64, "plan.unlabeled_batch_size": 448,
        "method.rotation_source": "unlabeled", "method.rotation_images": None, "network.norm_momentum": 0.001,
        "plan.ema_decay": 0.999, "plan.ema_warmup": False, "data.image_size": 32, "headline": "last", "plan.weight_decay": 5e-4,
        "plan.learning_rate": 0.03, "plan.momentum": 0.9, "plan.nesterov": True, "method.threshold": 0.95,
        "method.feature_distance_weight": 1.0, "method.rotation_weight": 1.0, "method.unlabeled_weight": 1.0,
        "augmentation.mirror": True,
    }),
    ("cifar10@4", "fixmatch", "paper", {
        "augmentation.variant": "google", "method.ties": "include", "data.unlabeled": "all", "plan.steps": 1_048_576,
        "headline": "median_last_20", "plan.ema_decay": 0.999,
    }),
    ("cifar100@25", "crmatch", "paper", {"network.filters": 135, "plan.weight_decay": 1e-3, "plan.steps": 524_288}),
    ("svhn@4", "crmatch", "paper", {"augmentation.mirror": False, "plan.steps": 524_288}),
    ("stl10@100", "crmatch", "paper", {
        "network.scales": 4, "network.first_stride": 1, "data.image_size": 96, "plan.steps": 307_200,
    }),
    ("mini_imagenet@40", "crmatch", "paper", {
        "network.kind": "resnet18", "data.image_size": 84, "plan.steps": 307_200, "network.norm_momentum": 0.1,
    }),
    ("cifar10@4", "crmatch", "usb", {
        "augmentation.variant": "usb", "method.ties": "include", "data.unlabeled": "all", "plan.steps": 1_048_576,
        "network.block": "usb", "network.conv_bias": "stem", "method.rotation_source": "extra", "method.rotation_images": 64,
        "headline": "last", "network.filters": 32,
    }),
    ("cifar100@4", "crmatch", "usb", {"network.filters": 32, "plan.weight_decay": 1e-3}),
    ("svhn@4", "crmatch", "usb", {"augmentation.mirror": True}),
    ("stl10@100", "crmatch", "usb", {"network.scales": 4, "network.first_stride": 2}),
    ("cifar10@4", "crmatch", "original", {"augmentation.variant": "paper", "plan.steps": 524_288}),
    ("digits@4", "crmatch", "quick", {
        "augmentation.variant": "paper", "method.ties": "exclude", "data.unlabeled": "remaining", "plan.steps": 1200,
        "network.kind": "fast", "network.filters": 32, "plan.labeled_batch_size": 16, "plan.unlabeled_batch_size": 32,
        "method.rotation_source": "unlabeled", "method.rotation_images": 8, "network.norm_momentum": 0.1,
        "plan.ema_decay": 0.99, "plan.ema_warmup": True, "data.image_size": 16, "headline": "last",
        "augmentation.mirror": False,
    }),
    ("cifar10@4", "fixmatch", "quick", {
        "plan.steps": 1000, "network.filters": 32, "plan.ema_decay": 0.99, "data.image_size": 20,
        "data.unlabeled": "remaining", "augmentation.variant": "paper", "method.ties": "exclude",
    }),
    ("stl10@100", "crmatch", "quick", {"data.image_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "method", "name", "expected"), TABLE)
def test_recipes_say_what_the_specification_says(setting: str, method: str, name: str, expected: dict[str, Any]) -> None:
    spec = of(setting, method, name)
    assert {key: value(spec, key) for key in expected} == expected


def test_the_default_recipe_is_paper_for_the_papers_sets_and_quick_for_others(tmp_path: Path) -> None:
    write_packed(tmp_path / "cifar10_small.npz")
    assert of("cifar10@4").recipe == "paper"
    assert of("digits@4").recipe == "quick"
    assert of("cifar10_small@4", data_dir=tmp_path).recipe == "quick"


def test_a_folder_that_is_called_like_a_data_set_has_none_of_its_defaults(tmp_path: Path) -> None:
    folder = Setting("digits", 0, 32, 3, GENERIC, tmp_path)
    assert recipe(folder).plan == of("cifar10@4", name="quick").plan
    assert recipe(folder, name="usb").augmentation.mirror


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_survives_json_and_is_frozen(method: str, name: str) -> None:
    spec = of("cifar10@4", method, name)
    assert parse_spec(spec.to_json()) == spec
    with pytest.raises(Exception, match="frozen"):
        spec.seed = 3  # type: ignore[misc]


def test_usb_statistics_are_for_color_images_only(tmp_path: Path) -> None:
    write_packed(tmp_path / "svhn_gray.npz", channels=1)
    assert value(of("svhn_gray@2", name="usb", data_dir=tmp_path), "data.mean") == [0.5]
    assert value(of("svhn@4", name="usb"), "data.mean") == [0.438, 0.444, 0.473]


def test_the_weak_crop_moves_by_an_eighth_of_the_side() -> None:
    sides = {"cifar10@4": 4, "stl10@100": 12, "mini_imagenet@40": 10, "digits@4": 2}
    assert {setting: of(setting).padding for setting in sides} == sides
    assert replace(of("cifar10@4"), **{"augmentation.padding": 6}).padding == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method.treshold": 0.9}, r"unknown key 'method.treshold'\.\nDid you mean 'method.threshold'\?"),
        ({"treshold": 0.9}, r"unknown key 'treshold'\.\n.*Known: "),
        ({"plan": 3}, r"plan is a section, not a value\.\nIts keys: plan\.steps"),
        ({"method.threshold": 1.5}, r"method\.threshold: input should be less than or equal to 1, found 1\.5"),
        ({"method.distance": "cosin"}, r"method\.distance: input should be 'cosine', 'l2', .*found 'cosin'"),
        ({"method.distance": "squared_l2"}, r"method: distance squared_l2 has no lower bound"),
        ({"plan.steps": None}, r"plan: give the length either as steps or as unlabeled_epochs"),
        ({"network.filters": 0}, r"network\.filters: .* found 0"),
        ({"method.rotation_weight": float("inf")}, r"method\.rotation_weight: input should be a finite number"),
        ({"method.name": "fixmach"}, r"unknown method 'fixmach'\.\nDid you mean 'fixmatch'\?"),
        ({"plan.steps": 0, "split": 0}, r"\(1 more problem\)"),
    ],
)
def test_wrong_keys_and_values_are_answered_in_at_most_two_lines(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as failure:
        replace(of("cifar10@4"), **changes)
    assert len(str(failure.value).splitlines()) <= 2


def test_assignments_are_json_where_they_parse_and_text_elsewhere() -> None:
    parsed = parse_assignments(["a=0.9", "b=true", "c=l2", "d=null", "e=[1, 2]", "f=None", "g=x=y"])
    assert parsed == {"a": 0.9, "b": True, "c": "l2", "d": None, "e": [1, 2], "f": None, "g": "x=y"}
    with pytest.raises(RequestError, match="has no '='"):
        parse_assignments(["method.threshold"])


def test_differences_name_every_key_that_differs_with_both_values() -> None:
    spec = of("cifar10@4")
    changed = replace(spec, **{"method.threshold": 0.9, "plan.steps": 2})
    assert differences(spec, changed) == {"method.threshold": (0.95, 0.9), "plan.steps": (524_288, 2)}
    assert differences(spec, spec) == {}
    assert "method.rotation_weight" in differences(spec, of("cifar10@4", "fixmatch"))


@pytest.fixture
def digits() -> Setting:
    return parse_setting("digits@4")


def test_the_variant_names_the_recipe_and_each_changed_key(digits: Setting) -> None:
    spec = of("digits@4")
    assert variant(spec, digits) == ""
    assert variant(replace(spec, split=3, seed=9), digits) == ""
    assert variant(of("digits@4", name="paper"), digits) == "paper"
    changed = replace(spec, **{"plan.steps": 7, "method.rotation_weight": 2.0, "method.clamp": False})
    assert variant(changed, digits) == "clamp=False,rotation_weight=2,steps=7"


def test_two_specs_never_share_a_variant_even_when_it_is_long(digits: Setting) -> None:
    keys = {"method.threshold": 0.9, "method.projection": "mlp", "method.pair": "strong-strong", "plan.ema_decay": 0.7}
    first, second = (variant(replace(of("digits@4"), **keys, **{"plan.log_every": n}), digits) for n in (3, 4))
    assert first.startswith("pair=strong-strong,projection=mlp,and-3-more-")
    assert first != second
    assert variant(replace(of("digits@4"), **keys, **{"plan.log_every": 3}, split=2, seed=5), digits) == first


def test_runs_under_the_names_of_version_0_1_are_found(tmp_path: Path) -> None:
    keys = {"method.feature_distance_weight": 0.0, "method.rotation_weight": 0.0, "method.pair": "strong-strong"}
    short, long = replace(of("cifar10@4"), **{"plan.steps": 30}), replace(of("cifar10@4"), **keys)
    names = {short: "crmatch-plan.steps=30", long: "crmatch-method.feature_distance_weight=0.0,metho-ea77d27f"}
    for spec, name in names.items():
        assert run_directory(tmp_path, spec, parse_setting("cifar10@4")).path.parent.name != name
        old = tmp_path / "cifar10@4" / name / "split1-seed0"
        old.mkdir(parents=True)
        (old / "spec.json").write_text("{}")
        assert run_directory(tmp_path, spec, parse_setting("cifar10@4")).path == old


def test_keys_that_came_later_rename_no_run() -> None:
    """The hash that ends long names is that of the spec as it was before these keys."""
    spec = recipe(parse_setting("digits@4"))
    values = spec.to_json()
    for key in ("minutes", "backbone_rate", "start_size", "start_share"):
        del values["plan"][key]
    del values["data"]["code"], values["method"]["code"]
    del values["augmentation"]["translation"], values["start_from"], values["data"]["balance"]
    assert spec.hash == hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()
    assert replace(spec, **{"plan.minutes": 1}).hash != spec.hash
