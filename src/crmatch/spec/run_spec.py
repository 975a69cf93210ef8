"""RunSpec: one immutable, validated value that defines a run. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError, ValidationInfo, model_validator

from crmatch.errors import CRMatchError, RequestError, unknown_name_error
from crmatch.methods import adopt, parse_method
from crmatch.methods.base import Method
from crmatch.networks.config import NetworkConfig, PretrainedConfig, WideResNetConfig, find_network
from crmatch.strict_model import StrictModel
from crmatch.training.plan import TrainPlan

PathText = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]  # what Linux accepts as a path
NUMERICS = 4  # increased by changes that move golden losses; stored in records and shown in tables


class DataSpec(StrictModel):
    """Which images are used, at which size, and which of them are unlabeled."""

    folder: PathText | None = None  # a folder of pictures; None: the data set that the setting names
    code: str | None = None  # the function that makes the images, and a checksum of its file; None: a packed set
    labels_file: PathText | None = None  # a labels.csv that replaces the folder's own, or adds labels to those of a setting
    labels_checksum: str | None = None  # 8 hex digits for the content of that file or the folder's own: new labels, new run
    image_size: int = Field(32, ge=8, le=512)
    unlabeled: Literal["remaining", "all"] = "remaining"  # whether the unlabeled images exclude or include the labeled ones
    balance: bool = False  # whether labeled batches have every class equally often, however many labels it has
    split_rule: Literal["balanced", "proportional", "folds"] = "balanced"
    """The same number of labels for every class, numbers in proportion to the classes, or the data set's published folds."""
    mean: tuple[float, ...] = (0.5,)  # per channel, or one value for all, of pixels scaled to 0..1
    std: tuple[Annotated[float, Field(gt=0)], ...] = (0.5,)


class AugmentationSpec(StrictModel):
    """Weak augmentation and the strong policy."""

    mirror: bool = True
    padding: int | None = Field(None, ge=0)  # largest shift of the weak crop in pixels; None: an eighth of the side
    padding_mode: Literal["reflect", "zero"] = "reflect"  # what a shifted crop shows beyond the image
    rotation: float = Field(0.0, ge=0, le=180)  # of the weak view: up to so many degrees either way
    jitter: bool = False  # whether the weak view gets ColorJitter(0.4, 0.4, 0.4, 0.1)
    policy: Literal["randaugment", "ctaugment"] = "randaugment"
    variant: Literal["paper", "google", "author", "kekmodel", "usb", "featmatch"] = "paper"  # of RandAugment
    cutout: bool = True  # whether every strong view ends with a gray square (not in ReMixMatch and FeatMatch)
    geometry: bool = True  # whether strong views may rotate, shear, translate and rescale
    translation: Literal["side", "pixels"] = "side"  # unit of CTAugment's translations by up to 0.3; `pixels`: Google's code


STORED = {"stored": True}
"""The context in which pydantic validates values from a file."""


def _as_method(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, Mapping):
        return parse_method(value, stored=info.context == STORED)
    return adopt(value) if isinstance(value, Method) else value


