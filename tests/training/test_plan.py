from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from crmatch.methods import build_method
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.training.optimizer import Optimizer
from crmatch.training.plan import Phase, TrainPlan

LINEAR_PHASES = (
    Phase(share=0.1, shape="linear", start=0.1, end=1.0),
    Phase(share=0.5, shape="linear", start=1.0, end=10.0),
    Phase(share=0.4, shape="linear", start=10.0, end=0.0),
)
STEPS = (Phase(share=0.625, start=1.0), Phase(share=0.25, start=0.1), Phase(share=0.125, start=0.01))


def test_the_default_rate_starts_at_0_03_and_ends_at_its_published_end() -> None:
    plan = TrainPlan(steps=524_288)
    assert plan.learning_rate * plan.rate_factor(0, 524_288) == 0.03
    assert math.isclose(plan.rate_factor(524_288, 524_288), 0.19509, abs_tol=5e-6)
    assert math.isclose(plan.rate_factor(1000, 524_288), math.cos(7 * math.pi * 1000 / (16 * 524_288)))


@pytest.mark.parametrize(
    ("schedule", "progress", "factor"),
    [
        ((Phase(shape="half_cosine", arc=180 / 210),), 0.5, 0.5 * (1 + math.cos(math.pi * 90 / 210))),
        ((Phase(shape="half_cosine"),), 1.0, 0.0),
        (STEPS, 0.0, 1.0),
        (STEPS, 0.6249, 1.0),
        (STEPS, 0.625, 0.1),
        (STEPS, 0.875, 0.01),
        (STEPS, 1.0, 0.01),
        (LINEAR_PHASES, 0.0, 0.1),
        (LINEAR_PHASES, 0.05, 0.55),
        (LINEAR_PHASES, 0.35, 5.5),
        (LINEAR_PHASES, 0.6, 10.0),
        (LINEAR_PHASES, 1.0, 0.0),
    ],
)
def test_schedules_are_pure_functions_of_progress(schedule: tuple[Phase, ...], progress: float, factor: float) -> None:
    plan = TrainPlan(steps=10_000, schedule=schedule)
    assert math.isclose(plan.rate_factor(round(progress * 10_000), 10_000), factor, abs_tol=1e-9)


def test_length_is_given_in_steps_or_in_unlabeled_epochs() -> None:
    plan = TrainPlan(unlabeled_epochs=2, unlabeled_batch_size=100)
    assert plan.total_steps(unlabeled=250) == 6
    assert TrainPlan(steps=5).total_steps(unlabeled=250) == 5
    for length in ({}, {"steps": 5, "unlabeled_epochs": 1}):
        with pytest.raises(ValidationError, match="either as steps or as unlabeled_epochs"):
            TrainPlan(**length)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "greater than or equal to 1"),
        ({"steps": 1, "schedule": (Phase(share=0.5),)}, "must add up to 1"),
        ({"steps": 1, "momentum": 0.0}, "nesterov needs a momentum"),
        ({"steps": 1, "clip": 1}, "Extra inputs"),
        ({"steps": 1, "learning_rate": 0}, "greater than 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainPlan(**values)  # type: ignore[arg-type]


def test_no_one_dimensional_parameter_decays() -> None:
    network = build_network(
        WideResNetConfig(filters=4, repeat=1), channels=3, image_size=16, classes=3, heads=build_method("crmatch").heads
    )
    decaying, others = Optimizer(network, TrainPlan(steps=1, weight_decay=0.5)).param_groups
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert decaying["weight_decay"] == 0.5
    assert others["weight_decay"] == 0.0
    assert all(parameter.ndim > 1 and names[id(parameter)].endswith("weight") for parameter in decaying["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)
    everything, nothing = Optimizer(network, TrainPlan(steps=1, decay_parameters="all")).param_groups
    assert len(everything["params"]) == len(names)
    assert not nothing["params"]
