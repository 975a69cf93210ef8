"""A tiny student and a different teacher, a batch made by hand, and a record of every forward pass that a loss runs.

References compute every term from the recorded outputs; the recorded inputs say whether the right images went in.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from crmatch.augment.views import Batch
from crmatch.methods.base import LossTerms, Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.networks.network import Network, NetworkShape, Outputs
from crmatch.randomness import generator

CLASSES, CHANNELS, SIDE = 4, 2, 8  # 1 / CLASSES is exact in single precision too: memories begin there
LABELED, UNLABELED, POOL = 4, 6, 15
NORMS = nn.modules.batchnorm._BatchNorm


class Pass(NamedTuple):
    """One forward pass; images and outputs are the live tensors, so that gradients can be asked for."""

    network: str
    images: Tensor
    outputs: Outputs
    training: bool
    with_gradient: bool
    moved: bool


class Case(NamedTuple):
    """A loss and everything that went into it."""

    found: LossTerms
    passes: list[Pass]
    batch: Batch
    models: Models
    step: Step

    def outputs(self, view, network="student"):
        """Detached outputs of the images of a view, or of given images, in the one pass that saw them."""
        record, rows = locate(self.passes, self.batch.views[view] if isinstance(view, str) else view, network)
        return Outputs(*(part[rows].detach() for part in record.outputs))

    def logits(self, view, network="student"):
        return self.outputs(view, network).logits.tolist()

    def gradient(self, term, view):
        """Gradient of a term by the student's logits of a view; every other row of that pass has none."""
        record, rows = locate(self.passes, self.batch.views[view] if isinstance(view, str) else view, "student")
        if not record.outputs.logits.requires_grad:
            return [[0.0] * CLASSES] * len(self.batch.views[view])
        (gradient,) = torch.autograd.grad(self.found.terms[term], record.outputs.logits, retain_graph=True, allow_unused=True)
        return torch.zeros(len(record.images), CLASSES)[rows].tolist() if gradient is None else gradient[rows].tolist()


def same(first, second, tolerance=1e-12):
    return first.shape == second.shape and bool(torch.allclose(first, second, rtol=0, atol=tolerance))


def locate(passes, images, network):
    """The one pass, and the rows in it, that saw these images one after the other."""
    count, found = len(images), []
    for record in passes:
        for start in range(len(record.images) - count + 1 if record.network == network else 0):
            if same(record.images[start : start + count].detach(), images.detach()):
                found.append((record, slice(start, start + count)))
    assert len(found) == 1, f"{len(found)} passes of the {network} saw these images, not one"
    return found[0]


def running_state(network):
    """Running means and variances, and how many batches they saw, in one vector."""
    norms = [module for module in network.modules() if isinstance(module, NORMS)]
    parts = [part for norm in norms for part in (norm.running_mean, norm.running_var, norm.num_batches_tracked)]
    return torch.cat([part.detach().double().flatten() for part in parts]) if parts else torch.zeros(1)


def record_passes(models):
    """A list that grows by one `Pass` with every forward of student or teacher."""
    passes: list[Pass] = []
    started: list[Any] = []

    def before(network, inputs):
        started.append(running_state(network))

    def after(name, network, inputs, outputs):
        moved = not torch.equal(started.pop(), running_state(network))
        passes.append(Pass(name, inputs[0], outputs, network.training, torch.is_grad_enabled(), moved))

    for name, network in models._asdict().items():
        network.register_forward_pre_hook(before)
        network.register_forward_hook(functools.partial(after, name))
    return passes


def make_network(method, seed=0, confidence=3.0):
    """`confidence` stretches the logits."""
    config = WideResNetConfig(filters=4, repeat=1)
    size = {"channels": CHANNELS, "image_size": SIDE, "classes": CLASSES, "unlabeled": POOL}
    network = build_network(config, **size, heads=method.heads, seed=seed).double()
    with torch.no_grad():
        network.classifier.weight *= confidence
    return network


def make_models(method, seed=0, confidence=3.0):
    """A student in training mode and a teacher with weights of its own, in evaluation mode as in the loop."""
    return Models(make_network(method, seed, confidence).train(), make_network(method, seed + 100, confidence).eval())


def linear_models(method, seed=0):
    """Networks in which images never meet and everything is seen at a glance: logits = W (channel means) + b."""
    generator = torch.Generator().manual_seed(seed)
    networks = []
    for _ in range(2):
        classifier = nn.Linear(CHANNELS, CLASSES).double()
        classifier.weight.data = torch.randn(CLASSES, CHANNELS, generator=generator, dtype=torch.float64)
        classifier.bias.data = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
        heads = method.heads(NetworkShape((CHANNELS, SIDE, SIDE), CLASSES, POOL))
        networks.append(Network(nn.Identity(), classifier, heads).double())
    return Models(networks[0].train(), networks[1].eval())


