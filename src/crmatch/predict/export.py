"""Export of a model for other programs: uint8 images in, calibrated probabilities out, checked after writing.

The file describes itself: classes, image size, how pictures are resized, calibration. A .pt2 file has them as the extra file
`crmatch.json`, an ONNX file as its metadata. A script that uses an ONNX file, `use_model.py`, is written beside it.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from crmatch.atomic_files import write_file
from crmatch.errors import RequestError
from crmatch.predict.model import Model

LARGEST_DIFFERENCE = 1e-4
SHAPES = {"images": {0: torch.export.Dim("batch", min=1)}}
SCRIPT = "use_model.py"
RESIZE = "upright by EXIF, transparency on white, shorter side to image_size (Pillow's Lanczos filter), then center crop"
Format = Literal["torch", "onnx"]
Predict = Callable[[Tensor], Tensor]


class _Deployed(nn.Module):
    """uint8 (N, C, H, W) at the model's image size -> probabilities (N, K): normalization, temperature and softmax included."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = copy.deepcopy(model.network)
        for parameter in self.network.parameters():
            parameter.data = parameter.data.contiguous()
        dtype = next(self.network.parameters()).dtype
        mean, std = (torch.tensor(model.config[key], dtype=dtype)[:, None, None] for key in ("mean", "std"))
        self.register_buffer("scale", 1 / (255 * std))
        self.register_buffer("shift", mean / std)
        self.temperature = model.calibration.temperature if model.calibration else 1.0

    def forward(self, images: Tensor) -> Tensor:
        scale, shift = cast(Tensor, self.scale), cast(Tensor, self.shift)
        logits: Tensor = self.network(images.to(scale.dtype) * scale - shift).logits
        return (logits / self.temperature).softmax(dim=1)


def export_model(model: Model, form: Format, out: Path, images: Tensor) -> float:
    """Write `model` to `out`, if the predictions of the exported program are those of the model.

    They are compared on `images`, at least two, uint8 (N, C, H, W) at the model's image size. Returns the largest absolute
    difference of a probability.
    """
    make = _torch_program if form == "torch" else _onnx_program
    content, read = make(_Deployed(model).eval(), images[:2].contiguous(), describe(model))
    expected = model.predict_probabilities(images)
    found = [read(images[:size].contiguous()) for size in (1, 7, len(images))]  # the batch size must not be fixed
    difference = max(float((part - expected[: len(part)]).abs().max()) for part in found)
    if difference > LARGEST_DIFFERENCE:
        problem = f"the exported program differs from the model by up to {difference:.2g} in a probability"
        raise RequestError(f"{problem}, so {out} is not written.\nPlease report this with the model.")
    write_file(out, content)
    if form == "onnx" and not (script := out.with_name(SCRIPT)).exists():  # somebody may have changed it
        write_file(script, Path(__file__).with_name(SCRIPT).read_bytes())
    return difference


def describe(model: Model) -> dict[str, str]:
    """What a program needs to know to use an exported model, as texts; lists are JSON."""
    return {
        "class_names": json.dumps(model.class_names),
        "image_size": str(model.image_size),
        "color_mode": "L" if model.channels == 1 else "RGB",
        "input": "uint8 (batch, channels, image_size, image_size), values 0 to 255",
        "resize": RESIZE,
        "mean": json.dumps(model.config["mean"]),
        "std": json.dumps(model.config["std"]),
        "calibration": model.calibration.describe_temperature() if model.calibration else "none",
        "included": "normalization by mean and std, and calibration, are part of the model",
    }


def _torch_program(module: nn.Module, example: Tensor, about: dict[str, str]) -> tuple[bytes, Predict]:
    file = io.BytesIO()
    with torch.no_grad():
        program = torch.export.export(module, (example,), dynamic_shapes=SHAPES)
    torch.export.save(program, file, extra_files={"crmatch.json": json.dumps(about, indent=1)})
    content = file.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return content, lambda images: cast(Tensor, loaded(images).detach())


def _onnx_program(module: nn.Module, example: Tensor, about: dict[str, str]) -> tuple[bytes, Predict]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed.\nInstall what ONNX needs: pip install 'crmatch[onnx]'") from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports that torchvision is missing, which is not needed
    names: Any = {"input_names": ["images"], "output_names": ["probabilities"]}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecation warnings inside the exporter
        exported: Any = torch.onnx.export(module, (example,), dynamic_shapes=SHAPES, dynamo=True, verbose=False, **names)
    exported.model.metadata_props.update(about)
    content: bytes = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
