"""CR-Match (Fan, Kukleva and Schiele, GCPR 2021): FixMatch, a feature distance loss, and rotation prediction.

L = L_S + lambda_u * (L_PseudoLabel + L_Dist) + lambda_r * L_Rot, Eqs. (4) and (5) of the paper. Here every term also
has a weight of its own; in the paper all are 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from crmatch.augment.views import Batch, View
from crmatch.data.settings import EPOCH_STEPS, Setting
from crmatch.methods.base import LABELED, SECOND_WEAK, STRONG, WEAK, LossTerms, Models, Step, drop_zeros, spec_keys
from crmatch.methods.fixmatch import FixMatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import NetworkShape

SECOND_STRONG = View("second_strong", "unlabeled", "strong")  # name, source, augmentation
ROTATION = View("rotation", "extra", "weak")  # images to rotate, not rotated yet
PAIRS = {"weak-weak": (WEAK, SECOND_WEAK), "weak-strong": (WEAK, STRONG), "strong-strong": (STRONG, SECOND_STRONG)}


class CRMatch(FixMatch):
    """CR-Match with all variants that its paper studies; the defaults are the paper's choices.

    With `feature_distance_weight` and `rotation_weight` 0 it is bit-identical to FixMatch.
    """

    title: ClassVar = "CR-Match"
    summary: ClassVar = "FixMatch, features of weak and strong views pushed apart, and rotation prediction"
    paper: ClassVar = "Fan, Kukleva and Schiele, GCPR 2021, arXiv 2112.05825"

    name: str = "crmatch"
    distance: Literal["cosine", "l2", "squared_l2", "js"] = "cosine"
    direction: Literal["equivariance", "invariance"] = "equivariance"
    """Push the features of a pair of views apart (CR-Equiv), or pull them together (CR-Inv)."""
    clamp: bool = True
    """Stop pushing at 90 degrees (cosine only). Paper: minimize the cosine. Here: minimize max(0, cos), because the appendix
    says that the angle stays below 90 degrees, and USB's code stops there."""
    feature_point: Literal["a", "b"] = "a"
    """Which features are compared, see Figure 2: the flattened feature map (a), or the pooled features (b)."""
    projection: Literal["none", "linear", "mlp"] = "linear"
    """The head z that is applied to the features before they are compared; none compares the features themselves."""
    projection_width: int | None = Field(None, ge=1)
    """Width E of the embedding; None: D, the number of pooled features (128 for WRN-28-2)."""
    distance_uses_threshold: bool = True
    """Whether the feature distance is masked by confidence like the pseudo-label term, as in Eq. (4)."""
    pair: Literal["weak-weak", "weak-strong", "strong-strong"] = "weak-strong"
    """The two views whose features are compared."""
    detach_weak: bool = False
    """Stop the gradient of the feature distance in the weak branch."""
    rotation_source: Literal["unlabeled", "labeled+unlabeled", "extra"] = "unlabeled"
    """Images to rotate: the unlabeled ones (Eq. 7), also the labeled ones (Eq. 5), or a separate unlabeled batch (`extra`)."""
    rotation_images: int | None = Field(None, ge=1)
    """Rotate only the first N unlabeled images of the batch; None: all. With `extra`: size of the separate batch."""
    feature_distance_weight: float = Field(1.0, ge=0)
    """Weight of L_Dist inside L_U; it is multiplied by `unlabeled_weight`."""
    rotation_weight: float = Field(1.0, ge=0)
    """lambda_r."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.distance == "squared_l2" and self.direction == "equivariance":
            raise ValueError("distance squared_l2 has no lower bound and cannot be pushed; use direction invariance")
        if self.detach_weak and self.pair != "weak-strong":
            raise ValueError(f"detach_weak needs pair weak-strong, found {self.pair}")
        if self.rotation_source == "extra" and self.rotation_images is None:
            raise ValueError("rotation_source extra needs rotation_images, for example 64")
        return self

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """Keys that CR-Match sets differently from the other methods of a recipe."""
        if recipe == "usb":  # microsoft/Semi-supervised-learning has a separate loader of 64 images to rotate
            return spec_keys("method", rotation_source="extra", rotation_images=64)
        if recipe == "quick":
            return spec_keys("method", rotation_images=8)
        # `paper` and `original`: section 3.3 and the appendix of the paper; the other methods follow FixMatch's protocol
        return {
            "plan.steps": setting.defaults.crmatch_epochs * EPOCH_STEPS,
            "data.unlabeled": "remaining",  # the labeled images are not among the unlabeled ones
            "augmentation.variant": "paper",  # the table of transformations in the appendix
            "method.ties": "exclude",  # Eq. (4): a confidence above tau, not equal to it
            "headline": "last",  # the error of the final model, not a median over evaluations
        }

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total; terms with weight 0 are left out."""
        distance = self.unlabeled_weight * self.feature_distance_weight
        return super().weights | drop_zeros(feature_distance=distance, rotation=self.rotation_weight)

    @property
    def needs_pseudo_labels(self) -> bool:
        """The pseudo-label term needs them, and the masked feature distance needs their confidence."""
        masked = self.distance_uses_threshold and "feature_distance" in self.weights
        return masked or "pseudo_label" in self.weights

    @property
    def views(self) -> tuple[View, ...]:
        """Every view that a term needs, in the order of the joint forward pass."""
        pair = PAIRS[self.pair] if "feature_distance" in self.weights else ()
        needed = {
            LABELED: "supervised" in self.weights or "labeled" in self._views_to_rotate,
            WEAK: self._terms_need_every_weak_view or "weak" in self._views_to_rotate,
            STRONG: "pseudo_label" in self.weights or STRONG in pair,
            SECOND_WEAK: SECOND_WEAK in pair,
            SECOND_STRONG: SECOND_STRONG in pair,
            ROTATION: "rotation" in self._views_to_rotate,
        }
        return tuple(view for view, is_needed in needed.items() if is_needed)

    @property
    def _terms_need_every_weak_view(self) -> bool:
        """False if only the rotation term needs weak views, and perhaps only the first ones."""
        return self.needs_pseudo_labels or ("feature_distance" in self.weights and WEAK in PAIRS[self.pair])

    @property
    def _views_to_rotate(self) -> dict[str, int | None]:
        """Views whose images are rotated, and how many of their first images; None: all."""
        if "rotation" not in self.weights:
            return {}
        sources: dict[str, dict[str, int | None]] = {
            "unlabeled": {"weak": self.rotation_images},
            "labeled+unlabeled": {"labeled": None, "weak": self.rotation_images},
            "extra": {"rotation": None},
        }
        return sources[self.rotation_source]

    @property
    def extra_batch_size(self) -> int:
        """Number of images per step in the source `extra`."""
        return (self.rotation_images or 0) if ROTATION in self.views else 0

    def extra_images(self, labeled: int, unlabeled: int) -> int:
        """Number of rotated copies: three of each image that is rotated."""
        sizes = {"labeled": labeled, "weak": unlabeled, "rotation": self.extra_batch_size}
        return 3 * sum(min(count or sizes[name], sizes[name]) for name, count in self._views_to_rotate.items())

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The projection z of Eq. (2) and the rotation head h of Eq. (7), and the running state of the confidence rule."""
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
        """Eq. (5), from one forward pass over B labeled and Bu unlabeled images and Br rotated ones (by default Br = Bu)."""
        import torch

        from crmatch.losses import cosine_similarity, cross_entropy, fairness, feature_distance, masked_mean, rotation_loss
        from crmatch.networks.network import forward_together

        student, weights, images = models.student, self.weights, dict(batch.views)
        terms: dict[str, Tensor] = {}
        monitors: dict[str, Tensor] = {}
        pseudo_labels = None

        # Rotated copies for Eq. (7); the upright copies are the views themselves. Paper: rotate, then augment. Here: rotate the
        # augmented images, because mirroring an image rotated by 90 degrees gives the mirrored image rotated by 270 degrees:
        # after random mirroring the labels 90 and 270 degrees could not be told apart.
        if "weak" in images and not self._terms_need_every_weak_view:  # drop those that are not rotated
            images["weak"] = images["weak"][: self.rotation_images]
        if "rotation" in weights:
            upright = torch.cat([images[name][:count] for name, count in self._views_to_rotate.items()])  # (Br, C, H, W)
            images["rotated"] = torch.cat([upright.rot90(turns, (2, 3)) for turns in (1, 2, 3)])  # (3 Br, C, H, W)

        # One pass over x (B), alpha(u) (Bu), A(u) (Bu) and the rotated images, so that batch statistics mix all of them
        outputs = forward_together(student, images)

        # Supervised term L_S, Eq. (6): logits (B, K), labels (B,)
        if "supervised" in weights:
            terms["supervised"] = cross_entropy(outputs["labeled"].logits, batch.labels).mean()

        # Pseudo-labels (Bu,) from the weak views and confidence mask 1{c > tau} (Bu,), without gradient
        if self.needs_pseudo_labels:
            targets, mask, pseudo_labels = self.make_pseudo_labels(batch, outputs, student, step)

        # Pseudo-label term L_PseudoLabel, Eqs. (3) and (4): mean over all Bu images, logits (Bu, K) of the strong views
        if "pseudo_label" in weights:
            terms["pseudo_label"] = masked_mean(cross_entropy(outputs["strong"].logits, targets), mask)
        if "fairness" in weights:  # only with mask free
            state = student.state("mask")  # running averages, see confidence.py
            terms["fairness"] = fairness(outputs["strong"].logits, mask, state["prediction"], state["histogram"])

        # Feature distance term L_Dist, Eqs. (2) and (4): embeddings z(f(.)) (Bu, E) of a pair of views
        if "feature_distance" in weights:
            pair = [outputs[view.name] for view in PAIRS[self.pair]]
            embeddings = [view.feature_map.flatten(1) if self.feature_point == "a" else view.features for view in pair]
            if self.projection != "none":
                embeddings = [student.head("projection", features) for features in embeddings]
            first, second = embeddings  # weak and strong by default
            monitors["cosine"] = cosine_similarity(second.detach(), first.detach()).mean()
            first = first.detach() if self.detach_weak else first
            distances = feature_distance(second, first, self.distance, self.direction, clamp=self.clamp)  # (Bu,)
            # needs_pseudo_labels guarantees that there is a mask if it is used here
            terms["feature_distance"] = masked_mean(distances, mask) if self.distance_uses_threshold else distances.mean()

        # Rotation term L_Rot, Eq. (7): h predicts the rotation of 4 Br images from their pooled features (4 Br, D)
        if "rotation" in weights:
            # Four blocks of Br rows: 0, 90, 180, 270 degrees, as rotation_loss expects
            features = [outputs[name].features[:count] for name, count in self._views_to_rotate.items()]
            terms["rotation"] = rotation_loss(student.head("rotation", torch.cat([*features, outputs["rotated"].features])))
        return LossTerms(terms, weights, monitors, pseudo_labels)
