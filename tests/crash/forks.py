"""One process that imports torch and forks a child per run: a start costs milliseconds, and a child may be killed at will.

Commands come as lines of JSON on stdin. {"spec", "out", "data_dir", "stop_after", "here"} begins a run and is answered by the
child's process id; with "here" it runs in this process, so that all children have what torch loads lazily, and is answered by
its exit code. {"wait": id} is answered by the exit code of a child, negative if a signal ended it. A child is reaped only when
it is waited for, so that its id cannot belong to another process when it is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any


def train(order: dict[str, Any]) -> int:
    """What a child does; its exit code is the command's."""
    from crmatch.errors import CRMatchError, StoppedError
    from crmatch.runs.run import run
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.run_spec import parse_spec

    answers = itertools.repeat(False) if order["stop_after"] is None else iter([False] * order["stop_after"])
    workspace = Workspace.at(order["out"], Path(order["data_dir"]))
    try:
        run(parse_spec(order["spec"]), workspace, stop=lambda: next(answers, True))
    except CRMatchError as error:
        if not isinstance(error, StoppedError):
            sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def serve() -> None:
    """Answer orders until stdin ends."""
    import torch

    import crmatch.runs.run  # noqa: F401

    torch.set_num_threads(1)
    for text in sys.stdin:
        order = json.loads(text)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif order["here"]:
            answer = train(order)
        else:
            answer = os.fork()
            if answer == 0:
                code = 1
                try:
                    code = train(order)
                finally:
                    sys.stderr.flush()
                    os._exit(code)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
