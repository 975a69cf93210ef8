"""Directories with a pretrained model: local ones, and downloads from the Hugging Face Hub. Imports no torch.

Such a directory holds config.json and weights as safetensors, whether `transformers` or `timm` wrote it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from crmatch.errors import DataError, RequestError

HUB = "https://huggingface.co"
INDEX = "model.safetensors.index.json"
"""Names the files of weights that are in several files."""


@functools.cache  # one process sees one version
def download(name: str, repository: str, extra: str) -> Path:
    """The directory of a Hub repository in the local cache, downloaded if it is new.

    Only JSON and safetensors files are fetched. Without a network, the last download is used.

    Args:
        name: the backbone as the user wrote it, for messages.
        repository: OWNER/NAME.
        extra: of crmatch, which installs huggingface_hub.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise RequestError(f"{name} needs {error.name}, which is not installed.\npip install 'crmatch[{extra}]'") from error
    library = name.partition(":")[0]
    try:
        return Path(snapshot_download(repository, allow_patterns=["*.json", "*.safetensors"]))
    except errors.HFValidationError as error:
        raise RequestError(
            f"{name}: there is no such directory, and it is no name of the Hugging Face Hub.\n"
            f"Use {library}:DIRECTORY, or {library}:OWNER/NAME as listed at {HUB}/models"
        ) from error
    except errors.GatedRepoError as error:
        raise RequestError(
            f"{name}: its owner gives out the weights only after you agree to the license.\n"
            f"Agree at {HUB}/{repository}, then run hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise RequestError(
            f"{name}: there is no such directory, and no public model at {HUB}/{repository}.\n"
            "Check the spelling, or run hf auth login if it is private"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DataError(
            f"{name}: there is no such directory, it was not downloaded before, and {HUB} cannot be reached.\n"
            f"Connect to the internet (without HF_HUB_OFFLINE), or use {library}:DIRECTORY with a copy of {HUB}/{repository}"
        ) from error
    # A full disk, a broken connection, a proxy: huggingface_hub derives its errors from those of its HTTP library.
    except (OSError, *errors.HfHubHTTPError.__bases__) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{name} cannot be downloaded: {reason}.\nTry again, or use {library}:DIRECTORY with a copy") from error


def check_files(name: str, directory: Path, sharded: bool = False) -> Path:
    """`directory`, after it was checked to hold config.json and weights as safetensors; if `sharded`, also in several files."""
    found = {file.name for file in directory.iterdir()}
    if "config.json" not in found:
        raise DataError(
            f"{name}: there is no config.json in {directory}.\nUse a directory written by save_pretrained or save_for_hf"
        )
    weights = {"model.safetensors"}
    if sharded and INDEX in found and not weights & found:
        weights = set(read_json(directory / INDEX)["weight_map"].values())
    if not weights <= found or not all(file.endswith(".safetensors") for file in weights):
        pickles = sorted(file for file in found if file.endswith((".bin", ".pth", ".pt")))
        instead = f" {', '.join(pickles)} may run code when opened and is not read." if pickles else ""
        raise DataError(
            f"{name}: there is no {', '.join(sorted(weights - found) or weights)} in {directory}.{instead}\n"
            "Use a model that is published as safetensors, or save this one again with its library"
        )
    return directory


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}.\nCopy or download the model again") from error
    return content


def weights_checksum(directory: Path) -> str:
    """First 16 hex digits of the sha256 over the bytes of all weight files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]
