"""CRMatchClassifier: all methods of this package as a scikit-learn estimator.

The same spec, data and seed give bit-identical weights on the command line: both train an `Experiment` in the same loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import safetensors.torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from crmatch.cli.display import Display
from crmatch.data.images import UNLABELED, DataSet, ImageSet
from crmatch.data.settings import GENERIC, Setting, default_data_dir
from crmatch.data.splits import given_split
from crmatch.errors import RequestError
from crmatch.estimator.inputs import InputFormat, are_files, labeled_entries, learn_format, read_files, read_labels
from crmatch.networks.config import PretrainedConfig
from crmatch.predict.model import build_model
from crmatch.runs.experiment import Experiment
from crmatch.runs.features import experiment_from_backbone
from crmatch.spec.recipes import DEFAULT_BACKBONE
from crmatch.spec.recipes import recipe as make_recipe
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.execution import Execution
from crmatch.training.loop import LogLine, train
from crmatch.training.runtime import choose_runtime

Array = NDArray[Any]
EXPECTED_FAILED_CHECKS = {
    "check_classifiers_classes": "the last part has classes -1 and 1, but -1 means unlabeled, as in sklearn.semi_supervised "
    "(whose estimators this check exempts by their names); under such a name it passes",
}
"""Checks of scikit-learn that this estimator does not pass, with the reasons; docs/estimator.md lists them."""


class CRMatchClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Image classifier for few labels and many unlabeled images.

    Args:
        method: a name from `crmatch show methods`.
        recipe: `quick` (minutes on a CPU), `paper`, `usb` or `original`; with a backbone `head` or `tune`.
        backbone: a pretrained network, e.g. `efficientnet-lite0` (`crmatch show backbones` lists them). A classifier is trained
            on its features, which are kept on disk; with recipe `tune` the whole network is trained afterwards.
        steps: number of training steps; None for the recipe's.
        threshold: confidence above which pseudo-labels are used; None for the recipe's. Methods without a threshold ignore
            it, so that one grid can hold several methods.
        learning_rate: None for the recipe's.
        labeled_batch_size: labeled images in a step; None for the recipe's.
        unlabeled_batch_size: unlabeled images in a step; None for the recipe's.
        image_shape: (H, W) or (H, W, C) of the pictures in a two-dimensional X. Without it, the columns of such an X are
            features without geometry: each row becomes a grayscale square, and augmentation moves no pixels.
        image_size: side of the training images; None for the recipe's.
        mirror: whether mirrored images keep their class; None for the recipe's choice, which is True. Use False for text.
        options: other keys of the spec, as for `--set`, e.g. `{"method.rotation_weight": 0.5}`.
        device: `auto`, `cpu` or `cuda`.
        random_state: the seed; None for a random one.
        verbose: 0 prints nothing, 1 one line with the expected time (on stderr, after the first steps), 2 progress.

    Attributes:
        classes_: sorted classes.
        transduction_: the class of each training image, given or predicted.
        history_: curves, one dict per log point.
        n_iter_: number of training steps.
        spec_: the spec of the run.
        model_: the trained `crmatch.predict.model.Model`.
    """

    def __init__(
        self,
        method: str = "crmatch",
        *,
        recipe: str | None = None,
        backbone: str | None = None,
        steps: int | None = None,
        threshold: float | None = None,
        learning_rate: float | None = None,
        labeled_batch_size: int | None = None,
        unlabeled_batch_size: int | None = None,
        image_shape: Sequence[int] | None = None,
        image_size: int | None = None,
        mirror: bool | None = None,
        options: Mapping[str, Any] | None = None,
        device: str = "auto",
        random_state: Any = 0,
        verbose: int = 1,
    ) -> None:
        self.method = method
        self.recipe = recipe
        self.backbone = backbone
        self.steps = steps
        self.threshold = threshold
        self.learning_rate = learning_rate
        self.labeled_batch_size = labeled_batch_size
        self.unlabeled_batch_size = unlabeled_batch_size
        self.image_shape = image_shape
        self.image_size = image_size
        self.mirror = mirror
        self.options = options
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> Self:
        """Train on labeled and unlabeled images.

        Args:
            X: pictures uint8 (N, H, W[, C]), rows of numbers (N, features), or a list of N paths or PIL images. Numbers of
                any other type are scaled to 0..255 by the range in this X.
            y: N classes; -1, NaN, None, pandas' NA or "" means unlabeled. If all images are labeled, they are the unlabeled
                ones too.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        X, labels = self._checked(X, reset=True), column_or_1d(y, warn=True)
        check_consistent_length(X, labels)
        self.classes_, known = read_labels(labels)
        check_classification_targets(self.classes_)
        if len(self.classes_) < 2:
            found = f"one class only: {self.classes_[0]}" if len(self.classes_) else "no class"
            raise RequestError(f"y holds {found} (-1 means unlabeled).\nLabel images of at least two classes.")
        self.input_format_ = learn_format(X, self.image_shape)
        self.spec_ = self._spec(self.input_format_, known)
        images = self.input_format_.images(X, self.spec_.data.image_size)
        self._train(ImageSet(images, known, tuple(str(name) for name in self.classes_)))
        unlabeled = known == UNLABELED
        if unlabeled.any():
            known = known.clone()
            known[unlabeled] = self.model_.predict_probabilities(images[unlabeled]).argmax(dim=1)
        self.transduction_ = self.classes_[known.numpy()]
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities (N, K) of the classes, in the order of `classes_`."""
        check_is_fitted(self)
        images = self.input_format_.images(self._checked(X, reset=False), self.spec_.data.image_size)
        probabilities: NDArray[np.float64] = self.model_.predict_probabilities(images).double().numpy()
        return probabilities

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Logarithms of the probabilities (N, K); -inf for a probability of 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Array:
        """The most probable class of each image."""
        best = self.predict_proba(X).argmax(axis=1)  # raises if the estimator is not fitted, so before classes_
        classes: Array = self.classes_[best]
        return classes

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on the labeled entries of y; unlabeled ones are left out."""
        rows, labels = labeled_entries(y)
        weights = None if sample_weight is None else np.asarray(sample_weight)[rows]
        return float(super().score(_safe_indexing(X, rows), labels, weights))

    def _checked(self, X: Any, reset: bool) -> Any:
        """X as an array of finite numbers, checked by scikit-learn, or as a list of paths or PIL images."""
        if are_files(X := read_files(X)):
            return X
        if (np.ndim(X) if isinstance(X, list | tuple) else getattr(X, "ndim", 2)) > 2:
            return check_array(X, allow_nd=True, ensure_2d=False, estimator=self)
        return validate_data(self, X, reset=reset)

    def _spec(self, form: InputFormat, known: Tensor) -> RunSpec:
        """The recipe's spec with the changes that parameters and data require; `options` override them."""
        labeled = int((known != UNLABELED).sum())
        setting = Setting("array", max(1, round(labeled / len(self.classes_))), form.side, form.channels, GENERIC)
        seed = self.random_state
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
            seed = check_random_state(seed).randint(2**31)
        if self.backbone and self.recipe not in (None, "head", "tune"):
            raise RequestError(
                f"recipe {self.recipe} trains from scratch, but a backbone was given.\nUse head or tune, or no backbone."
            )
        name = self.recipe or ("head" if self.backbone else "quick")
        spec = make_recipe(setting, self.method, name, self.backbone or DEFAULT_BACKBONE)
        changes = {
            "seed": int(seed),
            "plan.steps": self.steps,
            "plan.learning_rate": self.learning_rate,
            "plan.labeled_batch_size": self.labeled_batch_size,
            "plan.unlabeled_batch_size": self.unlabeled_batch_size,
            "method.threshold": self.threshold,
            "data.image_size": self.image_size,
            "augmentation.mirror": self.mirror,
            "data.unlabeled": "all" if labeled == len(known) else None,
        }
        if form.kind == "features":
            if self.image_size is not None:
                raise RequestError("image_size was given for features without geometry.\nGive image_shape too, or neither.")
            changes |= {"data.image_size": form.side, "augmentation.padding": 0, "method.rotation_weight": 0}
            changes |= {"augmentation.mirror": False, "augmentation.geometry": False}
        absent = {f"method.{name}" for name in ("threshold", "rotation_weight") if not hasattr(spec.method, name)}
        given = {key: value for key, value in changes.items() if value is not None and key not in absent}
        return replace(spec, **{**given, **(self.options or {})})

    def _train(self, train_set: ImageSet) -> None:
        spec = self.spec_
        runtime = choose_runtime(Execution(self.device), spec.precision)
        split = given_split(train_set.labels, spec.data.unlabeled)
        self.history_: list[LogLine] = []
        with Display(spec, quiet=not self.verbose, brief=self.verbose == 1) as display:
            experiment = Experiment(spec, DataSet(train_set, None), split, runtime)
            if isinstance(spec.network, PretrainedConfig):
                experiment = experiment_from_backbone(experiment, default_data_dir() / "features", display.features)
            training = experiment.training()
            display.start(0, training.total_steps)

            def log(line: LogLine) -> None:
                self.history_.append(line)
                display.log(line)

            train(training, experiment.observers(log, advance=display.advance))
        self.n_iter_ = training.step
        self.model_ = build_model(*experiment.deployed(training.models))

    def __getstate__(self) -> dict[str, Any]:
        """The network becomes the content of a safetensors file, so that the state holds plain values only."""
        state = dict(super().__getstate__())
        if "model_" in state:
            model = state["model_"]
            state["model_"] = (safetensors.torch.save(model.network.deployed_state()), dict(model.config))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            self.model_ = build_model(*state["model_"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags
