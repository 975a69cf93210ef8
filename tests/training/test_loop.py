from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

from conftest import tiny_spec, training_of
from crmatch.augment.views import Batch, View
from crmatch.errors import DivergedError
from crmatch.methods.base import LossTerms, Method, Models, Refresh, Step
from crmatch.training.execution import Execution
from crmatch.training.loop import Observers, Training, train
from crmatch.training.meter import Meter
from crmatch.training.plan import TrainPlan
from crmatch.training.runtime import choose_runtime


def test_log_evaluate_and_checkpoint_come_at_their_steps(stripes: Path) -> None:
    lines: list[dict[str, Any]] = []
    saved: list[int] = []
    training = training_of(tiny_spec(stripes), stripes)
    observers = Observers(
        log=lines.append,
        evaluate=lambda step, models: {"error/ema": 1.0},
        save=lambda checkpoint: saved.append(checkpoint.step),
    )
    assert train(training, observers)
    assert [line["step"] for line in lines] == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    assert [line["step"] for line in lines if "error/ema" in line] == [5, 10, 15, 20]
    assert saved == [4, 8, 12, 16, 20]


def test_the_teacher_is_in_eval_mode_and_the_student_in_train_mode(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes), stripes)
    training.take_step()
    assert training.models.student.training
    assert not training.models.teacher.training


def test_the_learning_rate_of_each_step_is_the_schedules(stripes: Path) -> None:
    schedule = [{"shape": "cosine", "arc": 7 / 16}]
    training = training_of(tiny_spec(stripes, **{"plan.schedule": schedule}), stripes)
    for step in range(3):
        training.take_step()
        expected = 0.03 * math.cos(7 * math.pi * step / (16 * 20))
        assert training.optimizer.learning_rate == expected


def test_a_loss_that_is_not_finite_stops_with_step_and_terms_before_weights_move(stripes: Path) -> None:
    training = training_of(tiny_spec(stripes), stripes)
    training.take_step()
    with torch.no_grad():
        training.network.classifier.weight[0, 0] = math.inf
    before = {name: tensor.clone() for name, tensor in training.checkpoint().tensors.items() if name.startswith("optimizer")}
    with pytest.raises(DivergedError, match=r"not finite at step 1: supervised = .*rotation = "):
        training.take_step()
    after = training.checkpoint().tensors
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_means_between_log_points_are_those_of_the_steps() -> None:
    meter = Meter()
    for value in (1.0, 2.0, 6.0):
        meter.add({"a": torch.tensor(value), "b": torch.tensor(2 * value)})
    assert meter.means() == {"a": 3.0, "b": 6.0}
    assert meter.means() == {}
    meter.add({"c": torch.tensor(1.0)})
    other = Meter()
    other.load_state(meter.state(), torch.device("cpu"))
    for part in (meter, other):
        part.add({"c": torch.tensor(4.0)})
    assert meter.means() == other.means() == {"c": 2.5}


def test_a_curve_that_begins_between_two_log_points_is_averaged_over_its_own_steps() -> None:
    meter, other = Meter(), Meter()
    meter.add({"a": torch.tensor(1.0)})
    meter.add({"a": torch.tensor(2.0), "b": torch.tensor(7.0)})
    other.load_state(meter.state(), torch.device("cpu"))
    for part in (meter, other):
        part.add({"a": torch.tensor(3.0), "b": torch.tensor(9.0)})
    assert meter.means() == other.means() == {"a": 2.0, "b": 8.0}


class Remembering(Method):
    """A toy method with memory: refresh stores the class means of all features."""

    title: ClassVar = "Remembering"
    summary: ClassVar = "a toy"
    paper: ClassVar = "none"
    name: str = "remembering"

    @property
    def views(self) -> tuple[View, ...]:
        return (View("labeled", "labeled", "none"), View("again", "unlabeled", "none"))

    def heads(self, shape: Any) -> dict[str, torch.nn.Module]:
        memory = torch.nn.Module()
        memory.register_buffer("features", torch.zeros(shape.unlabeled, shape.features))
        memory.register_buffer("refreshed", torch.zeros(()))
        return {"memory": memory}

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        return 2 * steps_per_epoch

    def refresh(self, context: Refresh) -> None:
        memory = context.models.student.heads["memory"]
        features, probabilities = context.features("unlabeled")
        assert torch.allclose(probabilities.sum(dim=1), torch.ones(()))
        assert len(context.features("labeled")[0]) == len(context.labels)
        memory.features.copy_(features)
        memory.refreshed.add_(1)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        remembered = models.student.heads["memory"].features[batch.unlabeled]
        outputs = models.student(batch.views["again"])
        return LossTerms({"memory": (outputs.features - remembered).square().mean()}, {"memory": 1.0})


class Pool:
    """Four labeled and eight unlabeled images."""

    policy: Any = None
    labels, labeled = torch.zeros(4, dtype=torch.int64), torch.arange(4)

    def __init__(self) -> None:
        self.images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def batch(self, step: int) -> Batch:
        rows = torch.arange(4) + 4 * (step % 2)
        return Batch(torch.zeros(4, dtype=torch.int64), {"labeled": self.images[:4], "again": self.images[rows]}, rows)

    def learn(self, step: int, predict: Any) -> None: ...

    def pool(self, source: Literal["labeled", "unlabeled"], augmentation: str, step: int) -> Iterator[torch.Tensor]:
        yield from self.images[: 4 if source == "labeled" else 8].split(3)


def test_a_method_with_memory_is_refreshed_before_every_second_epoch() -> None:
    from crmatch.networks.build import build_network
    from crmatch.networks.config import WideResNetConfig

    method = Remembering()
    config = WideResNetConfig(filters=4, repeat=1)
    network = build_network(config, channels=1, image_size=8, classes=2, unlabeled=8, heads=method.heads)
    plan = TrainPlan(steps=10, unlabeled_batch_size=4)
    training = Training(method, network, Pool(), plan, 10, 2, choose_runtime(Execution("cpu")), seed=0)
    with torch.no_grad():
        network.eval()
        expected = network(Pool().images).features
        network.train()
    counts = []
    for _ in range(6):
        training.take_step()
        counts.append(network.heads["memory"].refreshed.item())
        if training.step == 1:
            torch.testing.assert_close(network.heads["memory"].features, expected)
    assert counts == [1, 1, 1, 1, 2, 2]
