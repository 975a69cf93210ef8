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


class Deployed(nn.Module):
    """uint8 (N, C, H, W) at the model's image size -> probabilities (N, K); normalization and softmax are inside."""

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
        """Probabilities (N, K) of uint8 images (N, C, H, W)."""
        scale, shift = cast(Tensor, self.scale), cast(Tensor, self.shift)
        logits: Tensor = self.network(images.to(scale.dtype) * scale - shift).logits
        return logits.softmax(dim=1)


def export_model(model: Model, form: Format, out: Path, images: Tensor) -> float:
    """Write `model` to `out` and compare what the file says about `images` with the model's own answer.

    Args:
        model: a loaded model.
        form: `torch` (torch.export, usually .pt2) or `onnx`.
        out: file to write.
        images: uint8 (N, C, H, W) at the model's image size, at least two.

    Returns:
        The largest difference between any two probabilities.
    """
    read = _EXPORTERS[form](Deployed(model).eval(), out, images[:2].contiguous())
    expected, sizes = model.predict_probabilities(images), (1, 7, len(images))
    found = [read(images[:size].contiguous()) for size in sizes]  # any number of images must do
    difference = max(float((part - expected[: len(part)]).abs().max()) for part in found)
    if difference > LARGEST_DIFFERENCE:
        raise RequestError(
            f"{out} differs from the model by up to {difference:.2g} in a probability.\nPlease report this with the model."
        )
    return difference


def _export_torch(module: Deployed, out: Path, example: Tensor) -> Callable[[Tensor], Tensor]:
    file = io.BytesIO()
    torch.export.save(_traced(module, example), file)
    write_file(out, file.getvalue())
    program = torch.export.load(out).module()
    return lambda images: cast(Tensor, program(images).detach())


def _export_onnx(module: Deployed, out: Path, example: Tensor) -> Callable[[Tensor], Tensor]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch's exporter needs
    except ImportError as error:
        raise RequestError(f"{error.name} is not installed.\nInstall what ONNX needs: pip install 'crmatch[onnx]'") from error
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        program: Any = torch.onnx.export(
            _traced(module, example), (), input_names=["images"], output_names=["probabilities"], dynamo=True, verbose=False
        )
    write_file(out, program.model_proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _traced(module: Deployed, example: Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        return torch.export.export(module, (example,), dynamic_shapes={"images": {0: batch}})


_EXPORTERS: dict[str, Callable[[Deployed, Path, Tensor], Callable[[Tensor], Tensor]]] = {
    "torch": _export_torch,
    "onnx": _export_onnx,
}
