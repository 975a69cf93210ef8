"""Half precision: tried by a process that may die of it, kept inside the training passes of backbones, scaled where it must."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import tiny_spec, training_of
from crmatch.errors import RequestError
from crmatch.training import runtime as half_precision
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime, half_precision_problem, trial_problem

DEATH = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def trial_is(monkeypatch: pytest.MonkeyPatch, code: str, timeout: float = 60) -> None:
    monkeypatch.setattr(half_precision, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(half_precision, "TIMEOUT", timeout)


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "timeout", "found"),
    [
        (DEATH, 60, "a trial of bf16 on this CPU was ended by SIGILL"),
        ("raise SystemExit(3)", 60, "a trial of bf16 on this CPU failed with code 3"),
        ("import time; time.sleep(60)", 0.1, "a trial of bf16 on this CPU did not end within 0.1 s"),
    ],
)
def test_a_trial_that_fails_refuses_bf16_in_two_lines(
    monkeypatch: pytest.MonkeyPatch, code: str, timeout: float, found: str
) -> None:
    trial_is(monkeypatch, code, timeout)
    with pytest.raises(RequestError) as refusal:
        choose_runtime(Execution("cpu"), "bf16")
    assert found in str(refusal.value)
    assert "Use --precision fp32." in str(refusal.value)


@pytest.mark.process
def test_a_trial_that_works_gives_autocast_and_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trial_is(monkeypatch, f"open({str(tmp_path / 'asked')!r}, 'a').write('x')")
    for _ in range(2):
        runtime = choose_runtime(Execution("cpu"), "bf16")
    assert (runtime.dtype, runtime.autocast) == (torch.float32, torch.bfloat16)
    assert (tmp_path / "asked").read_text() == "x"


@pytest.mark.process
def test_the_trial_itself_ends_with_an_answer() -> None:
    """Which one depends on the machine; what must not happen is an error of the trial's own."""
    problem = half_precision_problem("bf16")
    assert problem is None or "ended by SIGILL" in problem


@pytest.mark.process
def test_fp16_is_refused_on_a_cpu() -> None:
    with pytest.raises(RequestError, match=r"fp16.*\nUse --precision fp32"):
        choose_runtime(Execution("cpu"), "fp16")
    assert (
        trial_problem(("/no/such/program",), 1) == "a trial of bf16 on this CPU could not be started: No such file or directory"
    )


@pytest.mark.process
def test_only_training_passes_of_the_backbone_are_in_half_precision(stripes: Path) -> None:
    if half_precision_problem("bf16"):
        pytest.skip("this CPU does not compute in bf16")
    training = training_of(tiny_spec(stripes, "mean_teacher", precision="bf16"), stripes)
    seen: list[tuple[bool, torch.dtype]] = []
    for network in training.models:
        network.backbone.norm.register_forward_hook(
            lambda module, inputs, outputs: seen.append((module.training, outputs.dtype))
        )
    _, loss = training.take_step()
    assert set(seen) == {(True, torch.bfloat16)}
    assert loss.total.dtype == torch.float32
    assert {parameter.dtype for parameter in training.network.parameters()} == {torch.float32}
    seen.clear()
    assert training.ema.network(torch.zeros(2, 3, 16, 16)).feature_map.dtype == torch.float32
    assert seen == [(False, torch.float32)]
    reference = training_of(tiny_spec(stripes, "mean_teacher"), stripes).take_step()[1]
    assert loss.total.item() == pytest.approx(reference.total.item(), rel=0.05)


def scaled(training: Any, scale: float) -> Any:
    """As in fp16, but with values in float32: a power of two moves no digit."""
    training.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    return training


def weights(training: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in training.network.parameters()]


def test_scaled_gradients_give_the_same_weights_and_the_scale_survives_a_checkpoint(stripes: Path) -> None:
    spec = tiny_spec(stripes, "fixmatch")
    plain, training = training_of(spec, stripes), scaled(training_of(spec, stripes), 2.0**10)
    for _ in range(3):
        plain.take_step()
        training.take_step()
    assert all(torch.equal(one, two) for one, two in zip(weights(plain), weights(training), strict=True))
    assert training.scaler.get_scale() == 2.0**11
    resumed = scaled(training_of(spec, stripes), 1.0)
    resumed.restore(training.checkpoint())
    assert resumed.scaler.state_dict() == training.scaler.state_dict()


def test_a_step_whose_scaled_gradients_overflow_is_skipped_and_scaled_less(stripes: Path) -> None:
    training = scaled(training_of(tiny_spec(stripes, "fixmatch"), stripes), 2.0**10)
    training.network.classifier.bias.register_hook(lambda gradient: gradient * torch.inf)
    before = weights(training)
    training.take_step()
    assert all(torch.equal(one, two) for one, two in zip(before, weights(training), strict=True))
    assert training.scaler.get_scale() == 2.0**9
