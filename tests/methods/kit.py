"""Shared kit of the method tests: a tiny student and another teacher, a batch made by hand, a record of all forward passes.

`take(method)` computes the loss of one step. References recompute every term from the recorded outputs; the recorded inputs
show whether the right images went in.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from crmatch.augment.views import Batch
from crmatch.methods import build_method, method_class
from crmatch.methods.base import LossTerms, Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.networks.network import Network, NetworkShape, Outputs
from crmatch.randomness import generator

CLASSES, CHANNELS, SIDE = 4, 2, 8  # 1 / CLASSES is exact in single precision too: memories begin there
LABELED, UNLABELED, EXTRA, POOL = 4, 10, 3, 15
THRESHOLD = 0.6  # some of the ten images are more confident, some less
NORMS = nn.modules.batchnorm._BatchNorm
# Values with which every term is active, for methods that have these fields
ACTIVE = {"threshold": THRESHOLD, "clamp": False, "logit_distance_weight": 0.01, "entropy_weight": 0.1, "strong_views": 2}


class Pass(NamedTuple):
    """One forward pass; images and outputs are the live tensors, so that gradients can be taken."""

    network: str
    images: Tensor
    outputs: Outputs
    training: bool
    with_gradient: bool
    updated_statistics: bool


class Case(NamedTuple):
    """A loss and everything that went into it."""

    found: LossTerms
    passes: list[Pass]
    batch: Batch
    models: Models
    step: Step

    def outputs(self, view, network="student"):
        """Detached outputs of a view, or of given images, in the one pass that saw them."""
        record, rows = locate(self.passes, self.batch.views[view] if isinstance(view, str) else view, network)
        return Outputs(*(part[rows].detach() for part in record.outputs))

    def logits(self, view, network="student"):
        return self.outputs(view, network).logits.tolist()

    def gradient(self, term, view):
        """Gradient of a term with respect to the student's logits of a view."""
        images = self.batch.views[view] if isinstance(view, str) else view
        record, rows = locate(self.passes, images, "student")
        if not record.outputs.logits.requires_grad:
            return [[0.0] * CLASSES] * len(images)
        (gradient,) = torch.autograd.grad(self.found.terms[term], record.outputs.logits, retain_graph=True, allow_unused=True)
        return torch.zeros(len(record.images), CLASSES)[rows].tolist() if gradient is None else gradient[rows].tolist()

    def images_by_network(self):
        """Number of images in each pass of student and teacher."""
        return tuple([len(record.images) for record in self.passes if record.network == name] for name in Models._fields)


def make(name, changes=None):
    """The method with all its terms active, then changed."""
    active = {field: value for field, value in ACTIVE.items() if field in method_class(name).model_fields}
    return build_method(name, active | (changes or {}))


def same(first, second, tolerance=1e-12):
    return first.shape == second.shape and bool(torch.allclose(first, second, rtol=0, atol=tolerance))


def locate(passes, images, network):
    """The one pass that saw these images consecutively, and their rows in it."""
    count, found = len(images), []
    for record in passes:
        for start in range(len(record.images) - count + 1 if record.network == network else 0):
            if same(record.images[start : start + count].detach(), images.detach()):
                found.append((record, slice(start, start + count)))
    assert len(found) == 1, f"{len(found)} passes of the {network} saw these images, not one"
    return found[0]


def running_statistics(network):
    """Running means and variances, and the number of batches they saw, in one vector."""
    norms = [module for module in network.modules() if isinstance(module, NORMS)]
    parts = [part for norm in norms for part in (norm.running_mean, norm.running_var, norm.num_batches_tracked)]
    return torch.cat([part.detach().double().flatten() for part in parts]) if parts else torch.zeros(1)


def record_passes(models):
    """A list that grows by one `Pass` with every forward pass of student or teacher."""
    passes: list[Pass] = []
    started: list[Any] = []

    def before(network, inputs):
        started.append(running_statistics(network))

    def after(name, network, inputs, outputs):
        updated = not torch.equal(started.pop(), running_statistics(network))
        passes.append(Pass(name, inputs[0], outputs, network.training, torch.is_grad_enabled(), updated))

    for name, network in models._asdict().items():
        network.register_forward_pre_hook(before)
        network.register_forward_hook(functools.partial(after, name))
    return passes


def make_network(method, seed=0, confidence=3.0):
    """A network whose logits are stretched by `confidence`, with memories as after some epochs."""
    config = WideResNetConfig(filters=4, repeat=1)
    size = {"channels": CHANNELS, "image_size": SIDE, "classes": CLASSES, "unlabeled": POOL}
    network = build_network(config, **size, heads=method.heads, seed=seed).double()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        network.classifier.weight *= confidence
        memory = network.state("memory")
        if method.name == "label_propagation" and memory:
            memory["labels"].copy_(torch.arange(POOL) % CLASSES)
            memory["certainty"].copy_(torch.linspace(0, 1, POOL))
            memory["class_weights"].copy_(torch.tensor([2.0, 1.0, 0.5, 0.8]))
        if method.name == "plcb":
            memory["labels"].copy_(torch.rand(POOL, CLASSES, generator=random).softmax(dim=1))
        if "refiner" in network.heads:
            refiner = network.heads["refiner"]
            filled = torch.rand(len(refiner.filled), generator=random) < 0.7
            refiner.remember(torch.rand(refiner.prototypes.shape, generator=random), filled)
    return network


