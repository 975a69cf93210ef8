"""`--device mps` on a fake Apple GPU, whose tensors know no float64 and cannot be combined with tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from conftest import Outcome, tiny_spec
from crmatch.errors import RequestError
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

MPS = torch.device("mps")


class FakeMPS(TorchFunctionMode):
    """Computes on the CPU and remembers which memory would be on the GPU."""

    not_about_values = (torch.device, torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
    of_one_tensor = (Tensor.to, Tensor.__deepcopy__)
    between_devices = (Tensor.copy_, torch._foreach_copy_, Tensor.data.__set__)
    to_the_host = (Tensor.cpu, Tensor.tolist, Tensor.item)

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, Any] = {}

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self.not_about_values:
            return function(*args, **kwargs)
        values = tree_flatten((args, kwargs))[0]
        tensors = [value for value in (args if function in self.of_one_tensor else values) if isinstance(value, Tensor)]
        on_mps = any(map(self.has, tensors))
        if function == Tensor.device.__get__:
            return MPS if on_mps else function(*args)
        if function not in self.between_devices:
            mixed = on_mps and any(value.ndim and not self.has(value) for value in tensors)
            assert not mixed, f"{function} mixes devices"
        asked = [value for value in values if isinstance(value, torch.device)]
        if asked or function in self.to_the_host:
            on_mps = MPS in asked
        args, kwargs = tree_map(lambda value: torch.device("cpu") if isinstance(value, torch.device) else value, (args, kwargs))
        result = function(*args, **kwargs)
        if function in (Tensor.to, Tensor.cpu) and result is args[0] and on_mps != self.has(result):
            result = result.clone()  # a tensor that moves is another tensor
        for value in tree_flatten(result)[0]:
            if isinstance(value, Tensor) and on_mps and function not in self.between_devices:
                assert value.dtype != torch.float64, f"{function} makes float64 on mps"
                memory = value.untyped_storage()
                self._memory[memory._cdata] = memory  # a reference keeps the number from being used again
        return result


@pytest.mark.parametrize(
    ("method", "policy"),
    [("crmatch", "ctaugment"), *((name, "randaugment") for name in ("crmatch", "mixmatch", "featmatch", "label_propagation"))],
)
def test_a_run_keeps_float64_and_tensors_of_the_cpu_away_from_the_gpu(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, policy: str
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    spec = tiny_spec(stripes, method, **{"augmentation.policy": policy, "plan.steps": 3})
    with FakeMPS():
        record = run(spec, Workspace(tmp_path, stripes), Execution("mps"))
    assert record.machine["device"] == "mps"
    assert record.error is not None


def test_mps_is_refused_where_it_cannot_work(
    crmatch: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = crmatch("train", "digits@4", "--device", "mps", "--out", tmp_path)
    assert (outcome.code, "no device 'mps'" in outcome.err) == (2, True)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert choose_runtime(Execution("mps")).data_device.type == "cpu"
    with pytest.raises(RequestError, match="--precision fp32"):
        choose_runtime(Execution("mps"), "fp64")
