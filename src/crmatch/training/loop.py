"""The one training loop. It knows no method, no data set and no file."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from crmatch.augment.batches import BatchMaker
from crmatch.augment.policies import LearningPolicy
from crmatch.augment.views import Batch
from crmatch.distributed.sync_batch_norm import make_distributed
from crmatch.errors import DivergedError
from crmatch.methods.base import LossTerms, Method, Models, Refresh, Step
from crmatch.networks.dropout import dropout_from
from crmatch.networks.ema import MovingAverage
from crmatch.networks.low_memory import save_memory
from crmatch.networks.network import Network
from crmatch.randomness import generator
from crmatch.training.checkpoint import Checkpoint
from crmatch.training.health import ADVICE, FiniteWatch, LateDivergenceError
from crmatch.training.meter import Meter
from crmatch.training.optimizer import Optimizer
from crmatch.training.plan import TrainPlan
from crmatch.training.runtime import Runtime, compile_backbone

Curves = dict[str, Any]


@dataclass(frozen=True)
class Observers:
    """What the loop calls in addition to computing; by default nothing happens."""

    log: Callable[[Curves], None] = lambda line: None  # receives one line of curves per log point
    evaluate: Callable[[Models], Mapping[str, Any]] = lambda models: {}  # models -> errors; called every `evaluate_every` steps
    observe: Callable[[Batch, LossTerms], Mapping[str, Tensor]] = lambda batch, loss: {}  # scalars, averaged between log points
    save: Callable[[Checkpoint], None] = lambda checkpoint: None  # receives a checkpoint every `checkpoint_every` steps
    advance: Callable[[int], None] = lambda steps: None  # receives the number of finished steps after every step
    stop: Callable[[], bool] = lambda: False  # whether to save and return before the next step


@dataclass
class Training:
    """A run in progress: networks, optimizer and step counter."""

    method: Method
    network: Network
    batches: BatchMaker
    plan: TrainPlan
    total_steps: int
    steps_per_epoch: int
    runtime: Runtime
    seed: int
    step: int = 0
    images: int = 0  # images that have passed through the network in training
    seconds: float = 0.0
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.network.to(device=self.runtime.device, dtype=self.runtime.dtype).channels_last().train()
        make_distributed(self.network, self.runtime.processes)
        self.network.autocast = self.runtime.autocast
        save_memory(self.network, lean=self.runtime.lean, recompute=self.runtime.recompute)
        self.average = MovingAverage(self.network, self.plan.ema_decay, self.plan.ema_warmup)
        self.average.network.eval()
        self.models = Models(self.network, self.average.network)
        if self.runtime.compile:
            compile_backbone(self.network.backbone)
        self.optimizer = Optimizer(self.network, self.plan)
        self.scaler = torch.amp.GradScaler(self.runtime.device.type, enabled=self.runtime.autocast is torch.float16)
        self.finite = FiniteWatch(immediate=self.runtime.host_sync_is_free)
        self.network.register_forward_pre_hook(self._count_images)

    def _count_images(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.images += len(inputs[0]) if module.training else 0

    def take_step(self) -> tuple[Batch, LossTerms]:
        """One update: batch, loss, gradient, weights, moving average, policy."""
        step = Step(self.step, self.total_steps, functools.partial(generator, self.seed, step=self.step), self.plan.ema_decay)
        self._refresh(step)
        self.optimizer.learning_rate = self.learning_rate
        batch = self.batches.batch(self.step)
        with dropout_from(self.network, step.generator("dropout")):
            loss = self.method.loss(batch, self.models, step)
        total = loss.total
        torch.autograd.backward(self.scaler.scale(total))
        self.runtime.processes.average_gradients(self.network.parameters())
        # The scaler uses only `param_groups` and `step` of an optimizer.
        self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]
        gradients = [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        # fp16: scaled gradients may overflow; the scaler then skips the step and lowers its scale.
        if self.finite.bad_step(total, [] if self.scaler.is_enabled() else gradients):
            raise DivergedError(self.divergence(loss))
        self.scaler.step(self.optimizer)  # type: ignore[arg-type]
        self.scaler.update()
        self.optimizer.zero_grad()
        self.average.update(self.network, self.step)
        self.batches.learn(self.step, self._probabilities)
        self.step += 1
        return batch, loss

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.plan.learning_rate * self.plan.rate_factor(self.step, self.total_steps)

    def checkpoint(self) -> Checkpoint:
        """The state that is needed to continue as if the run had never stopped."""
        tensors = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        average = self.average.network.state_dict()
        tensors |= {f"average/{name}": tensor for name, tensor in average.items() if name not in self.average.shared}
        for index, state in self.optimizer.state.items():
            tensors |= {f"optimizer/{index}/{key}": value for key, value in state.items()}
        if isinstance(self.batches.policy, LearningPolicy):
            tensors |= {f"policy/{name}": tensor for name, tensor in self.batches.policy.state().items()}
        values = {"meter": self.meter.state(), "seconds": self.seconds, "images": self.images}
        return Checkpoint(self.step, tensors, {**values, "scaler": self.scaler.state_dict()})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the state of `checkpoint`."""
        groups: dict[str, dict[str, Tensor]] = {"network": {}, "average": {}, "optimizer": {}, "policy": {}}
        for name, tensor in checkpoint.tensors.items():
            group, _, key = name.partition("/")
            groups[group][key] = tensor
        self.network.load_state_dict(groups["network"])
        shared = {name: groups["network"][name] for name in self.average.shared}
        self.average.network.load_state_dict(groups["average"] | shared)
        state: dict[int, dict[str, Tensor]] = {}
        parameters = self.optimizer.parameters
        for name, tensor in groups["optimizer"].items():
            index, _, key = name.partition("/")
            parameter = parameters[int(index)]
            # Buffers get the memory layout of their parameter again: mixed layouts are several times slower.
            value = torch.empty_like(parameter).copy_(tensor) if tensor.shape == parameter.shape else tensor
            state.setdefault(int(index), {})[key] = value.detach()
        self.optimizer.state = state
        if isinstance(self.batches.policy, LearningPolicy):
            self.batches.policy.load_state(groups["policy"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(checkpoint.values["scaler"])
        self.meter.load_state(checkpoint.values["meter"], self.runtime.device)
        self.step, self.images = checkpoint.step, int(checkpoint.values["images"])
        self.seconds = float(checkpoint.values["seconds"])

    @torch.inference_mode()
    def _probabilities(self, images: Tensor) -> Tensor:
        logits: Tensor = self.average.network(images).logits
        return logits.softmax(dim=1)

    def _refresh(self, step: Step) -> None:
        interval = self.method.refresh_every(self.steps_per_epoch, self.total_steps)
        since = step.number - self.method.refresh_start(self.total_steps)
        if interval is None or since < 0 or since % interval:
            return

        def features(
            source: Literal["labeled", "unlabeled"], augmentation: Literal["none", "weak"] = "none"
        ) -> tuple[Tensor, Tensor]:
            self.network.eval()
            pool = self.batches.pool(source, augmentation, step.number)
            with torch.no_grad():
                parts = [(outputs.features, outputs.logits) for outputs in map(self.network, pool)]
            self.network.train()
            return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts]).softmax(dim=1)

        self.method.refresh(Refresh(self.models, step, self.batches.labels[self.batches.labeled], features))

    def check_flag(self) -> None:
        """Raise if a step since the last check was bad and could not be noticed at once (GPU)."""
        if self.finite.bad_since_last_check():
            raise LateDivergenceError(f"loss or gradient are not finite, noticed after step {self.step}.\n{ADVICE}.")

    def check_weights(self) -> None:
        """Raise if a weight is not finite, before the weights are evaluated or saved."""
        self.check_flag()
        norms = torch.stack(torch._foreach_norm([parameter.detach() for parameter in self.network.parameters()]))
        if not bool(norms.isfinite().all()):
            raise DivergedError(f"the weights are not finite after step {self.step}.\n{ADVICE}.")

    def divergence(self, loss: LossTerms) -> str:
        """The message for a loss or gradient that is not finite."""
        terms = ", ".join(f"{name} = {term.item():g}" for name, term in loss.terms.items())
        what = "gradient" if math.isfinite(loss.total.item()) else "loss"
        return f"the {what} is not finite at step {self.step}: {terms}.\n{ADVICE}."


