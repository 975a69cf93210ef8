"""How a run computes. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class Execution(NamedTuple):
    """Where and how a run computes; none of it changes the result, except that compiled code rounds differently.

    Attributes:
        device: `auto`, `cpu` or `cuda`; `auto` takes a GPU if there is one.
        compile: compile the backbone's training passes.
        recompute: keep few activations and recompute them in the backward pass (gradient checkpointing).
    """

    device: str = "auto"
    compile: bool = False
    recompute: bool = False

    def options(self) -> list[str]:
        """The command-line options that ask for this execution."""
        chosen = ["--device", self.device] if self.device != "auto" else []
        return chosen + ["--compile"] * self.compile + ["--recompute"] * self.recompute
