"""Checkpoints: one file per saved step, atomic, self-verifying, without pickle.

A checkpoint is a safetensors file whose header carries plain values as JSON. Its name holds the step and a checksum of its
bytes: `step-00000700-9f86d081884c7d65.safetensors`. It is written beside its final name, flushed to disk and renamed, so at
any moment every file under a final name is complete. The last two are kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
from torch import Tensor

from crmatch.atomic_files import checksum, read_file, write_file
from crmatch.errors import ResumeError

logger = logging.getLogger(__name__)
KEPT = 2
_NAME = re.compile(r"step-\d{8}-[0-9a-f]{16}\.safetensors")


class Checkpoint(NamedTuple):
    """The state after `step` completed steps."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` and remove all but the last `KEPT`."""
    metadata = {"step": str(checkpoint.step), "values": json.dumps(checkpoint.values)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    content = safetensors.torch.save(tensors, metadata)
    written = directory / f"step-{checkpoint.step:08d}-{checksum(content)}.safetensors"
    write_file(written, content)
    files = checkpoint_files(directory)
    # Another file of this step was saved before a kill, and only its timings differ.
    earlier = [file for file in files if not file.name.startswith(f"step-{checkpoint.step:08d}-")]
    for old in {*files} - {written, *earlier[: KEPT - 1]}:
        with contextlib.suppress(OSError):
            old.unlink()


def checkpoint_files(directory: Path) -> list[Path]:
    """Checkpoints in `directory`, newest first."""
    if not directory.is_dir():
        return []
    return sorted((file for file in directory.iterdir() if _NAME.fullmatch(file.name)), reverse=True)


def load_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is intact; None if none was ever written.

    Raises:
        ResumeError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[Path] = []
    for file in checkpoint_files(directory):
        try:
            checkpoint = _read(file)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            logger.warning("the checkpoint %s is damaged: %s", file, reason)
            damaged.append(file)
            continue
        if damaged:
            logger.warning("using the checkpoint before it, %s; the steps since then are computed again", file.name)
        for other in damaged:  # renamed, so that it is not one of the last two
            with contextlib.suppress(OSError):
                other.rename(other.with_name(f"{other.name}.damaged"))
        return checkpoint
    if damaged:
        raise ResumeError(
            f"all checkpoints in {directory} are damaged.\nRemove the run's directory to start it again from the beginning."
        )
    return None


def _read(file: Path) -> Checkpoint:
    content = read_file(file)
    if checksum(content) != file.stem.rpartition("-")[2]:
        raise ValueError("its bytes do not fit the checksum in its name")
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    step, values = int(file.name.split("-")[1]), json.loads(metadata["values"])
    if metadata["step"] != str(step) or not isinstance(values, dict):
        raise ValueError("its content does not fit its name")
    return Checkpoint(step, safetensors.torch.load(content), values)
