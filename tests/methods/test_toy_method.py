"""A new method is one class and one line of the table: nothing else knows it, and it trains."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from pydantic import Field

from conftest import tiny_spec
from crmatch.augment.views import View
from crmatch.methods import METHODS
from crmatch.methods.base import LossTerms, Method
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace


class ToyMethod(Method):
    """Cross-entropy, and the squared norm of a head's answer to strong views; the head also counts its steps."""

    title: ClassVar = "Toy"
    summary: ClassVar = "shows that a method needs one file and one line"
    paper: ClassVar = "none"

    name: str = "toy"
    norm_weight: float = Field(0.1, ge=0)

    @property
    def views(self):
        return (View("labeled", "labeled", "weak"), View("shaken", "unlabeled", "strong"))

    def heads(self, shape):
        head = torch.nn.Linear(shape.features, 2)
        head.register_buffer("steps", torch.zeros((), dtype=torch.long))
        return {"toy": head}

    def loss(self, batch, models, step):
        student = models.student
        supervised = torch.nn.functional.cross_entropy(student(batch.views["labeled"]).logits, batch.labels)
        norm = student.head("toy", student(batch.views["shaken"]).features).square().mean()
        student.heads["toy"].steps += 1
        return LossTerms({"supervised": supervised, "norm": norm}, {"supervised": 1.0, "norm": self.norm_weight})


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", ToyMethod)


@pytest.mark.usefixtures("toy")
def test_a_new_method_trains_and_is_recorded_by_its_name(stripes, tmp_path):
    spec = tiny_spec(stripes, "toy", **{"method.norm_weight": 0.2, "plan.steps": 40})
    record = run(spec, Workspace.at(tmp_path, stripes))
    assert record.spec.method == ToyMethod(norm_weight=0.2)
    assert record.steps == 40
    assert record.final["loss/supervised"] < 1.0
    assert record.final["loss/norm"] > 0


@pytest.mark.usefixtures("toy")
def test_the_commands_know_a_new_method(crmatch, stripes, tmp_path):
    listed = crmatch("show", "methods")
    assert listed.code == 0
    assert "toy" in listed.out
    assert ToyMethod.summary in listed.out
