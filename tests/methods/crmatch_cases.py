"""A small real network, a batch made by hand, and what the reference says about both.

The reference gets the feature maps of one joint pass and the weights of the layers after them; pooling, classifier, heads,
mask and terms it computes itself, image by image.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crmatch.augment.views import Batch
from crmatch.methods.base import Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from reference import crmatch_formulas as reference

CLASSES, CHANNELS, SIDE = 3, 2, 8
LABELED, UNLABELED, EXTRA = 4, 10, 3
THRESHOLD = 0.45
STEP = Step(0, 1, lambda stream: torch.Generator())
PAIRS = reference.PAIRS
METRICS = [
    {"distance": "cosine", "direction": "equivariance", "clamp": True},
    {"distance": "cosine", "direction": "equivariance", "clamp": False},
    {"distance": "cosine", "direction": "invariance"},
    {"distance": "l2", "direction": "equivariance"},
    {"distance": "l2", "direction": "invariance"},
    {"distance": "squared_l2", "direction": "invariance"},
    {"distance": "js", "direction": "equivariance"},
    {"distance": "js", "direction": "invariance"},
]
EXTRA_ROTATION = {"rotation_source": "extra", "rotation_images": EXTRA}
ROTATIONS = [
    {"rotation_source": "unlabeled"},
    {"rotation_source": "unlabeled", "rotation_images": 3},
    {"rotation_source": "unlabeled", "rotation_images": 1},
    {"rotation_source": "unlabeled", "rotation_images": 1000},
    {"rotation_source": "labeled+unlabeled"},
    {"rotation_source": "labeled+unlabeled", "rotation_images": 3},
    EXTRA_ROTATION,
]
FIXED = {"threshold": THRESHOLD, "clamp": False}
WEIGHTS = {
    "supervised_weight": 0.7,
    "unlabeled_weight": 1.3,
    "pseudo_label_weight": 0.4,
    "feature_distance_weight": 2.5,
    "rotation_weight": 0.6,
}
TERMS = ("supervised", "pseudo_label", "feature_distance", "rotation")


def name_of(choices):
    return " ".join(str(value) for value in choices.values())


class Untouched(nn.Module):
    """A teacher that no loss of this file may ask."""

    def forward(self, images):
        raise AssertionError("the teacher was asked")


def make_student(method, side=SIDE, seed=0):
    config = WideResNetConfig(filters=4, repeat=1)
    heads = method.heads
    return build_network(config, channels=CHANNELS, image_size=side, classes=CLASSES, heads=heads, seed=seed).double()


def make_batch(method, side=SIDE, labeled=LABELED, unlabeled=UNLABELED, extra=EXTRA, seed=0):
    """Each view has images of its own, the same ones whatever other views there are."""
    sizes = {"labeled": labeled, "unlabeled": unlabeled, "extra": extra}
    views = {}
    for view in method.views:
        generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, view.name)))
        shape = (sizes[view.source], CHANNELS, side, side)
        views[view.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Batch(torch.arange(labeled) % CLASSES, views, torch.arange(unlabeled))


def make_loss(method, student, batch):
    return method.loss(batch, Models(student, Untouched()), STEP)


def upright_views(method, batch):
    """Names and numbers of the images that are rotated, as the specification has them (3.2, row 5)."""
    if method.rotation_source == "extra":
        return {"rotation": len(batch.views["rotation"])}
    of_unlabeled = {"weak": min(method.rotation_images or UNLABELED, len(batch.views["weak"]))}
    return of_unlabeled if method.rotation_source == "unlabeled" else {"labeled": len(batch.labels)} | of_unlabeled


def turned(images, turns):
    return torch.stack([torch.from_numpy(reference.rotated(image.numpy(), turns)) for image in images])


def joint_images(method, batch):
    """The documented joint pass: the views in their order, then the images turned by 90, by 180 and by 270 degrees."""
    parts = {view.name: batch.views[view.name] for view in method.views}
    if method.rotation_weight:
        upright = torch.cat([batch.views[name][:count] for name, count in upright_views(method, batch).items()])
        parts |= {f"turned {90 * turns}": turned(upright, turns) for turns in (1, 2, 3)}
    return parts


def layers_of(module):
    """Weights and biases of the linear layers of a head, for the reference."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return [(part.weight.detach().numpy(), part.bias.detach().numpy()) for part in linear]


def expected_terms(method, student, batch):
    """The terms, image by image, from the feature maps of one joint pass; and which images are confident."""
    parts = joint_images(method, batch)
    with torch.no_grad():
        groups = copy.deepcopy(student).backbone(torch.cat(list(parts.values()))).split([len(part) for part in parts.values()])
    return reference.crmatch_terms(
        {name: group.numpy() for name, group in zip(parts, groups, strict=True)},
        batch.labels.tolist(),
        layers_of(student.classifier),
        layers_of(student.heads["projection"]) if "projection" in student.heads else [],
        layers_of(student.heads["rotation"]) if method.rotation_weight else None,
        upright_views(method, batch) if method.rotation_weight else None,
        threshold=method.threshold,
        ties=method.ties,
        soft=method.pseudo_labels == "soft",
        pair=method.pair if method.feature_distance_weight else None,
        point=method.feature_point,
        distance=method.distance,
        direction=method.direction,
        clamp=method.clamp,
        thresholded=method.distance_uses_threshold,
    )


def assert_equals_the_reference(method, side=SIDE, seed=0):
    student, batch = make_student(method, side, seed), make_batch(method, side, seed=seed)
    found = make_loss(method, student, batch)
    expected, confident = expected_terms(method, student, batch)
    assert 0 < sum(confident) < len(confident)
    assert found.pseudo_labels.used.tolist() == confident
    assert found.terms.keys() == expected.keys()
    for name, value in expected.items():
        assert found.terms[name].item() == pytest.approx(value, rel=1e-10, abs=1e-14), name
    total = reference.total_loss(
        expected["supervised"],
        expected["pseudo_label"],
        expected.get("feature_distance", 0.0),
        expected.get("rotation", 0.0),
        method.supervised_weight,
        method.unlabeled_weight,
        method.pseudo_label_weight,
        method.feature_distance_weight,
        method.rotation_weight,
    )
    assert found.total.item() == pytest.approx(total, rel=1e-10)
