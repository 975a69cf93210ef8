"""The methods, one file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from crmatch.data.settings import Setting
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods.base import Method, StoredMethod, spec_keys
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
from crmatch.own_code import code_in_file, code_of, find, is_here, is_reference, short_name


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


Kind = str | type[Method]
"""A method: its name, `path/mine.py:ClassName`, or its class."""


def installed_methods() -> dict[str, EntryPoint]:
    """Methods of other installed packages, which declare them as entry points of the group `crmatch.methods`."""
    return {point.name: point for point in entry_points(group="crmatch.methods") if point.name not in METHODS}


def method_class(kind: Kind | Method) -> type[Method]:
    """The class of a method; RequestError if there is no such method."""
    if not isinstance(kind, str):
        return kind if isinstance(kind, type) else type(kind)
    if kind in METHODS:
        entry = METHODS[kind]
        return entry.method if isinstance(entry, Preset) else entry
    found = find(code_in_file(kind)) if is_reference(kind) else _installed(kind)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise RequestError(f"{kind} is not a method.\nA method is a subclass of crmatch.Method; see docs/own-method.md.")
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise RequestError(f"{kind} is not complete: it does not define {missing}.\nSee docs/own-method.md.")
    return found


def _installed(name: str) -> Any:
    points = installed_methods()
    if name not in points:
        raise unknown_name_error("method", name, [*METHODS, *points])
    try:
        return points[name].load()
    except (ImportError, AttributeError) as error:
        raise RequestError(f"the installed method {name} cannot be imported: {error}\nReinstall its package.") from error


def build_method(kind: Kind, values: Mapping[str, Any] | None = None) -> Method:
    """A method with its default hyper-parameters, changed by `values`."""
    found = method_class(kind)
    if isinstance(kind, str) and kind in METHODS:
        entry = METHODS[kind]
        preset = entry.changes if isinstance(entry, Preset) else {}
        return found(**{**preset, **(values or {}), "name": kind})
    return found(**{**(values or {}), **_origin(found)})


def adopt(method: Method) -> Method:
    """A method that Python code made, with its name and where it comes from."""
    built_in = method.name in METHODS and method_class(method.name) is type(method)
    if built_in or isinstance(method, StoredMethod):
        return method
    return method.model_copy(update=_origin(type(method)))


def kind_of(method: Method) -> Kind | StoredMethod:
    """What makes such a method: the name of one in the table, or the class; a method whose code is not here itself."""
    if isinstance(method, StoredMethod):
        return method
    return method.name if method.name in METHODS and method.code is None else type(method)


def _origin(found: type[Method]) -> dict[str, str]:
    """Name and code of a class from outside the package; an installed one has the name and the module of its entry point."""
    for name, point in installed_methods().items():
        if point.value == f"{found.__module__}:{found.__qualname__}":
            return {"name": name, "code": code_of(found, point.module)}
    code = code_of(found)
    return {"name": short_name(code), "code": code}


def parse_method(values: Mapping[str, Any], stored: bool) -> Method:
    """The method with these JSON values. If its code is not here, it is a `StoredMethod`.

    `stored` says that the values come from a file: an unknown name is then no mistake of the user.
    """
    name, code = str(values.get("name") or "crmatch"), values.get("code")
    if isinstance(code, str):
        if not stored and name in installed_methods():
            _origin(method_class(name))  # imports it, so that its code is here
        return find(code)(**values) if is_here(code) else StoredMethod(**values)
    # A file is imported only if its code is given, too, and was named in this process (`is_here`).
    is_known = name in METHODS or not (stored or is_reference(name))
    return build_method(name, values) if is_known else StoredMethod(**values)


def title_of(method: Method) -> str:
    """The name of a method in tables and pages."""
    entry = METHODS.get(method.name) if method.code is None else None
    return entry.title if entry else type(method).title or method.name


def paper_of(method: Method) -> str:
    """The citation of a method; for one from outside the package without a paper, its code."""
    entry = METHODS.get(method.name) if method.code is None else None
    return entry.paper if entry else type(method).paper or method.code or method.name


def recipe_keys(kind: Kind, recipe: str, setting: Setting) -> dict[str, Any]:
    """Keys of the spec that the papers and code of a method set for a data set in one of the recipes."""
    entry = METHODS.get(kind) if isinstance(kind, str) else None
    preset = entry.recipe_keys(recipe, setting) if isinstance(entry, Preset) else {}
    return method_class(kind).recipe_keys(recipe, setting) | preset
