"""Batches: views are what was asked for, from independent streams, as a pure function of (seed, step)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import tiny_spec, training_of
from crmatch.augment.batches import BatchMaker, Normalizer
from crmatch.augment.views import FirstStage, View
from crmatch.augment.weak import rows_of
from crmatch.randomness import generator

PLAIN = View("plain", "unlabeled", "none")
WEAK = View("weak", "unlabeled", "weak")
STRONG = View("strong", "unlabeled", "strong")
EXTRA = View("extra", "extra", "none")
LABELED = View("labeled", "labeled", "none")


@pytest.fixture
def maker(stripes: Path) -> BatchMaker:
    training = training_of(tiny_spec(stripes), stripes)
    sizes = {"labeled": 6, "unlabeled": 12, "extra": 5}
    return replace(training.batches, batch_sizes=sizes, views=(LABELED, PLAIN, WEAK, STRONG, EXTRA))


def test_views_have_the_sizes_of_their_sources(maker: BatchMaker) -> None:
    batch = maker.batch(0)
    assert {name: len(images) for name, images in batch.views.items()} == {
        "labeled": 6, "plain": 12, "weak": 12, "strong": 12, "extra": 5,
    }  # fmt: skip
    assert batch.labels.shape == (6,)
    assert all(images.dtype == torch.float32 for images in batch.views.values())


def test_a_plain_view_is_the_normalized_image_itself(maker: BatchMaker) -> None:
    batch = maker.batch(3)
    rows = maker.unlabeled[batch.unlabeled]
    torch.testing.assert_close(batch.views["plain"], maker.images[rows].float() / 127.5 - 1)
    assert float(batch.views["plain"].min()) >= -1
    assert float(batch.views["plain"].max()) <= 1


def test_labels_belong_to_the_labeled_images(maker: BatchMaker) -> None:
    batch = maker.batch(1)
    for image, label in zip(batch.views["labeled"], batch.labels, strict=True):
        brightest = image.mean(dim=(0, 2)).argmax().item()
        assert brightest // 5 == label or brightest == 15


def test_labeled_images_never_appear_among_the_remaining(maker: BatchMaker) -> None:
    for step in range(10):
        rows = set(maker.unlabeled[maker.batch(step).unlabeled].tolist())
        assert not rows & set(maker.labeled.tolist())


def test_weak_strong_and_extra_views_differ_from_the_image_and_from_each_other(maker: BatchMaker) -> None:
    views = maker.batch(0).views
    assert not torch.equal(views["plain"], views["weak"])
    assert not torch.equal(views["weak"], views["strong"])
    assert not torch.equal(views["extra"], views["plain"][:5])


def test_a_view_that_is_strong_only_is_the_policy_on_the_untouched_image(maker: BatchMaker) -> None:
    """FeatMatch. The reference applies the policy image by image to the image as it is stored."""
    only = View("only", "unlabeled", "strong_only")
    batch = replace(maker, views=(only,)).batch(2)
    images = maker.images[maker.unlabeled[batch.unlabeled]]
    draws = maker.policy.draw(len(images), 16, 16, generator(maker.seed, "strong/only", 2))
    for number, view in enumerate(batch.views["only"]):
        one = maker.policy.apply(images[number : number + 1], rows_of(draws, slice(number, number + 1)))
        torch.testing.assert_close(view, one[0].float() / 127.5 - 1)


def test_a_first_stage_has_whole_batches_of_labeled_images_and_no_others(maker: BatchMaker) -> None:
    staged = replace(maker, first_stage=FirstStage(2, 4))
    sizes = [{name: len(images) for name, images in staged.batch(step).views.items()} for step in range(3)]
    assert sizes == [{"labeled": 4}, {"labeled": 4}, {"labeled": 6, "plain": 12, "weak": 12, "strong": 12, "extra": 5}]
    assert staged.batch(0).labels.shape == (4,)
    assert torch.equal(staged.batch(2).views["labeled"], maker.batch(2).views["labeled"])


def test_a_view_more_or_less_moves_no_other_view(maker: BatchMaker) -> None:
    full = maker.batch(5).views
    for kept in ((WEAK,), (STRONG,), (WEAK, STRONG), (EXTRA, WEAK)):
        some = replace(maker, views=kept).batch(5).views
        assert all(torch.equal(images, full[name]) for name, images in some.items())


def test_seed_and_step_change_the_batch_and_nothing_else_does(maker: BatchMaker) -> None:
    def content(seed: int, step: int) -> bytes:
        return replace(maker, seed=seed).batch(step).views["strong"].contiguous().numpy().tobytes()

    assert len({content(seed, step) for seed in (0, 1) for step in (0, 1)}) == 4
    assert content(0, 1) == content(0, 1)


@pytest.mark.parametrize("mirror", [True, False])
def test_the_weak_view_mirrors_half_of_the_images_or_none(maker: BatchMaker, mirror: bool) -> None:
    ramp = torch.arange(16, dtype=torch.uint8).repeat(36, 3, 16, 1)
    rising = replace(maker, images=ramp, weak=maker.weak._replace(mirror=mirror), views=(WEAK,))
    mirrored = sum(
        int((view[0, 8, 12] < view[0, 8, 4]).item()) for step in range(50) for view in rising.batch(step).views["weak"]
    )
    assert mirrored == 0 if not mirror else 250 < mirrored < 350


def test_normalization_is_per_channel() -> None:
    images = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    result = Normalizer((0.1, 0.2, 0.3), (0.5, 0.25, 2.0), torch.float32)(images)
    torch.testing.assert_close(result[0, :, 0, 0], torch.tensor([1.8, 3.2, 0.35]))
    assert images.float().mean() == 255


def test_a_pool_is_all_images_in_order_and_its_weak_views_depend_on_seed_and_step_alone(maker: BatchMaker) -> None:
    def pool(maker: BatchMaker, *arguments: object) -> torch.Tensor:
        return torch.cat(list(maker.pool("unlabeled", *arguments)))  # type: ignore[arg-type]

    torch.testing.assert_close(pool(maker), maker.images[maker.unlabeled].float() / 127.5 - 1)
    assert torch.equal(pool(maker, "weak", 3), pool(maker, "weak", 3))
    assert not torch.equal(pool(maker, "weak", 3), pool(maker))
    assert not torch.equal(pool(maker, "weak", 3), pool(maker, "weak", 4))
    assert not torch.equal(pool(maker, "weak", 3), pool(replace(maker, seed=1), "weak", 3))
