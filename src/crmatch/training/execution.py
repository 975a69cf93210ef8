"""How a run computes. Imports no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

Activations = Literal["kept", "lean", "recomputed"]
"""What a training pass stores for the backward pass: all activations, half of them (see networks/low_memory), or few."""


class Execution(NamedTuple):
    """Where and how a run computes; none of it changes the result, except that compiled code rounds differently.

    Attributes:
        device: `auto`, `cpu`, `cuda` or `mps`; `auto` takes a CUDA GPU if there is one.
        compile: compile the backbone's training passes.
        recompute: keep few activations and recompute them in the backward pass (gradient checkpointing).
    """

    device: str = "auto"
    compile: bool = False
    recompute: bool = False

    @property
    def activations(self) -> Activations:
        """What a training pass stores for the backward pass, as far as it is known without torch (see `Runtime`)."""
        kept = self.compile or self.device.startswith(("cuda", "mps"))
        return "recomputed" if self.recompute else "kept" if kept else "lean"

    def options(self) -> list[str]:
        """The command-line options that ask for this execution."""
        device = ["--device", self.device] if self.device != "auto" else []
        return device + ["--compile"] * self.compile + ["--recompute"] * self.recompute
