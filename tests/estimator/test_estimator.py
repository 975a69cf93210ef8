"""The estimator: the weights of the command line, every kind of X and y, and scikit-learn's tools."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.dummy import DummyClassifier
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler

from conftest import TINY, Outcome
from crmatch import CRMatchClassifier, LabeledKFold, labeled_scorer
from crmatch.data.load import load_data
from crmatch.data.splits import make_split
from crmatch.methods import METHODS
from crmatch.spec.recipes import backbone_is_installed

README = Path(__file__).parents[2] / "README.md"
SHORT = {**TINY, "plan.evaluate_every": 4, "plan.log_every": 2, "plan.checkpoint_every": 8}
del SHORT["plan.steps"]  # a parameter of the estimator
Data = tuple[np.ndarray, np.ndarray]


def short(method: str = "crmatch", **parameters: Any) -> CRMatchClassifier:
    parameters = {"steps": 8, "device": "cpu", "verbose": 0, **parameters}
    return CRMatchClassifier(method, options={**SHORT, **parameters.pop("options", {})}, **parameters)


@pytest.fixture(scope="module")
def stripes() -> Data:
    """48 gray 8x8 pictures of two classes: bright above or bright below; a third of them labeled."""
    random = np.random.default_rng(0)
    X = random.integers(0, 60, (48, 8, 8), dtype=np.uint8)
    y = np.arange(48) % 2
    X[y == 0, :4] += 150
    X[y == 1, 4:] += 150
    return X, np.where(np.arange(48) % 3, -1, y)


def weights(estimator: CRMatchClassifier) -> bytes:
    return safetensors.torch.save(estimator.model_.network.deployed_state())


def test_the_command_line_gives_the_same_weights_to_the_bit(crmatch: Callable[..., Outcome], tmp_path: Path) -> None:
    same = {**SHORT, "plan.steps": 6, "plan.ema_decay": 0.99, "method.rotation_images": 4}
    assignments = [f"--set={key}={json.dumps(value)}" for key, value in same.items()]
    outcome = crmatch("train", "digits@4", "--seed", 3, "--out", tmp_path, *assignments, "--json")
    assert outcome.code == 0, outcome.err
    data = load_data("digits")
    split = make_split(data, 4, 1, "balanced", "remaining")
    y = np.full(len(data.train), -1)
    y[split.labeled] = data.train.labels[split.labeled]
    estimator = CRMatchClassifier(mirror=False, options=same, device="cpu", random_state=3)
    estimator.fit(data.train.images[:, 0].numpy(), y)
    run = Path(json.loads(outcome.out)["run"])
    assert weights(estimator) == (run / "model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss/total"] for line in estimator.history_] == [line["loss/total"] for line in lines]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_by_its_name(stripes: Data, method: str) -> None:
    X, y = stripes
    estimator = short(method, steps=2).fit(X, y)
    assert estimator.n_iter_ == 2
    assert estimator.predict_proba(X[:5]).sum(axis=1) == pytest.approx(np.ones(5), abs=1e-6)
    assert np.exp(estimator.predict_log_proba(X[:5])) == pytest.approx(estimator.predict_proba(X[:5]))
    features = short(method, steps=2).fit(X.reshape(48, 64)[:, :50], y)
    assert features.spec_.augmentation.geometry is features.spec_.augmentation.mirror is False


@pytest.mark.parametrize("unlabeled", [-1, None, np.nan, ""], ids=["minus one", "none", "nan", "empty text"])
def test_every_mark_of_unlabeled_means_the_same(stripes: Data, unlabeled: Any) -> None:
    X, y = stripes
    names = np.array(["above", "below"], object)[y]
    names[y == -1] = unlabeled
    estimator = short().fit(X, names)
    assert estimator.classes_.tolist() == ["above", "below"]
    assert weights(estimator) == weights(short().fit(X, y))
    assert estimator.transduction_[::3].tolist() == names[::3].tolist()
    assert estimator.transduction_[1:].tolist()[1] == estimator.predict(X)[2]
    assert estimator.score(X, names) == np.mean(estimator.predict(X[::3]) == names[::3])


def test_nan_in_numbers_is_unlabeled_and_text_minus_one_is_refused(stripes: Data) -> None:
    X, y = stripes
    estimator = short().fit(X, np.where(y == -1, np.nan, y.astype(float)))
    assert weights(estimator) == weights(short().fit(X, y))
    with pytest.raises(ValueError, match='text with "-1"'):
        short().fit(X, y.astype(str))
    with pytest.raises(ValueError, match="every entry of y is unlabeled"):
        estimator.score(X, np.full(48, -1))


@pytest.mark.parametrize("dtype", ["string", "str", "category", "Int64", "object"])
def test_missing_values_of_pandas_are_unlabeled(stripes: Data, dtype: str) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = stripes
    names = [0, 1] if dtype in ("Int64", "object") else ["above", "below"]
    series = pandas.Series([pandas.NA if number == -1 else names[number] for number in y], dtype=dtype)
    estimator = short(steps=2).fit(X, series)
    assert estimator.classes_.tolist() == names
    assert weights(estimator) == weights(short(steps=2).fit(X, y))
    assert estimator.score(X, series) == estimator.score(X, np.array([*names, -1], object)[y])


@pytest.mark.process
def test_paths_shapes_and_scaled_numbers_are_the_same_pictures(stripes: Data, tmp_path: Path) -> None:
    X, y = stripes
    X = X.copy()
    X[0, 0, :2] = 0, 255  # the whole range, so that scaling changes nothing
    expected = weights(short().fit(X, y))
    paths = [tmp_path / f"{row}.png" for row in range(48)]
    for path, pixels in zip(paths, X, strict=True):
        Image.fromarray(pixels).save(path)
    assert weights(short().fit(X[..., None], y)) == expected
    assert weights(short(image_shape=(8, 8)).fit(X.reshape(48, 64), y)) == expected
    assert weights(short().fit(X / 255, y)) == expected
    by_path = short().fit(paths, y)
    assert weights(by_path) == expected
    assert (by_path.predict_proba(np.array(paths[:7], object)) == short().fit(X, y).predict_proba(X[:7])).all()
    pictures = [Image.fromarray(pixels) for pixels in X]
    assert weights(short().fit(pictures, y)) == expected
    assert (by_path.predict_proba(pictures[:7]) == by_path.predict_proba(X[:7])).all()
    paths[3].write_text("no picture")
    with pytest.raises(ValueError, match=r"1 of 48 pictures cannot be read: .*3\.png"):
        short().fit(paths, y)


def test_features_are_scaled_by_what_fit_saw_and_clipped(stripes: Data) -> None:
    random = np.random.default_rng(0)
    X, y = random.normal(size=(30, 70)) * 9, np.arange(30) % 3
    estimator = short(steps=2).fit(X, y)
    form = estimator.input_format_
    assert (form.kind, form.side) == ("features", 9)
    images = form.images(np.stack([X.min(axis=0) - 5, X.max(axis=0) + 5]), 9).flatten(1)
    assert images[0].eq(0).all()
    assert images[1, :70].eq(255).all()
    assert images[1, 70:].eq(0).all()
    assert "rotation" not in estimator.history_[-1]
    assert estimator.spec_.padding == 0


@pytest.mark.parametrize(
    ("parameters", "shape", "message"),
    [
        ({"image_shape": (8, 9)}, (48, 64), "does not fit 64 features"),
        ({}, (48, 8, 4, 2), "holds no pictures"),
        ({"image_size": 16}, (48, 64), "without geometry"),
        ({"method": "fixmatsch"}, (48, 8, 8), "Did you mean 'fixmatch'"),
        ({"options": {"plan.stepz": 3}}, (48, 8, 8), "unknown key 'plan.stepz'"),
        ({"image_size": 4}, (48, 8, 8), "image_size"),
    ],
)
def test_wrong_requests_are_refused(stripes: Data, parameters: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    X, y = stripes
    with pytest.raises(ValueError, match=message):
        short(**parameters).fit(X.reshape(shape), y)


def test_predicting_another_kind_of_picture_is_noticed(stripes: Data) -> None:
    X, y = stripes
    with pytest.warns(UserWarning, match=r"8x8 .*7x8"):
        short(steps=2).fit(X, y).predict(X[:, :7])
    with pytest.raises(ValueError, match="held scaled numbers in fit"):
        short(steps=2).fit(X / 9, y).predict([Image.fromarray(X[0])])


def test_fit_says_once_how_long_it_takes(stripes: Data, capsys: pytest.CaptureFixture[str]) -> None:
    short(verbose=1).fit(*stripes)
    assert re.fullmatch(r"crmatch: 8 steps, about \d+ s\n", capsys.readouterr().err)
    short(verbose=0).fit(*stripes)
    assert capsys.readouterr() == ("", "")


def test_it_can_be_pickled_cloned_and_stays_the_same(stripes: Data) -> None:
    X, y = stripes
    estimator = short(random_state=7).fit(X, y)
    content = pickle.dumps(estimator)
    again = pickle.loads(content)
    assert (again.predict_proba(X) == estimator.predict_proba(X)).all()
    assert b"torch" not in content.replace(b"crmatch", b"").replace(b"safetensors", b"")
    assert weights(clone(estimator).fit(X, y)) == weights(estimator)
    first, second = (short(random_state=np.random.RandomState(3)).fit(X, y) for _ in range(2))
    assert weights(first) == weights(second)


def test_pipelines_searches_and_cross_validation_work(stripes: Data) -> None:
    X, y = stripes
    rows = X.reshape(48, 64)
    pipeline = make_pipeline(MinMaxScaler(), short(image_shape=(8, 8), steps=4))
    assert len(cross_val_score(pipeline, rows, y, cv=StratifiedKFold(2), error_score="raise")) == 2


def test_a_search_in_a_pipeline_sets_parameters_that_only_some_methods_have(stripes: Data) -> None:
    X, y = stripes
    options = {key: value for key, value in SHORT.items() if not key.endswith("batch_size")}
    estimator = CRMatchClassifier(steps=2, image_shape=(8, 8), options=options, device="cpu", verbose=0)
    pipeline = Pipeline([("scale", MinMaxScaler()), ("classify", estimator)])
    grid = {
        "classify__method": ["supervised", "fixmatch"], "classify__threshold": [0.6], "classify__learning_rate": [0.01],
        "classify__labeled_batch_size": [4], "classify__unlabeled_batch_size": [8], "classify__recipe": ["quick"],
        "classify__backbone": [None],
    }  # fmt: skip
    scoring = {"f1": labeled_scorer("f1_macro"), "loss": labeled_scorer("neg_log_loss")}
    search = GridSearchCV(pipeline, grid, scoring=scoring, refit="loss", cv=LabeledKFold(2), error_score="raise")
    best = search.fit(X.reshape(48, 64), y).best_params_
    assert torch.isfinite(torch.tensor(search.cv_results_["mean_test_f1"])).all()
    for method in grid["classify__method"]:
        spec = pipeline.set_params(**{**best, "classify__method": method}).fit(X.reshape(48, 64), y)["classify"].spec_
        assert (spec.method.name, spec.recipe, getattr(spec.method, "threshold", 0.6)) == (method, "quick", 0.6)
        assert (spec.plan.learning_rate, spec.plan.labeled_batch_size, spec.plan.unlabeled_batch_size) == (0.01, 4, 8)


def test_a_pretrained_backbone_gives_the_features(stripes: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not backbone_is_installed():
        pytest.skip("needs pip install 'crmatch[pretrained]'")
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path))
    monkeypatch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: False)  # its export is slow
    options = {"data.image_size": 32, "network.strong_views": 2}
    found = CRMatchClassifier(backbone="efficientnet-lite0", steps=150, device="cpu", verbose=0, options=options).fit(*stripes)
    assert list((tmp_path / "features").rglob("strong1.npy"))
    assert (found.predict(stripes[0]) != np.arange(48) % 2).mean() < 0.3


@pytest.mark.parametrize("unlabeled", [-1, None], ids=["minus one", "none"])
def test_labeled_scorer_and_folds_leave_out_unlabeled_entries(unlabeled: Any) -> None:
    X, y = np.arange(60)[:, None], np.arange(60) % 3
    partly = np.where(np.arange(60) % 4 == 0, y, np.array(unlabeled))
    labeled = np.flatnonzero(np.arange(60) % 4 == 0)
    model = DummyClassifier(strategy="constant", constant=1).fit(X, y)
    score = labeled_scorer("f1_macro")(model, X, partly)
    assert score == f1_score(y[labeled], model.predict(X[labeled]), average="macro")
    folds = list(LabeledKFold(3).split(X, partly))
    assert len(folds) == LabeledKFold(3).get_n_splits() == 3
    assert sorted(np.concatenate([test for _, test in folds])) == labeled.tolist()
    for train, test in folds:
        assert sorted([*train, *test]) == list(range(60))
        assert set(np.bincount(y[test], minlength=3)) <= {1, 2}  # stratified
    with pytest.raises(ValueError, match="every entry of y is unlabeled"):
        labeled_scorer("accuracy")(model, X, np.full(60, unlabeled))


@pytest.mark.process
def test_the_readmes_example_runs_as_printed_and_beats_label_spreading(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "CRMatchClassifier" in block)
    outcome = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert outcome.returncode == 0, outcome.stderr
    spreading, ours = map(float, re.findall(r"([\d.]+) %", outcome.stdout))
    assert ours <= 8 < spreading
