"""A trained model: load it from a run's directory and predict images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor, nn

from crmatch.atomic_files import checksum, read_file
from crmatch.augment.batches import Normalizer
from crmatch.data.folder.workers import read_pictures
from crmatch.data.images import resize
from crmatch.data.pixels import as_pixels
from crmatch.data.square import SMALLEST_SIDE
from crmatch.errors import CRMatchError, DataError
from crmatch.evaluation import predict
from crmatch.losses import sharpen
from crmatch.networks.attention import AttentionRefiner
from crmatch.networks.build import build_network, weight_shapes
from crmatch.networks.config import NamedNetwork, NetworkConfig
from crmatch.networks.network import REFINER, Network, NetworkShape
from crmatch.own_code import name_file
from crmatch.runs.calibration import Calibration
from crmatch.runs.directory import MODEL_CONFIG, MODEL_WEIGHTS
from crmatch.runs.finished import find_run

Picture = str | Path | Image.Image
Images = Tensor | NDArray[Any] | Picture | Sequence[Picture]
"""What `Model.predict` takes."""


class Prediction(NamedTuple):
    """The most probable class of an image, and its probability."""

    class_name: str
    confidence: float


@dataclass(frozen=True)
class Model:
    """A trained classifier."""

    network: Network  # backbone and classifier, in eval mode
    class_names: tuple[str, ...]  # in the order of the probabilities
    image_size: int  # side of the images the network was trained with
    channels: int  # 1 for grayscale, 3 for color
    normalizer: Normalizer  # maps uint8 pixels to the network's input
    config: Mapping[str, Any]  # the content of `config.json`
    calibration: Calibration | None = None  # None for models that were never measured, and for those of crmatch 0.1

    def predict(self, images: Images) -> list[Prediction]:
        """The most probable class of each image, and its probability."""
        confidence, classes = self.predict_probabilities(images).max(dim=1)
        pairs = zip(classes.tolist(), confidence.tolist(), strict=True)
        return [Prediction(self.class_names[number], value) for number, value in pairs]

    def predict_probabilities(self, images: Images) -> Tensor:
        """Class probabilities (N, K) of images, which are resized to the model's image size.

        Images are NumPy arrays or torch tensors (N, C, H, W), (N, H, W, C) or (N, H, W), of uint8 or of floats from 0 to 1;
        or one or several PIL images or paths of picture files, which are also converted to the model's channels.
        """
        return self.outputs(self._pictures(images))[0]

    def _pictures(self, images: Images) -> Tensor:
        """Images uint8 (N, C, H, W) of the model's size and channels."""
        if isinstance(images, Picture):
            images = [images]
        if isinstance(images, Sequence):
            pixels = read_pictures(images, self.image_size, self.channels)
            return torch.from_numpy(pixels).permute(0, 3, 1, 2)
        pictures = torch.from_numpy(as_pixels(images)).permute(0, 3, 1, 2)
        if pictures.shape[1] != self.channels:
            found = f"the model takes images of {self.channels} channels, found {pictures.shape[1]}"
            raise DataError(f"{found}.\nConvert them, or give PIL images, which are converted.")
        return resize(pictures, self.image_size)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Calibrated class probabilities (N, K) and pooled features (N, D) of uint8 images (N, C, H, W) of the model's size."""
        probabilities, features = predict(self.network, images, self.normalizer)
        if not probabilities.isfinite().all():
            raise DataError("the model's predictions are not numbers.\nIts weights are damaged; train again.")
        return sharpen(probabilities, self.calibration.temperature) if self.calibration else probabilities, features

    def features(self, images: Tensor) -> Tensor:
        """Pooled features (N, D), point (b) of Figure 2, of uint8 images (N, C, H, W) of the model's size."""
        return self.outputs(images)[1]


def build_model(content: bytes, config: Mapping[str, Any]) -> Model:
    """The model described by the contents of `model.safetensors` and `config.json`; any exception if they are damaged."""
    if not {len(config["mean"]), len(config["std"])} == {config["channels"]} <= {1, 3} or min(config["std"]) <= 0:
        raise ValueError(f"channels, mean and std of {MODEL_CONFIG} do not fit together")
    if not SMALLEST_SIDE <= config["image_size"] <= 512:
        raise ValueError(f"image_size {config['image_size']} of {MODEL_CONFIG} is out of range")
    channels, size, names = int(config["channels"]), int(config["image_size"]), tuple(map(str, config["class_names"]))

    def heads(shape: NetworkShape) -> dict[str, nn.Module]:
        """The refiner is the only head that takes part in prediction; most models have none."""
        refiner = config.get("refiner")
        if refiner is None:
            return {}
        count, parts = int(refiner["prototypes"]), int(refiner["heads"])
        if not (0 <= count <= len(content) and 1 <= parts <= shape.features):
            raise ValueError(f"{MODEL_CONFIG} has {count} prototypes and {parts} heads for {shape.features} features")
        return {REFINER: AttentionRefiner(shape.features, count, parts)}

    "".join(names).encode()  # names that cannot be written are refused here
    if checksum(content) != config["checksum"]:
        raise ValueError(f"{MODEL_WEIGHTS} is not the file that {MODEL_CONFIG} belongs to")
    weights = safetensors.torch.load(content)
    kind, architecture = TypeAdapter[Any](NetworkConfig).validate_python(config["network"]), config.get("architecture")
    if kind.kind == "pretrained" and architecture is None:  # the name of a backbone alone could cause a download
        raise ValueError(f"{MODEL_CONFIG} has no architecture")
    _check_size(kind, channels, len(names), weights)
    network = build_network(
        kind, channels=channels, image_size=size, classes=len(names), heads=heads, architecture=architecture
    )
    dtype = weights["classifier.weight"].dtype
    network.to(dtype)
    network.load_state_dict(weights)
    network.channels_last().eval()
    calibration = Calibration.model_validate(config["calibration"]) if config.get("calibration") else None
    return Model(network, names, size, channels, Normalizer(config["mean"], config["std"], dtype), config, calibration)


def _check_size(kind: Any, channels: int, classes: int, weights: Mapping[str, Tensor]) -> None:
    """Refuse a network that is larger than its weights before it takes memory."""
    fits = classes == len(weights["classifier.weight"])
    if isinstance(kind, NamedNetwork):
        shapes = weight_shapes(kind, channels)
        fits = fits and all(name in weights and weights[name].shape == shape for name, shape in shapes.items())
    if not fits:
        raise ValueError(f"{MODEL_WEIGHTS} does not have the weights of the network in {MODEL_CONFIG}")


def load(path: str | Path, code: str | Path | None = None) -> Model:
    """The model of a run, or of any directory with `model.safetensors` and `config.json`.

    `path` may also be a folder above the only finished run in it, or `latest`. `code` is the file that a network from outside
    the package comes from.
    """
    if code is not None:
        name_file(code)
    directory = find_run(path)
    try:
        config = json.loads(read_file(directory / MODEL_CONFIG))
        return build_model(read_file(directory / MODEL_WEIGHTS), config)
    except FileNotFoundError as error:
        found = f"{directory} has no {Path(error.filename).name}: it is not a finished run"
        raise DataError(f"{found}.\nTrain first, or name a directory that crmatch train printed.") from error
    except CRMatchError:
        raise
    except Exception as error:  # JSON, pydantic, safetensors and torch raise many kinds of exceptions on damaged files
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"the model in {directory} cannot be read: {reason}\nThe files are damaged; train again.") from error
