"""Export of a model for other programs: uint8 images in, probabilities out, checked after writing."""

from __future__ import annotations

import copy
import io
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
Format = Literal["torch", "onnx"]
Predict = Callable[[Tensor], Tensor]


class _Deployed(nn.Module):
    """uint8 (N, C, H, W) at the model's image size -> probabilities (N, K), with normalization and softmax included."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = copy.deepcopy(model.network)
        for parameter in self.network.parameters():
            parameter.data = parameter.data.contiguous()
        dtype = next(self.network.parameters()).dtype
        mean, std = (torch.tensor(model.config[key], dtype=dtype)[:, None, None] for key in ("mean", "std"))
        self.register_buffer("scale", 1 / (255 * std))
        self.register_buffer("shift", mean / std)

    def forward(self, images: Tensor) -> Tensor:
        scale, shift = cast(Tensor, self.scale), cast(Tensor, self.shift)
        logits: Tensor = self.network(images.to(scale.dtype) * scale - shift).logits
        return logits.softmax(dim=1)


def export_model(model: Model, form: Format, out: Path, images: Tensor) -> float:
    """Write `model` to `out` and compare the predictions of that file with the model's.

    They are compared on `images`, at least two, uint8 (N, C, H, W) at the model's image size. Returns the largest absolute
    difference of a probability.
    """
    shapes = {"images": {0: torch.export.Dim("batch", min=1)}}
    with torch.no_grad():
        program = torch.export.export(_Deployed(model).eval(), (images[:2].contiguous(),), dynamic_shapes=shapes)
    read = _write_torch(program, out) if form == "torch" else _write_onnx(program, out)
    expected = model.predict_probabilities(images)
    found = [read(images[:size].contiguous()) for size in (1, 7, len(images))]  # the batch size must not be fixed
    difference = max(float((part - expected[: len(part)]).abs().max()) for part in found)
    if difference > LARGEST_DIFFERENCE:
        problem = f"{out} differs from the model by up to {difference:.2g} in a probability"
        raise RequestError(f"{problem}.\nPlease report this with the model.")
    return difference


def _write_torch(program: torch.export.ExportedProgram, out: Path) -> Predict:
    file = io.BytesIO()
    torch.export.save(program, file)
    write_file(out, file.getvalue())
    module = torch.export.load(out).module()
    return lambda images: cast(Tensor, module(images).detach())


def _write_onnx(program: torch.export.ExportedProgram, out: Path) -> Predict:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed.\nInstall what ONNX needs: pip install 'crmatch[onnx]'") from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports that torchvision is missing, which is not needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation warnings inside the exporter
        exported: Any = torch.onnx.export(
            program, (), input_names=["images"], output_names=["probabilities"], dynamo=True, verbose=False
        )
    write_file(out, exported.model_proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
