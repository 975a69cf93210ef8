"""Checkpoints: one file per saved step, atomic, self-verifying, without pickle.

A checkpoint is a safetensors file whose header carries plain values as JSON. Its name holds the step and a checksum of its
bytes: `step-00000700-9f86d081884c7d65.safetensors`. It is written beside its final name, flushed to disk and renamed, so at
any moment each file under a final name is whole. The last two are kept.
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

from crmatch.errors import ResumeError
from crmatch.files import checksum, write_file

logger = logging.getLogger(__name__)
KEPT = 2
_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{16})\.safetensors")


class Checkpoint(NamedTuple):
    """The state after `step` completed steps."""

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` and remove those before the last `KEPT`."""
    metadata = {"step": str(checkpoint.step), "values": json.dumps(checkpoint.values)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    content = safetensors.torch.save(tensors, metadata)
    write_file(directory / f"step-{checkpoint.step:08d}-{checksum(content)}.safetensors", content)
    for old in checkpoint_files(directory)[KEPT:]:
        with contextlib.suppress(OSError):
            old.unlink()


def checkpoint_files(directory: Path) -> list[Path]:
    """Checkpoints in `directory`, the newest first."""
    if not directory.is_dir():
        return []
    return sorted((file for file in directory.iterdir() if _NAME.fullmatch(file.name)), reverse=True)


def load_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where none was ever written.

    Raises:
        ResumeError: there are checkpoints, and all of them are damaged.
    """
    files = checkpoint_files(directory)
    for file in files:
        match = _NAME.fullmatch(file.name)
        assert match is not None
        try:
            content = file.read_bytes()
        except OSError:
            continue
        if checksum(content) == match[2]:
            return _parse(content)
        logger.warning("%s is damaged; the checkpoint before it is used", file)
    if files:
        raise ResumeError(
            f"all checkpoints in {directory} are damaged.\nRemove the run's directory to start it again from the beginning."
        )
    return None


def _parse(content: bytes) -> Checkpoint:
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    return Checkpoint(int(metadata["step"]), safetensors.torch.load(content), json.loads(metadata["values"]))
