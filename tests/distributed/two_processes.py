"""What each of two processes does for test_processes.py: `python two_processes.py FOLDER` with torchrun's variables set."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from conftest import tiny_spec
from crmatch.augment.ctaugment import CTAugment
from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup, join
from crmatch.distributed.sync_batch_norm import SyncBatchNorm2d
from crmatch.errors import StoppedError
from crmatch.methods import METHODS
from crmatch.networks.dropout import Dropout, dropout_from
from crmatch.runs.experiment import Experiment, load_run_data
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import setting_of
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

LONG = ("crmatch", "fixmatch", "remixmatch", "flexmatch", "label_propagation")
SHORT = tuple(sorted(set(METHODS) - set(LONG)))
RECOMPUTED = ("vat", "mixmatch", "plcb")
STOP = 7


def spec_of(data_dir: Path, method: str, precision: str = "fp64", **changes: Any) -> Any:
    """Odd batches, and a small rate as in test_golden.py: at the usual one a rounding error grows a hundredfold per step."""
    keys = {"plan.labeled_batch_size": 5, "plan.unlabeled_batch_size": 13, "plan.learning_rate": 0.003, "precision": precision}
    if method in ("fixmatch", "remixmatch"):
        keys["augmentation.policy"] = "ctaugment"
    if "threshold" in tiny_spec(data_dir, method).method.model_dump():
        keys["method.threshold"] = 0.4
    return tiny_spec(data_dir, method, **{**keys, **changes})


def trace(spec: Any, data_dir: Path, processes: ProcessGroup, steps: int, recompute: bool = False) -> dict[str, Tensor]:
    """Losses, masks, rates and running states of every step, and the weights after the last one."""
    data = load_run_data(spec, setting_of(spec, data_dir), data_dir)
    training = Experiment(
        spec, *data, choose_runtime(Execution("cpu", recompute=recompute), spec.precision, processes)
    ).training()
    traced: dict[str, Tensor] = {}
    for step in range(steps):
        batch, loss = training.take_step()
        traced[f"{step}/loss"] = loss.total.detach()
        traced |= {f"{step}/view/{name}": images.sum(dim=(1, 2, 3)) for name, images in batch.views.items()}
        if loss.pseudo_labels is not None:
            traced |= {f"{step}/labels": loss.pseudo_labels.labels, f"{step}/used": loss.pseudo_labels.used}
        if isinstance(training.batches.policy, CTAugment):
            traced[f"{step}/rates"] = training.batches.policy.state()["rates"]
        state = training.network.heads.state_dict()
        parameters = dict(training.network.heads.named_parameters())
        traced |= {f"{step}/state/{name}": value.clone() for name, value in state.items() if name not in parameters}
    traced |= {f"weights/{name}": value for name, value in training.network.state_dict().items()}
    return traced | {f"average/{name}": value for name, value in training.ema.network.state_dict().items()}


def traces(data_dir: Path, processes: ProcessGroup) -> dict[str, Tensor]:
    """The traces of all methods in float64, and of the first two steps in float32."""
    cases = {f"{method}/fp64": (spec_of(data_dir, method), 20) for method in LONG}
    cases |= {f"{method}/fp32": (spec_of(data_dir, method, "fp32"), 2) for method in LONG}
    cases |= {f"{method}/fp64": (spec_of(data_dir, method), 3) for method in SHORT}
    cases["growing/fp64"] = spec_of(data_dir, "crmatch", **{"plan.start_size": 12, "plan.start_share": 0.1}), 4
    every = {f"{method}/recomputed": trace(spec_of(data_dir, method), data_dir, processes, 3, True) for method in RECOMPUTED}
    every |= {case: trace(spec, data_dir, processes, steps) for case, (spec, steps) in cases.items()}
    return {f"{case}/{name}": value.contiguous().clone() for case, traced in every.items() for name, value in traced.items()}


def normalized(rows: int, processes: ProcessGroup, momentum: float = 0.3) -> dict[str, Tensor]:
    """A batch norm in three passes: training, training without trace, evaluation; of the first two the gradients."""
    generator = torch.Generator().manual_seed(rows)
    images = (torch.randn(rows, 3, 4, 5, dtype=torch.float64, generator=generator) * 3 + 100).requires_grad_()
    weighting = torch.randn(images.shape, dtype=torch.float64, generator=generator)
    norm = nn.BatchNorm2d(3, eps=0.01, momentum=momentum, dtype=torch.float64)
    nn.init.uniform_(norm.weight, generator=generator)
    norm = norm if processes == SINGLE_PROCESS else SyncBatchNorm2d(norm, processes)
    results = {}
    for name in ("training", "apart", "evaluation"):
        norm.train(name != "evaluation").track_running_stats = name != "apart"
        outputs = processes.run_data_parallel(lambda rows: norm(rows).relu_(), images)
        results[f"{name}/outputs"] = outputs.detach()
        if name == "evaluation":
            break
        gradients = torch.autograd.grad((outputs * weighting).sum(), [images, norm.weight, norm.bias])
        for parameter, gradient in zip(norm.parameters(), gradients[1:], strict=True):
            parameter.grad = gradient
        processes.average_gradients(norm.parameters())
        results[f"{name}/images"] = gradients[0]
        results |= {f"{name}/gradient/{key}": value.grad.clone() for key, value in norm.named_parameters()}
        results |= {f"{name}/{key}": value.clone() for key, value in norm.named_buffers()}
    return {f"{rows}/{key}": value for key, value in results.items()}


def dropped(processes: ProcessGroup) -> Tensor:
    """Seven rows, some values dropped."""
    dropout = Dropout(0.5)
    dropout.processes = processes
    with dropout_from(dropout, torch.Generator().manual_seed(0)):
        return processes.run_data_parallel(dropout, torch.ones(7, 5))


def stop_on_one(spec: Any, data_dir: Path, out: Path, processes: ProcessGroup) -> int:
    """A run that the last process alone is asked to stop; the step at which this one did."""
    answers = iter([False] * STOP)
    ends = processes.rank == processes.count - 1
    try:
        run(spec, Workspace.at(out, data_dir), stop=lambda: ends and next(answers, True), processes=processes)
    except StoppedError as error:
        return int(str(error).split()[3])
    return -1


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    processes, data_dir = join(timeout=60), folder / "data"
    results = traces(data_dir, processes)
    for rows in (1, 2, 7):
        results |= {f"norm/{name}": value for name, value in normalized(rows, processes).items()}
    results["dropout"] = dropped(processes)
    stopped = stop_on_one(spec_of(data_dir, "crmatch"), data_dir, folder / "runs", processes)
    results["stopped"] = torch.tensor(stopped)
    safetensors.torch.save_file(results, folder / f"{processes.rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
