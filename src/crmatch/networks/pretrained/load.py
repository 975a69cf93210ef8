"""Loading a pretrained backbone by its name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE, BackboneInput, split_name

if TYPE_CHECKING:
    from crmatch.networks.pretrained.backbone import Body


def load_body(name: str, architecture: Mapping[str, Any] | None = None) -> Body:
    """The backbone `name` with its pretrained weights, or without them if its `architecture` is given."""
    from crmatch.networks.pretrained.backbone import Body

    library, source = split_name(name)
    if library == "efficientnet-lite":
        from crmatch.networks.pretrained.efficientnet_lite import EfficientNetLite
        from crmatch.networks.pretrained.weights import load_efficientnet_lite

        return (
            load_efficientnet_lite(name) if architecture is None else Body(EfficientNetLite(**architecture), dict(architecture))
        )
    adapter = _adapter(library)
    return adapter.load(source) if architecture is None else Body(adapter.build(dict(architecture)), dict(architecture))


@functools.cache
def describe_input(name: str) -> BackboneInput:
    """What the backbone `name` expects of its input."""
    library, source = split_name(name)
    if library == "efficientnet-lite":
        return EFFICIENTNET_LITE[name].input
    described: BackboneInput = _adapter(library).describe(source)
    return described


@functools.cache
def weights_checksum(name: str) -> str:
    """16 hex digits that identify the weights of the backbone `name`."""
    library, source = split_name(name)
    return EFFICIENTNET_LITE[name].sha256[:16] if library == "efficientnet-lite" else str(_adapter(library).checksum(source))


def _adapter(library: str) -> Any:
    module = {"hf": "transformers", "timm": "timm"}[library]
    return importlib.import_module(f"crmatch.networks.pretrained.{module}")
