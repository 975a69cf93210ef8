"""Backbones of the library `transformers`: `hf:DIRECTORY`, or `hf:OWNER/NAME` on the Hugging Face Hub. Imports no torch.

Only safetensors are read and no code of a repository is run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crmatch.errors import DataError, RequestError
from crmatch.networks.pretrained.catalog import BackboneInput
from crmatch.networks.pretrained.model_directory import check_files, download, weights_checksum
from crmatch.networks.pretrained.transformers_config import FAMILIES, patch_size, read_config, read_input

if TYPE_CHECKING:
    from torch import nn

    from crmatch.networks.pretrained.backbone import Body


def resolve(source: str) -> Path:
    """The directory of the model: `source` itself, or that of the Hub repository `source` in the local cache."""
    directory = Path(source).expanduser()
    if not directory.is_dir():
        directory = download(f"hf:{source}", source, "hf")
    return check_files(f"hf:{source}", directory, sharded=True)


def describe(source: str) -> BackboneInput:
    """What the model expects of its input, from its JSON files."""
    return read_input(f"hf:{source}", resolve(source))


def checksum(source: str) -> str:
    """First 16 hex digits of the sha256 of the weights."""
    return weights_checksum(resolve(source))


def load(source: str) -> Body:
    """The pretrained model without its classifier; of CLIP and SigLIP, the vision tower."""
    directory = resolve(source)
    read_config(f"hf:{source}", directory)  # refuses unknown model types before the slow import
    with _library(f"hf:{source}") as transformers:
        import torch
        from safetensors import SafetensorError

        from crmatch.networks.pretrained.backbone import Body

        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = transformers.AutoConfig.from_pretrained(directory, **local)
            config = getattr(config, "vision_config", config)
            model, report = transformers.AutoModel.from_pretrained(
                directory, config=config, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **local
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise DataError(f"hf:{source} cannot be loaded: {error}.\nCopy or download the model again") from error
    # ViT classifiers use the class token and are published without weights of the pooler: it would be random.
    has_pooler = not any(key.startswith("pooler.") for key in report["missing_keys"])
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith("pooler.")):
        raise DataError(f"hf:{source}: its weights lack {', '.join(missing[:3])}.\nCopy or download the model again")
    # The loaded tensors are parts of the file, mapped into memory at addresses that torch's allocator would not choose.
    # Convolutions round differently there, so that a run resumed with a copy of the weights would not be equal to the bit.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    values = json.loads(config.to_json_string(use_diff=False))
    values = {key: value for key, value in values.items() if key not in ("id2label", "label2id", "dtype")}
    architecture = {"config": values, "pooler": has_pooler, "version": transformers.__version__}
    return Body(_body(model, architecture), architecture)


def build(architecture: dict[str, Any]) -> nn.Module:
    """The module of `load` with random weights."""
    with _library("this model") as transformers:
        import torch

        config = transformers.AutoConfig.for_model(**architecture["config"])
        return _body(transformers.AutoModel.from_config(config, dtype=torch.float32), architecture)


def _body(model: Any, architecture: dict[str, Any]) -> nn.Module:
    from crmatch.networks.pretrained.library_bodies import TransformersBody

    if not architecture["pooler"]:
        model.pooler = None
    config = architecture["config"]
    family = FAMILIES[config["model_type"]]
    prefix_tokens = family.class_tokens + config.get("num_register_tokens", 0)
    return TransformersBody(model, prefix_tokens, patch_size(config), family.interpolate)


@contextlib.contextmanager
def _library(name: str) -> Iterator[Any]:
    """The module `transformers` without its reports and progress bars. It imports models when they are first used."""
    try:
        import transformers

        output = transformers.utils.logging
        verbosity, has_bars = output.get_verbosity(), output.is_progress_bar_enabled()
        output.set_verbosity_error()
        output.disable_progress_bar()
        try:
            yield transformers
        finally:
            output.set_verbosity(verbosity)
            if has_bars:
                output.enable_progress_bar()
    except ImportError as error:
        raise RequestError(
            f"{name} needs the library transformers, which cannot be imported: {error.__cause__ or error}.\n"
            "pip install 'crmatch[hf]'; a torchvision that does not match torch must be removed"
        ) from error