class RunSpec(StrictModel):
    """Everything that determines the result of a run; where it is kept and computed are a `Workspace` and an `Execution`."""

    setting: str
    recipe: str
    split: int = Field(1, ge=1)
    seed: int = 0
    data: DataSpec = DataSpec()
    augmentation: AugmentationSpec = AugmentationSpec()
    network: NetworkConfig = WideResNetConfig()
    method: Annotated[SerializeAsAny[Method], BeforeValidator(_as_method)]
    plan: TrainPlan
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 are those of the backbone in training; weights, heads, losses and evaluation stay in fp32."""
    headline: Literal["last", "median_last_20"] = "last"
    """Which error is reported: of the final model, or the median of the last 20 evaluations (FixMatch's protocol)."""
    start_from: str | None = None
    """The directory of the run whose weights this one starts from, and a checksum of them: `/.../split1-seed0#1a2b3c4d`."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.plan.start_size is not None and self.plan.start_size >= self.data.image_size:
            found = f"plan.start_size {self.plan.start_size}"
            raise ValueError(f"{found} must be below data.image_size {self.data.image_size}, or null for images of one size")
        if self.plan.start_size is not None and isinstance(self.network, PretrainedConfig):
            raise ValueError("plan.start_size is for networks without pretrained weights; give null")
        if self.padding >= self.data.image_size:
            raise ValueError(f"augmentation.padding {self.padding} must be below data.image_size {self.data.image_size}")
        return self

    @property
    def padding(self) -> int:
        """Largest shift of the weak crop in pixels."""
        return self.data.image_size // 8 if self.augmentation.padding is None else self.augmentation.padding

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """8 hex digits that identify the spec. Keys that came later are left out at their defaults: names of runs stay."""
        values = self.to_json()
        later = {
            ("plan", "minutes"): None,
            ("plan", "backbone_rate"): 1.0,
            ("plan", "start_size"): None,
            ("plan", "start_share"): 0.5,
            ("data", "code"): None,
            ("data", "balance"): False,
            ("method", "code"): None,
            ("augmentation", "translation"): "side",
        }
        for (section, key), default in later.items():
            if values[section][key] == default:
                del values[section][key]
        if self.start_from is None:
            del values["start_from"]
        return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4).hexdigest()


def parse_spec(values: Mapping[str, Any], stored: bool = False) -> RunSpec:
    """A spec from JSON values; raises `RequestError` with the key, the value found and what would work.

    Values that are `stored` in a file may name a method that is not installed here.
    """
    try:
        return RunSpec.model_validate(values, context=STORED if stored else None)
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        raise cause if isinstance(cause, CRMatchError) else RequestError(_explain(error)) from error


def replace(spec: RunSpec, **changes: Any) -> RunSpec:
    """A new spec with dotted keys changed, e.g. `replace(spec, **{"method.threshold": 0.9})`; the result is validated.

    A section may be replaced by a value of its class, e.g. `method=CRMatch(threshold=0.9)`, and `network` by a name or by
    `path/mine.py:function`.
    """
    values = spec.to_json()
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        if key == "network" and isinstance(value, str):
            value = find_network(value)
        if isinstance(value, BaseModel):
            value = (adopt(value) if isinstance(value, Method) else value).model_dump(mode="json")
        target: Any = values
        for section in sections:
            target = target.get(section) if isinstance(target, dict) else None
        if not isinstance(target, dict) or leaf not in target:
            known = [name for name, _ in flatten(values)]
            siblings = [name for name in known if name.startswith(f"{sections[0]}.")] if sections else []
            raise unknown_name_error("key", key, siblings or known)
        if isinstance(target[leaf], dict) and not isinstance(value, dict):
            inside = ", ".join(f"{key}.{name}" for name in target[leaf])
            raise RequestError(f"{key} is a section, not a value.\nIts keys: {inside}")
        target[leaf] = value
    return parse_spec(values)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; lists are leaves."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(first: RunSpec, second: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; None if a spec has no such key."""
    one, two = dict(flatten(first.to_json())), dict(flatten(second.to_json()))
    return {key: (one.get(key), two.get(key)) for key in {**one, **two} if one.get(key) != two.get(key)}


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """`key=value` texts as a dictionary; a value that is not JSON is text."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise RequestError(f"--set {assignment!r} has no '='.\nWrite key=value, for example method.threshold=0.9")
        try:
            changes[key] = json.loads(text)
        except json.JSONDecodeError:
            changes[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return changes


def _explain(error: ValidationError) -> str:
    """Two lines: which key, what was found, what would work; further problems are counted."""
    first, *others = error.errors()
    # pydantic names the member of the union of networks in the path.
    kinds = ("wide_resnet", "resnet18", "fast", "pretrained", "own")
    where = ".".join(str(part) for part in first["loc"] if part not in kinds) or "the spec"
    found = first["input"]
    shown = f", found {found!r}" if not isinstance(found, Mapping | BaseModel) else ""
    what = first["msg"].removeprefix("Value error, ")
    more = f" ({len(others)} more problem{'s' * (len(others) > 1)})" if others else ""
    return f"{where}: {what[:1].lower()}{what[1:]}{shown}{more}.\nShow all keys: crmatch show config SETTING"
