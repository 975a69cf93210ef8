"""The methods, one file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from crmatch.data.settings import Setting
from crmatch.errors import unknown_name_error
from crmatch.methods.base import Method, spec_keys
from crmatch.methods.crmatch import CRMatch
from crmatch.methods.featmatch import FeatMatch
from crmatch.methods.fixmatch import FixMatch
from crmatch.methods.ict import ICT
from crmatch.methods.label_propagation import LabelPropagation
from crmatch.methods.mean_teacher import MeanTeacher
from crmatch.methods.mixmatch import MixMatch
from crmatch.methods.pi_model import PiModel
from crmatch.methods.plcb import PLCB
from crmatch.methods.pseudo_label import PseudoLabel
from crmatch.methods.remixmatch import ReMixMatch
from crmatch.methods.supervised import Supervised
from crmatch.methods.uda import UDA
from crmatch.methods.vat import VAT


class Preset(NamedTuple):
    """A method with other default values and its own name, title, summary and citation."""

    method: type[Method]
    changes: Mapping[str, Any]
    title: str
    summary: str
    paper: str
    recipe_keys: Callable[[str, Setting], dict[str, Any]] = lambda recipe, setting: {}
    """Keys in addition to those of the method, see `Method.recipe_keys`."""


def _freematch_keys(recipe: str, setting: Setting) -> dict[str, Any]:
    """USB limits the global threshold on SVHN."""
    return spec_keys("method", free_clip=0.95) if recipe == "usb" and setting.stem == "svhn" else {}


METHODS: dict[str, type[Method] | Preset] = {
    "crmatch": CRMatch,
    "featmatch": FeatMatch,
    "fixmatch": FixMatch,
    "uda": UDA,
    "remixmatch": ReMixMatch,
    "mixmatch": MixMatch,
    "mean_teacher": MeanTeacher,
    "pi_model": PiModel,
    "pseudo_label": PseudoLabel,
    "vat": VAT,
    "ict": ICT,
    "flexmatch": Preset(
        FixMatch,
        {"mask": "flex"},
        "FlexMatch",
        "FixMatch with a threshold for each class that grows as the class is learned",
        "Zhang et al., NeurIPS 2021, arXiv 2110.08263",
    ),
    "freematch": Preset(
        FixMatch,
        {"mask": "free"},
        "FreeMatch",
        "FixMatch with thresholds that follow the confidence itself, and a fairness term",
        "Wang et al., ICLR 2023, arXiv 2205.07246",
        _freematch_keys,
    ),
    "softmatch": Preset(
        FixMatch,
        {"mask": "soft", "alignment": "uniform"},
        "SoftMatch",
        "FixMatch that weighs pseudo-labels by a Gaussian of their confidence",
        "Chen et al., ICLR 2023, arXiv 2301.10921",
    ),
    "adamatch": Preset(
        FixMatch,
        {"mask": "ada", "alignment": "labeled"},
        "AdaMatch",
        "FixMatch with aligned predictions and a threshold relative to the labeled images' confidence",
        "Berthelot et al., ICLR 2022, arXiv 2106.04732",
    ),
    "label_propagation": LabelPropagation,
    "plcb": PLCB,
    "supervised": Supervised,
}


def method_class(name: str) -> type[Method]:
    """The class of a method in the table."""
    entry = METHODS[name]
    return entry.method if isinstance(entry, Preset) else entry


def recipe_keys(name: str, recipe: str, setting: Setting) -> dict[str, Any]:
    """Keys of the spec that the papers and code of the method `name` set for a data set in one of the recipes."""
    entry = METHODS[name]
    preset = entry.recipe_keys(recipe, setting) if isinstance(entry, Preset) else {}
    return method_class(name).recipe_keys(recipe, setting) | preset


def build_method(name: str, values: Mapping[str, Any] | None = None) -> Method:
    """The method `name` with its default hyper-parameters, changed by `values`; RequestError if there is no such method."""
    if name not in METHODS:
        raise unknown_name_error("method", name, METHODS)
    entry = METHODS[name]
    preset = entry.changes if isinstance(entry, Preset) else {}
    return method_class(name)(**{**preset, **(values or {}), "name": name})
