"""Methods: one short file each, and the one table of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from crmatch.errors import unknown
from crmatch.methods.base import Method
from crmatch.methods.crmatch import CRMatch
from crmatch.methods.featmatch import FeatMatch
from crmatch.methods.fixmatch import FixMatch
from crmatch.methods.label_propagation import LabelPropagation
from crmatch.methods.plcb import PLCB
from crmatch.methods.supervised import Supervised


class Preset(NamedTuple):
    """A method under another name with other defaults."""

    method: type[Method]
    changes: Mapping[str, Any]
    summary: str


METHODS: dict[str, type[Method] | Preset] = {
    "crmatch": CRMatch,
    "featmatch": FeatMatch,
    "fixmatch": FixMatch,
    "label_propagation": LabelPropagation,
    "plcb": PLCB,
    "supervised": Supervised,
}


def method_class(name: str) -> type[Method]:
    """The class behind a name of the table."""
    entry = METHODS[name]
    return entry.method if isinstance(entry, Preset) else entry


def build_method(name: str, values: Mapping[str, Any] | None = None) -> Method:
    """The method `name` with its defaults, changed by `values`.

    Raises:
        RequestError: there is no such method.
        pydantic.ValidationError: a key or value is wrong.
    """
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    entry = METHODS[name]
    if isinstance(entry, Preset):
        return entry.method(**{**entry.changes, **(values or {}), "name": name})
    return entry(**{**(values or {}), "name": name})