def case_of_logits(method, labels, *, models=None, positions=None, **rows):
    """The loss where the logits of the first two classes are given for every image of every view, the others impossible."""
    models = models or linear_models(method)
    impossible = [[0.0] * CHANNELS] * (CLASSES - 2)
    models.student.classifier.weight.data = torch.tensor([[1.0, 0.0], [0.0, 1.0], *impossible], dtype=torch.float64)
    models.student.classifier.bias.data = torch.tensor([0.0, 0.0] + [-1000.0] * (CLASSES - 2), dtype=torch.float64)
    views = {name: torch.tensor(values, dtype=torch.float64)[:, :, None, None] for name, values in rows.items()}
    views = {name: images.expand(-1, -1, SIDE, SIDE) for name, images in views.items()}
    positions = range(len(rows["weak"])) if positions is None else positions
    return take(method, batch=Batch(torch.tensor(labels), views, torch.tensor(list(positions))), models=models)


def make_batch(method, seed=0, labeled=LABELED, unlabeled=UNLABELED):
    """Each view has images of its own, the same ones whatever other views there are."""
    sizes, views = {"labeled": labeled, "unlabeled": unlabeled}, {}
    for view in method.views:
        random = torch.Generator().manual_seed(seed * 1000 + sum(place * ord(sign) for place, sign in enumerate(view.name, 1)))
        views[view.name] = torch.randn(sizes[view.source], CHANNELS, SIDE, SIDE, generator=random, dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (labeled,), generator=random)
    return Batch(labels, views, torch.randperm(POOL, generator=random)[:unlabeled])


def make_step(number=7, total=10, seed=0):
    return Step(number, total, functools.partial(generator, seed, step=number))


def take(method, number=7, total=10, batch=None, models=None, **sizes):
    """The loss of one step, with its passes on record."""
    batch = make_batch(method, **sizes) if batch is None else batch
    models = make_models(method) if models is None else models
    step = make_step(number, total)
    passes = record_passes(models)
    return Case(method.loss(batch, models, step), passes, batch, models, step)


def take_steps(method, steps, models=None, start=0, total=2**14, **sizes):
    """Successive steps of one run, each with a batch and passes of its own; only what heads remember connects them."""
    models = models or make_models(method)
    passes, cases = record_passes(models), []
    for number in range(start, start + steps):
        batch, step = make_batch(method, seed=number, **sizes), make_step(number, total)
        passes.clear()
        cases.append(Case(method.loss(batch, models, step), list(passes), batch, models, step))
    return cases


def images_by_network(passes):
    """How many images went through each network, pass by pass."""
    return {name: [len(record.images) for record in passes if record.network == name] for name in ("student", "teacher")}


def uses_batch_statistics(record, models_before):
    """Whether a pass gave what the same weights give in training mode, where images meet in batch statistics."""
    twin = copy.deepcopy(getattr(models_before, record.network)).train()
    with torch.no_grad():
        return same(twin(record.images.detach()).logits, record.outputs.logits.detach())


def assert_terms(case, expected, weights=None):
    """Every term equals the reference; so do the weights, where given, and the total follows."""
    assert case.found.terms.keys() == case.found.weights.keys() == expected.keys()
    for name, value in expected.items():
        assert case.found.terms[name].item() == pytest.approx(value, rel=1e-10, abs=1e-14), name
    if weights is not None:
        assert case.found.weights == pytest.approx(weights, rel=1e-12)
    total = sum(case.found.weights[name] * value for name, value in expected.items())
    assert case.found.total.item() == pytest.approx(total, rel=1e-9)


def assert_rows(found, expected, tolerance=1e-10):
    """Two lists of rows agree."""
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), rtol=1e-8, atol=tolerance
    )


def weight_fields(method_class):
    return [name for name in method_class.model_fields if name.endswith("_weight")]


def assert_doubling_adds_exactly_its_term(method, field):
    """Doubling `<term>_weight` adds weight * term to the total and changes no term."""
    term = field.removesuffix("_weight")
    before, after = (take(changed, models=make_models(method)).found for changed in (method, doubled(method, field)))
    assert before.terms[term].item() != 0
    assert all(torch.equal(before.terms[name], after.terms[name]) for name in before.terms)
    added = before.weights[term] * before.terms[term].item()
    assert (after.total - before.total).item() == pytest.approx(added, rel=1e-8)


def doubled(method, field):
    return type(method)(**{**method.model_dump(), field: 2 * getattr(method, field)})


def assert_no_gradient_reaches_the_teacher(case):
    """Neither through the teacher's weights nor through what it remembers."""
    case.found.total.backward()
    assert all(parameter.grad is None for parameter in case.models.teacher.parameters())