def train(training: Training, observers: Observers) -> bool:
    """Run `training` to its end; False if `observers.stop` ended it early, after saving."""
    plan = training.plan
    started, logged_at, logged_images = time.perf_counter(), time.perf_counter(), training.images
    before = training.seconds
    while training.step < training.total_steps:
        if training.runtime.processes.any(observers.stop()):
            training.check_weights()
            observers.save(training.checkpoint())
            return False
        rate = training.learning_rate
        batch, loss = training.take_step()
        values = {f"loss/{name}": term for name, term in loss.terms.items()} | {"loss/total": loss.total}
        values |= {f"monitor/{name}": value for name, value in loss.monitors.items()}
        training.meter.add({**values, **observers.observe(batch, loss)})
        training.seconds = before + time.perf_counter() - started
        step, last = training.step, training.step == training.total_steps
        evaluates = last or step % plan.evaluate_every == 0
        if evaluates or step % plan.log_every == 0:
            line: Curves = {"step": step, "learning_rate": rate, **training.meter.means()}
            training.check_flag()
            now = time.perf_counter()
            line["images_per_second"] = (training.images - logged_images) / (now - logged_at)
            if evaluates:
                training.check_weights()
                line |= observers.evaluate(training.models)
            line["seconds"] = training.seconds
            observers.log(line)
            logged_at, logged_images = time.perf_counter(), training.images
        if last or step % plan.checkpoint_every == 0:
            training.check_weights()
            observers.save(training.checkpoint())
        observers.advance(step)
    return True
