"""Using a trained model: load a run's directory, predict images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from crmatch.atomic_files import checksum
from crmatch.augment.batches import Normalizer
from crmatch.data.images import check_images, resize
from crmatch.data.square import SMALLEST_SIDE
from crmatch.errors import DataError
from crmatch.evaluation import predict_probabilities
from crmatch.networks.attention import AttentionRefiner
from crmatch.networks.build import build_network
from crmatch.networks.config import NetworkConfig
from crmatch.networks.network import REFINER, Network, NetworkShape
from crmatch.runs.directory import MODEL_CONFIG, MODEL_WEIGHTS


@dataclass(frozen=True)
class Model:
    """A classifier ready for use.

    Attributes:
        network: backbone and classifier, in eval mode.
        class_names: names of the classes, in the order of the probabilities.
        image_size: side the network was trained with.
        channels: 1 for gray, 3 for color.
        normalizer: from uint8 pixels to the network's input.
        config: everything `config.json` says.
    """

    network: Network
    class_names: tuple[str, ...]
    image_size: int
    channels: int
    normalizer: Normalizer
    config: Mapping[str, Any]

    def predict_probabilities(self, images: Tensor) -> Tensor:
        """Class probabilities (N, K) of uint8 images (N, C, H, W), brought to the model's size first."""
        check_images(images)
        if images.shape[1] != self.channels:
            raise DataError(f"the model takes images of {self.channels} channels, found {images.shape[1]}.")
        return predict_probabilities(self.network, resize(images, self.image_size), self.normalizer)


def build_model(content: bytes, config: Mapping[str, Any]) -> Model:
    """The model that the contents of `model.safetensors` and `config.json` describe.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError, ValidationError: they are damaged.
    """
    if not {len(config["mean"]), len(config["std"])} == {config["channels"]} <= {1, 3} or min(config["std"]) <= 0:
        raise ValueError(f"channels, mean and std of {MODEL_CONFIG} do not fit together")
    if not SMALLEST_SIDE <= config["image_size"] <= 512:
        raise ValueError(f"image_size {config['image_size']} of {MODEL_CONFIG} is out of range")
    network = build_network(
        TypeAdapter[Any](NetworkConfig).validate_python(config["network"]),
        channels=int(config["channels"]),
        image_size=int(config["image_size"]),
        classes=len(config["class_names"]),
        heads=lambda shape: _refiner(shape, config.get("refiner")),
    )
    if checksum(content) != config["checksum"]:
        raise ValueError(f"{MODEL_WEIGHTS} is not the file that {MODEL_CONFIG} belongs to")
    weights = safetensors.torch.load(content)
    network.to(weights["classifier.weight"].dtype)
    network.load_state_dict(weights)
    network.channels_last().eval()
    dtype = next(network.parameters()).dtype
    normalizer = Normalizer(config["mean"], config["std"], dtype)
    names = tuple(str(name) for name in config["class_names"])
    return Model(network, names, int(config["image_size"]), int(config["channels"]), normalizer, config)


def load(path: str | Path) -> Model:
    """The model of a run or of any directory with `model.safetensors` and `config.json`."""
    directory = Path(path)
    try:
        config = json.loads((directory / MODEL_CONFIG).read_text(encoding="utf-8"))
        return build_model((directory / MODEL_WEIGHTS).read_bytes(), config)
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise DataError(
            f"{directory} has no {missing}: it is no finished run.\n"
            "Train first, or name a directory that crmatch train printed."
        ) from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        safetensors.SafetensorError,
        ValidationError,
    ) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"the model in {directory} cannot be read: {reason}\nThe files are damaged; train again.") from error


def _refiner(shape: NetworkShape, description: Mapping[str, Any] | None) -> dict[str, nn.Module]:
    """The one head that prediction needs, where the model has it."""
    if description is None:
        return {}
    return {REFINER: AttentionRefiner(shape.features, int(description["prototypes"]), int(description["heads"]))}
