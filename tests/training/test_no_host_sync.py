"""Between two log points the host never waits for the device.

Steps run on torch's `meta` device, which has shapes and no values: whatever a GPU would have to be waited for (`.item()`,
`.cpu()`, `bool(tensor)`, `numpy()`, a shape that depends on values) raises there. What is drawn on the host and sent to the
device does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_spec
from crmatch.methods import METHODS
from crmatch.runs.experiment import Experiment, load_run_data
from crmatch.spec.recipes import setting_of
from crmatch.training.loop import train
from crmatch.training.runtime import Runtime

WAITS = (NotImplementedError, RuntimeError)
"""What torch raises where a value of a meta tensor is asked for."""
STEPS = {"crmatch": 6}
"""Steps to the log point; 2 for other methods."""


def experiment_on_meta(data_dir: Path, method: str, policy: str = "randaugment", **machine: Any) -> Experiment:
    plan = dict.fromkeys(("plan.log_every", "plan.evaluate_every", "plan.checkpoint_every", "plan.steps"), STEPS.get(method, 2))
    spec = tiny_spec(data_dir, method, **plan, **{"augmentation.policy": policy})
    runtime = Runtime(torch.device("meta"), torch.float32, **machine)
    assert not runtime.host_sync_is_free
    return Experiment(spec, *load_run_data(spec, setting_of(spec, data_dir), data_dir), runtime)


def steps_until_the_host_waits(experiment: Experiment, training: Any) -> int:
    with pytest.raises(WAITS, match="meta"):
        train(training, experiment.observers(lambda line: None))
    return int(training.step)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_makes_the_host_wait_before_the_log_point(
    stripes: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    experiment = experiment_on_meta(stripes, method)
    training = experiment.training()
    monkeypatch.setattr(training, "_refresh", lambda step: None)  # graphs and clusters are made on the host, once per epoch
    assert steps_until_the_host_waits(experiment, training) == STEPS.get(method, 2)


def test_recomputing_does_not_make_the_host_wait(stripes: Path) -> None:
    experiment = experiment_on_meta(stripes, "fixmatch", recompute=True)
    assert steps_until_the_host_waits(experiment, experiment.training()) == 2


def test_ctaugment_makes_the_host_wait_only_where_it_learns(stripes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates that it draws from are on the host, and every step moves them."""
    experiment = experiment_on_meta(stripes, "fixmatch", "ctaugment")
    training = experiment.training()
    assert steps_until_the_host_waits(experiment, training) == 0
    training = experiment.training()
    monkeypatch.setattr(training.batches.policy, "learn", lambda draws, proximity: None)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda values: values)
    assert steps_until_the_host_waits(experiment, training) == 2


@pytest.mark.parametrize("wait", [lambda x: x.item(), bool, lambda x: x.cpu(), lambda x: x.numpy(), lambda x: x.nonzero()])
def test_the_meta_device_notices_every_way_of_waiting(wait: Any) -> None:
    with pytest.raises((*WAITS, TypeError)):
        wait(torch.zeros((), device="meta"))