def make_models(method, seed=0, confidence=3.0):
    """A student in training mode and a teacher with its own weights, in evaluation mode as in the training loop."""
    return Models(make_network(method, seed, confidence).train(), make_network(method, seed + 100, confidence).eval())


def linear_models(method, seed=0):
    """Transparent networks without batch norms: logits = W (channel means) + b."""
    random = torch.Generator().manual_seed(seed)
    networks = []
    for _ in range(2):
        classifier = nn.Linear(CHANNELS, CLASSES).double()
        classifier.weight.data = torch.randn(CLASSES, CHANNELS, generator=random, dtype=torch.float64)
        classifier.bias.data = torch.randn(CLASSES, generator=random, dtype=torch.float64)
        heads = method.heads(NetworkShape((CHANNELS, SIDE, SIDE), CLASSES, POOL))
        networks.append(Network(nn.Identity(), classifier, heads).double())
    return Models(networks[0].train(), networks[1].eval())


def case_of_logits(method, labels, *, models=None, positions=None, **rows):
    """The loss for given logits of the first two classes for each image of each view; the other classes are impossible.

    Images are constant: the two logits are their channels.
    """
    models = models or linear_models(method)
    impossible = [[0.0] * CHANNELS] * (CLASSES - 2)
    models.student.classifier.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], *impossible], dtype=torch.float64)
    models.student.classifier.bias.data = torch.tensor([0.0, 0.0] + [-1000.0] * (CLASSES - 2), dtype=torch.float64)
    views = {name: torch.tensor(values, dtype=torch.float64)[:, :, None, None] for name, values in rows.items()}
    views = {name: images.repeat(1, 1, SIDE, SIDE) for name, images in views.items()}
    positions = range(len(rows["weak"])) if positions is None else positions
    return take(method, batch=Batch(torch.tensor(labels), views, torch.tensor(list(positions))), models=models)


def make_batch(method, seed=0, labeled=LABELED, unlabeled=UNLABELED, extra=EXTRA, side=SIDE):
    """Each view has its own images, which do not depend on the other views."""
    sizes, views = {"labeled": labeled, "unlabeled": unlabeled, "extra": extra}, {}
    for view in method.views:
        random = torch.Generator().manual_seed(seed * 1000 + sum(place * ord(sign) for place, sign in enumerate(view.name, 1)))
        views[view.name] = torch.randn(sizes[view.source], CHANNELS, side, side, generator=random, dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (labeled,), generator=random)
    return Batch(labels, views, torch.randperm(max(POOL, unlabeled), generator=random)[:unlabeled])


def first_stage_batch(method):
    """The batch of a first stage: labeled views only."""
    batch = make_batch(method)
    names = [view.name for view in method.views if view.source == "labeled"]
    return replace(batch, views={name: batch.views[name] for name in names})


def make_step(number=7, total=10, seed=0):
    return Step(number, total, functools.partial(generator, seed, step=number))


def take(method, number=7, total=10, batch=None, models=None, **sizes):
    """The loss of one step, by default late in the run, with its forward passes recorded."""
    batch = make_batch(method, **sizes) if batch is None else batch
    models = make_models(method) if models is None else models
    step = make_step(number, total)
    passes = record_passes(models)
    return Case(method.loss(batch, models, step), passes, batch, models, step)


def take_steps(method, steps, models=None, start=0, total=2**14, **sizes):
    """Consecutive steps with their own batches; only the running state of the heads connects them."""
    models = models or make_models(method)
    passes, cases = record_passes(models), []
    for number in range(start, start + steps):
        batch, step = make_batch(method, seed=number, **sizes), make_step(number, total)
        passes.clear()
        cases.append(Case(method.loss(batch, models, step), list(passes), batch, models, step))
    return cases


def layers_of(module):
    """Weights and biases of the linear layers of a head, for the references."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return [(part.weight.detach().numpy(), part.bias.detach().numpy()) for part in linear]


def assert_terms(case, expected, weights=None):
    """Every term equals the reference, so do the weights, if given, and the total is the weighted sum."""
    assert case.found.terms.keys() == case.found.weights.keys() == expected.keys()
    for name, value in expected.items():
        assert case.found.terms[name].item() == pytest.approx(value, rel=1e-10, abs=1e-14), name
    if weights is not None:
        assert case.found.weights == pytest.approx(weights, rel=1e-12)
    total = sum(case.found.weights[name] * value for name, value in expected.items())
    assert case.found.total.item() == pytest.approx(total, rel=1e-9)


def assert_rows(found, expected, tolerance=1e-10):
    """Two lists of rows agree."""
    found, expected = (torch.as_tensor(rows, dtype=torch.float64) for rows in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=tolerance)


def assert_no_gradient(case, term, view):
    """A term has no gradient with respect to the student's logits of a view."""
    assert not any(map(any, case.gradient(term, view)))
