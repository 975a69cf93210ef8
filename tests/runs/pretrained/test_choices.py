"""Which recipe and image size a run with a pretrained backbone has, and how it is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from conftest import Command, options
from crmatch.data.settings import parse_setting
from crmatch.networks.pretrained.load import describe_input
from crmatch.runs.directory import variant
from crmatch.runs.image_size import choose_image_size, largest_without_loss
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import default_recipe, recipe
from crmatch.spec.run_spec import replace
from pretrained_runs import SHORT_HEAD, needs_backbone, spec_of

pytestmark = [needs_backbone, pytest.mark.usefixtures("fast_heads")]


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [({96: 50, 128: 40, 160: 45}, 160), ({96: 30, 128: 45, 160: 60}, 96), ({96: 40, 128: 40, 160: 60}, 128)],
)
def test_the_largest_image_size_is_chosen_that_the_labels_do_not_speak_against(errors: dict[int, float], chosen: int) -> None:
    assert largest_without_loss(errors, labels=40) == chosen  # a standard error of 40 labels is 7 to 8 points


@pytest.mark.parametrize("kind", ["packed", "folder"])
def test_the_image_size_follows_the_time_and_the_labels(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    text = "stripes@4"
    if kind == "folder":
        data, split = workspace.load(spec_of(workspace))
        for row in split.labeled.tolist():
            place = tmp_path / "photos" / "labeled" / str(data.train.labels[row].item())
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.train.images[row].permute(1, 2, 0).numpy()).save(place / f"{row}.png")
        text = str(tmp_path / "photos")
    setting = workspace.setting(text)
    spec = recipe(setting, "crmatch", "head")
    assert choose_image_size(spec, setting, workspace, seconds=0.0) == (96, {})
    monkeypatch.setattr("crmatch.runs.image_size.SIZES", (32, 48))
    choice = choose_image_size(spec, setting, workspace, seconds=1e6)
    assert list(choice.errors) == [32, 48]
    assert choice.size in choice.errors


@pytest.mark.parametrize(("method", "name"), [("crmatch", "head"), ("mixmatch", "quick")])
def test_a_folder_starts_from_a_backbone_if_its_method_can(workspace: Workspace, method: str, name: str) -> None:
    folder = workspace.setting("stripes@4")._replace(folder=Path("photos"))
    assert default_recipe(folder, method) == name


@pytest.mark.parametrize("name", ["head", "tune"])
def test_a_run_with_a_given_size_has_another_name_than_one_whose_size_is_chosen(name: str) -> None:
    setting = parse_setting("digits@4")
    given = recipe(setting, "crmatch", name)
    chosen = replace(given, **{"network.size_chosen": True})
    assert "image_size=96" in variant(given, setting)
    assert "image_size" not in variant(chosen, setting)


def test_a_network_with_a_single_image_size_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = describe_input("efficientnet-lite0")._replace(image_size=224, multiple_of=224)
    monkeypatch.setattr("crmatch.networks.pretrained.load.describe_input", lambda backbone: fixed)
    assert recipe(parse_setting("digits@4"), "crmatch", "head").data.image_size == 224


def test_the_command_trains_both_heads_tells_what_the_unlabeled_images_bring_and_finds_its_runs_again(
    crmatch: Command, workspace: Workspace
) -> None:
    command = ["train", "stripes@4", "--backbone", "efficientnet-lite0", "--baseline", *options(SHORT_HEAD)]
    places = ["--data-dir", workspace.data_dir, "--out", workspace.out]
    outcome = crmatch(*command, *places)
    assert outcome.code == 0, outcome.err
    assert "Cross-validation over 12 labels" in outcome.err
    assert "Saved in" in outcome.out
    assert (workspace.out / "stripes@4").is_dir()
    assert crmatch(*command, *places).out == outcome.out


def test_the_chosen_image_size_is_kept_in_the_spec_but_not_in_the_name(
    crmatch: Command, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.runs.image_size.SIZES", (32, 40))
    command = ["train", "stripes@4", "--backbone", "efficientnet-lite0", "--steps", "5", "--set=network.strong_views=1"]
    places = ["--data-dir", workspace.data_dir, "--out", tmp_path]
    first = crmatch(*command, *places)
    assert first.code == 0, first.err
    assert "cross-validation over the labels" in first.err
    (name,) = [path.name for path in (tmp_path / "stripes@4").iterdir()]
    assert name == "crmatch-head,strong_views=1,steps=5"
    monkeypatch.setattr("crmatch.runs.image_size.choose_image_size", None)  # not called again
    assert crmatch(*command, *places).out == first.out


def test_a_backbone_needs_a_recipe_that_uses_it(crmatch: Command) -> None:
    outcome = crmatch("train", "digits@4", "--backbone", "efficientnet-lite0", "--recipe", "quick")
    assert outcome.code == 2
    assert "needs recipe head or tune" in outcome.err
    outcome = crmatch("train", "digits@4", "--backbone", "efficientnet-lite9")
    assert outcome.code == 2
    assert "efficientnet-lite0" in outcome.err
