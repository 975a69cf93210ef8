"""Recipes: (setting, method, name) -> RunSpec. Imports no torch.

`paper` is what the paper prints, with FixMatch's protocol where it is silent; `usb` is the public USB code base; `original` is
each method's own paper; `quick` is ours: minutes on a CPU instead of days on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from crmatch.atomic_files import checksum
from crmatch.data.settings import EPOCH_STEPS, Setting, parse_setting
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods import METHODS, build_method, method_class
from crmatch.networks.config import NETWORKS, WideResNetConfig
from crmatch.spec.run_spec import AugmentationSpec, DataSpec, RunSpec, replace
from crmatch.training.plan import TrainPlan

# Mean and standard deviation per channel in USB's code; for CIFAR-10 it has those of ImageNet.
USB_STATISTICS: dict[str | None, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "svhn": ((0.4380, 0.4440, 0.4730), (0.1751, 0.1771, 0.1744)),
    "stl10": ((0.4408, 0.4278, 0.3867), (0.2682, 0.2612, 0.2686)),
}


def default_recipe(setting: Setting) -> str:
    """`paper` for the paper's own data sets, `quick` for all others."""
    return "paper" if setting.is_benchmark else "quick"


def recipe(setting: Setting, method: str = "crmatch", name: str | None = None) -> RunSpec:
    """The spec of split 1, seed 0 for a method on a setting by a named recipe."""
    name = name or default_recipe(setting)
    if name not in RECIPES:
        raise unknown_name_error("recipe", name, RECIPES)
    if method not in METHODS:
        raise unknown_name_error("method", method, METHODS)
    return replace(RECIPES[name](setting, method), **method_class(method).recipe_keys(name, setting))


def _paper(setting: Setting, method: str) -> RunSpec:
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


def _usb(setting: Setting, method: str) -> RunSpec:
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


def _original(setting: Setting, method: str) -> RunSpec:
    """As `paper`; a method's own paper differs in its `recipe_keys`."""
    return _paper(setting, method).model_copy(update={"recipe": "original"})


def _quick(setting: Setting, method: str) -> RunSpec:
    steps = setting.defaults.quick_steps
    return RunSpec(
        setting=setting.name,
        recipe="quick",
        # CIFAR's 32 pixels become 16, larger images 32.
        data=_data(setting, setting.image_size if setting.image_size < 32 else 16 if setting.image_size == 32 else 32),
        augmentation=AugmentationSpec(mirror=setting.defaults.mirror),
        network=WideResNetConfig(filters=32 if setting.channels == 3 else 16, repeat=1, norm_momentum=0.1),
        method=build_method(method, _ties(method, "exclude")),
        plan=TrainPlan(
            steps=steps,
            labeled_batch_size=16,
            unlabeled_batch_size=112,
            weight_decay=setting.defaults.weight_decay,
            ema_decay=setting.defaults.quick_ema_decay,
            ema_warmup=True,
            evaluate_every=steps // 20,
            log_every=steps // 100,
            checkpoint_every=steps // 20,
        ),
    )


Recipe = Callable[[Setting, str], RunSpec]
RECIPES: dict[str, Recipe] = {"paper": _paper, "usb": _usb, "original": _original, "quick": _quick}


def setting_of(spec: RunSpec, data_dir: Path | None = None) -> Setting:
    """The setting a spec was made for."""
    labels_file = Path(spec.data.labels_file) if spec.data.labels_file else None
    return parse_setting(spec.data.folder or spec.setting, data_dir, labels_file)


def _data(setting: Setting, image_size: int, **choices: Any) -> DataSpec:
    return DataSpec(
        folder=str(setting.folder) if setting.folder else None,
        labels_file=str(setting.labels_file) if setting.labels_file else None,
        labels_checksum=_labels_checksum(setting.labels_file) if setting.labels_file else None,
        image_size=image_size,
        split_rule=setting.defaults.split_rule,
        **choices,
    )


def _labels_checksum(labels_file: Path) -> str:
    try:
        return checksum(labels_file.read_bytes())[:8]
    except OSError as error:
        reason = f"{labels_file} cannot be read: {str(error.strerror).lower()}"
        raise RequestError(f"{reason}.\n--labels takes a CSV file with the header path,label.") from error


def _ties(method: str, ties: str) -> dict[str, Any]:
    """Whether a confidence equal to the threshold passes, for methods with that choice."""
    return {"ties": ties} if "ties" in method_class(method).model_fields else {}
