"""CR-Match (Fan, Kukleva, Schiele, GCPR 2021): FixMatch, feature distance and rotation prediction.

L = L_S + lambda_u * (L_PseudoLabel + L_Dist) + lambda_r * L_Rot, Eqs. (4) and (5), with a weight for each term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, SECOND_WEAK, STRONG, WEAK, LossTerms, Models, PseudoLabels, Step
from crmatch.methods.fixmatch import FixMatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape, Outputs

SECOND_STRONG = View("second_strong", "unlabeled", "strong")
ROTATION = View("rotation", "extra", "weak")
PAIRS = {
    "weak-weak": (WEAK, SECOND_WEAK),
    "weak-strong": (WEAK, STRONG),
    "strong-strong": (STRONG, SECOND_STRONG),
}


class CRMatch(FixMatch):
    """CR-Match with every choice its paper studies; the defaults are the paper's.

    With `feature_distance_weight` and `rotation_weight` at 0 it is FixMatch, to the bit.
    """

    title: ClassVar = "CR-Match"
    summary: ClassVar = "FixMatch, features of weak and strong views pushed apart, and rotation prediction"
    paper: ClassVar = "Fan, Kukleva and Schiele, GCPR 2021, arXiv 2112.05825"

    name: str = "crmatch"
    distance: Literal["cosine", "l2", "squared_l2", "js"] = "cosine"
    direction: Literal["equivariance", "invariance"] = "equivariance"
    """Push the features of a pair apart (CR-Equiv), or pull them together (CR-Inv)."""
    clamp: bool = True
    """Stop pushing at 90 degrees (cosine only). Paper: minimize the cosine. Here: max(0, cos), because the appendix says
    that the angle stays below 90 degrees and the public code stops there."""
    feature_point: Literal["a", "b"] = "a"
    """Where features are taken: the flattened feature map (a), or after pooling (b)."""
    projection: Literal["none", "linear", "mlp"] = "linear"
    projection_width: int | None = Field(None, ge=1)
    """Width of the projected space; None: as wide as the classifier's input."""
    distance_uses_threshold: bool = True
    """Whether the feature distance counts confident images only."""
    pair: Literal["weak-weak", "weak-strong", "strong-strong"] = "weak-strong"
    detach_weak: bool = False
    """Stop the gradient of the feature distance in the weak branch."""
    rotation_source: Literal["unlabeled", "labeled+unlabeled", "extra"] = "unlabeled"
    """Images to rotate: the batch's unlabeled ones (Eq. 7), those and the labeled ones (Eq. 5), or an independent draw."""
    rotation_images: int | None = Field(None, ge=1)
    """How many unlabeled images are rotated, the first ones of the batch; None: all. Needed for `extra`."""
    feature_distance_weight: float = Field(1.0, ge=0)
    rotation_weight: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _combinations_make_sense(self) -> Self:
        if self.distance == "squared_l2" and self.direction == "equivariance":
            raise ValueError("distance squared_l2 has no lower bound and cannot be pushed; use direction invariance")
        if self.detach_weak and self.pair != "weak-strong":
            raise ValueError(f"detach_weak needs pair weak-strong, found {self.pair}")
        if self.rotation_source == "extra" and self.rotation_images is None:
            raise ValueError("rotation_source extra needs rotation_images, for example 64")
        return self

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """USB rotates 64 images drawn for it alone; `quick` the first 16 of the batch (spec 3.2, row 5)."""
        if recipe == "usb":
            return {"method.rotation_source": "extra", "method.rotation_images": 64}
        if recipe == "quick":
            return {"method.rotation_images": 16}
        method = {"method.ties": "exclude", "data.unlabeled": "remaining", "augmentation.variant": "paper", "headline": "last"}
        return {"plan.steps": setting.defaults.crmatch_epochs * 1024, **method}

    @property
    def weights(self) -> dict[str, float]:
        """FixMatch's, and those of the two terms more."""
        weights = {
            "feature_distance": self.unlabeled_weight * self.feature_distance_weight,
            "rotation": self.rotation_weight,
        }
        return super().weights | {name: weight for name, weight in weights.items() if weight}

    @property
    def makes_pseudo_labels(self) -> bool:
        """The pseudo-label term needs them, and so does the threshold of the feature distance."""
        masked = self.distance_uses_threshold and "feature_distance" in self.weights
        return masked or "pseudo_label" in self.weights

    @property
    def views(self) -> tuple[View, ...]:
        """Every view that a term with a weight needs, each once, in the order of the joint pass."""
        rotated = "rotation" in self.weights and self.rotation_source
        needed = {
            LABELED: "supervised" in self.weights or rotated == "labeled+unlabeled",
            WEAK: self._needs_all_weak or rotated in ("unlabeled", "labeled+unlabeled"),
            STRONG: "pseudo_label" in self.weights or STRONG in self._pair,
            SECOND_WEAK: SECOND_WEAK in self._pair,
            SECOND_STRONG: SECOND_STRONG in self._pair,
            ROTATION: rotated == "extra",
        }
        return tuple(view for view, is_needed in needed.items() if is_needed)

    @property
    def extra_batch_size(self) -> int:
        """Independent images for rotation, where that is their source."""
        return self.rotation_images or 0 if ROTATION in self.views else 0

    def extra_images(self, labeled: int, unlabeled: int) -> int:
        """Three rotated copies of each upright image of the rotation term."""
        if not self.rotation_weight:
            return 0
        rotated = min(self.rotation_images or unlabeled, self.extra_batch_size or unlabeled)
        return 3 * (rotated + labeled * (self.rotation_source == "labeled+unlabeled"))

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """Z of Eq. (2) and h of Eq. (7), as far as their terms have a weight; and what the confidence rule remembers."""
        from crmatch.networks.network import projection_head, rotation_head

        heads = super().heads(shape)
        if "feature_distance" in self.weights and self.projection != "none":
            channels, height, width = shape.feature_map
            inputs = channels * height * width if self.feature_point == "a" else channels
            heads["projection"] = projection_head(inputs, self.projection_width or shape.features, self.projection)
        if "rotation" in self.weights:
            heads["rotation"] = rotation_head(shape.features)
        return heads

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All four terms from one pass; the unrotated copies of the rotation term are the views themselves."""
        from crmatch.losses import rotation_loss
        from crmatch.networks.network import forward_together

        images, upright = self._joint_images(batch)
        outputs = forward_together(models.student, images)
        terms, pseudo_labels = self.self_training_terms(batch, outputs, models.student, step)
        monitors: dict[str, Tensor] = {}
        if "feature_distance" in self.weights:
            terms["feature_distance"], monitors["cosine"] = self._distance_term(models.student, outputs, pseudo_labels)
        if "rotation" in self.weights:
            features = [outputs[name].features[:count] for name, count in upright.items()]
            logits = models.student.head("rotation", _concatenated([*features, outputs["rotated"].features]))
            terms["rotation"] = rotation_loss(logits)
        return LossTerms(terms, self.weights, monitors, pseudo_labels)

    @property
    def _pair(self) -> tuple[View, ...]:
        return PAIRS[self.pair] if "feature_distance" in self.weights else ()

    @property
    def _needs_all_weak(self) -> bool:
        """Whether a term needs every weak image; the rotation term may need only the first ones."""
        return self.makes_pseudo_labels or WEAK in self._pair

    def _joint_images(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Images of the joint pass, and how many of which views serve as unrotated images.

        Rotation comes after augmentation. Paper: prints the other order. Here: augment, then rotate, because a mirrored
        image turned by 90 degrees is the mirror of one turned by 270, which would make the two labels indistinguishable.
        """
        images = dict(batch.views)
        if "rotation" not in self.weights:
            return images, {}
        if self.rotation_source == "extra":
            upright = {"rotation": len(images["rotation"])}
        else:
            upright = {"weak": min(self.rotation_images or len(images["weak"]), len(images["weak"]))}
            if not self._needs_all_weak:
                images["weak"] = images["weak"][: upright["weak"]]
            if self.rotation_source == "labeled+unlabeled":
                upright = {"labeled": len(images["labeled"])} | upright
        still = _concatenated([images[name][:count] for name, count in upright.items()])
        images["rotated"] = _concatenated([still.rot90(turns, (2, 3)) for turns in (1, 2, 3)])
        return images, upright

    def _distance_term(
        self, student: Network, outputs: dict[str, Outputs], pseudo_labels: PseudoLabels | None
    ) -> tuple[Tensor, Tensor]:
        """(1/Bu) sum_j 1{c_j > tau} d(z(f(A(u_j))), z(f(alpha(u_j)))), Eqs. (2) and (4), and the mean cosine."""
        from crmatch.losses import cosine_similarity, feature_distance, masked_mean

        weak, strong = (self._embedding(student, outputs[view.name]) for view in PAIRS[self.pair])
        cosine = cosine_similarity(strong.detach(), weak.detach()).mean()
        if self.detach_weak:
            weak = weak.detach()
        distances = feature_distance(strong, weak, self.distance, self.direction, clamp=self.clamp)
        if self.distance_uses_threshold and pseudo_labels is not None:
            return masked_mean(distances, pseudo_labels.used), cosine
        return distances.mean(), cosine

    def _embedding(self, student: Network, outputs: Outputs) -> Tensor:
        features = outputs.feature_map.flatten(1) if self.feature_point == "a" else outputs.features
        return features if self.projection == "none" else student.head("projection", features)


def _concatenated(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts) if len(parts) > 1 else parts[0]
