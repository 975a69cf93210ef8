"""The one training loop. It depends on no particular method, data set or file format."""

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
from crmatch.augment.ctaugment import CTAugment
from crmatch.augment.feature_batches import FeatureBatches
from crmatch.augment.views import Batch
from crmatch.distributed.sync_batch_norm import make_distributed
from crmatch.errors import DivergedError
from crmatch.methods.base import LossTerms, Method, Models, Refresh, Step
from crmatch.networks.dropout import dropout_from
from crmatch.networks.ema import MovingAverage
from crmatch.networks.network import Network
from crmatch.randomness import generator
from crmatch.training.checkpoint import Checkpoint
from crmatch.training.health import ADVICE, FiniteWatch, LateDivergenceError
from crmatch.training.meter import Meter
from crmatch.training.optimizer import Optimizer
from crmatch.training.plan import TrainPlan
from crmatch.training.runtime import Runtime, compile_backbone

LogLine = dict[str, Any]  # one line of a run's curves: name -> value


@dataclass(frozen=True)
class Observers:
    """Functions that the loop calls; each does nothing by default. Log points: every `log_every` steps, and at evaluations."""

    log: Callable[[LogLine], None] = lambda line: None  # receives one line of curves per log point
    evaluate: Callable[[int, Models], Mapping[str, Any]] = lambda step, models: {}  # -> errors; every `evaluate_every` steps
    observe: Callable[[Batch, LossTerms], Mapping[str, Tensor]] = lambda batch, loss: {}  # scalars, averaged between log points
    check: Callable[[int, Models], None] = lambda step, models: None  # called at every log point
    save: Callable[[Checkpoint], None] = lambda checkpoint: None  # receives a checkpoint every `checkpoint_every` steps
    advance: Callable[[int], None] = lambda steps: None  # receives the number of finished steps after every step
    evaluations: int = 1  # at least so many, also in a run that is shorter than `evaluate_every` allows
    stop: Callable[[], bool] = lambda: False  # called before every step; if it returns True, the loop saves and returns


@dataclass
class Training:
    """A run in progress: networks, optimizer and step counter."""

    method: Method
    network: Network
    batches: BatchMaker | FeatureBatches
    plan: TrainPlan
    total_steps: int  # the plan may give the length in epochs instead
    steps_per_epoch: int  # an epoch is a pass over the unlabeled images
    runtime: Runtime
    seed: int
    first_stage: int = 0  # steps at the beginning on labeled images alone
    step: int = 0
    images: int = 0  # that have passed through the network in training
    seconds: float = 0.0  # training time so far, earlier sessions included
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.network.to(device=self.runtime.device, dtype=self.runtime.dtype).channels_last().train()
        if self.runtime.processes.count > 1:
            make_distributed(self.network, self.runtime.processes)
        self.network.autocast = self.runtime.autocast
        self.network.save_memory(lean=self.runtime.lean, recompute=self.runtime.recompute)
        # The EMA network is copied before compiling, so it stays eager, and before the hook, so its images are not counted.
        self.ema = MovingAverage(self.network, self.plan.ema_decay, self.plan.ema_warmup)
        self.ema.network.eval()
        self.models = Models(self.network, self.ema.network)
        if self.runtime.compile:
            compile_backbone(self.network.backbone)
        self.optimizer = Optimizer(self.network, self.plan)
        self.scaler = torch.amp.GradScaler(self.runtime.device.type, enabled=self.runtime.autocast is torch.float16)
        self.divergence_watch = FiniteWatch(immediate=self.runtime.host_sync_is_free)
        self.network.register_forward_pre_hook(self._count_images)

    def _count_images(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.images += len(inputs[0]) if module.training else 0

    def take_step(self) -> tuple[Batch, LossTerms]:
        """Refresh, make the batch, compute loss and gradients, update weights, EMA and policy."""
        randomness = functools.partial(generator, self.seed, step=self.step)
        now = Step(self.step, self.total_steps, randomness, self.plan.ema_decay, self.first_stage)
        self._refresh(now)
        self.optimizer.learning_rate = self.learning_rate
        batch = self.batches.batch(self.step)
        with dropout_from(self.network, now.generator("dropout")):
            loss = self.method.loss(batch, self.models, now)
        total = loss.total
        torch.autograd.backward(self.scaler.scale(total))  # Tensor.backward, but with type annotations
        self.runtime.processes.average_gradients(self.network.parameters())
        # Our Optimizer is not torch's, but has what the scaler uses: `param_groups` and `step`.
        self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]
        gradients = [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        # fp16 gradients are not checked: they may overflow, and then the scaler skips the step and lowers its scale.
        if self.divergence_watch.bad_step(total, [] if self.scaler.is_enabled() else gradients):
            raise DivergedError(self.divergence_message(loss))
        self.scaler.step(self.optimizer)  # type: ignore[arg-type]
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update(self.network, self.step)
        self.batches.learn(self.step, self._probabilities)
        self.step += 1
        return batch, loss

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.plan.learning_rate * self.plan.rate_factor(self.step, self.total_steps, self.first_stage)

    def checkpoint(self) -> Checkpoint:
        """The state that is needed to continue as if the run had never stopped."""
        tensors = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        ema = self.ema.network.state_dict()  # without the buffers that it shares with the student
        tensors |= {f"average/{name}": tensor for name, tensor in ema.items() if name not in self.ema.shared}
        for index, state in self.optimizer.state.items():
            tensors |= {f"optimizer/{index}/{key}": value for key, value in state.items()}
        if isinstance(self.batches.policy, CTAugment):
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
        shared = {name: groups["network"][name] for name in self.ema.shared}
        self.ema.network.load_state_dict(groups["average"] | shared)
        state: dict[int, dict[str, Tensor]] = {}
        parameters = self.optimizer.parameters
        for name, tensor in groups["optimizer"].items():
            index, _, key = name.partition("/")
            parameter = parameters[int(index)]
            if tensor.ndim and tensor.shape != parameter.shape:  # one number per parameter, or one for all
                raise ValueError(f"{name} has the shape {tuple(tensor.shape)}")
            # Buffers get the memory layout of their parameter again; otherwise optimizer steps are several times slower.
            value = torch.empty_like(parameter).copy_(tensor) if tensor.shape == parameter.shape else tensor
            state.setdefault(int(index), {})[key] = value.detach()
        self.optimizer.state = state
        if isinstance(self.batches.policy, CTAugment):
            self.batches.policy.load_state(groups["policy"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(checkpoint.values["scaler"])
        self.meter.load_state(checkpoint.values["meter"], self.runtime.device)
        self.step, self.images = checkpoint.step, int(checkpoint.values["images"])
        self.seconds = float(checkpoint.values["seconds"])

    @torch.inference_mode()
    def _probabilities(self, images: Tensor) -> Tensor:
        """Predictions of the EMA network on CTAugment's probes."""
        logits: Tensor = self.ema.network(images).logits
        return logits.softmax(dim=1)

    def _refresh(self, step: Step) -> None:
        """Call the method's periodic work over all images, if it is due."""
        interval = self.method.refresh_every(self.steps_per_epoch, self.total_steps)
        since = step.number - self.method.refresh_start(step)
        is_due = interval is not None and since >= 0 and since % interval == 0
        if not is_due:
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

        self.method.refresh(
            Refresh(self.models, step, self.batches.labels[self.batches.labeled].to(self.runtime.device), features)
        )

    def raise_if_diverged(self) -> None:
        """Raise if a step since the last check was bad and could not be noticed at once (GPU)."""
        if self.divergence_watch.bad_since_last_check():
            raise LateDivergenceError(f"a loss or gradient became infinite or NaN; found after step {self.step}.\n{ADVICE}.")

    def check_weights(self) -> None:
        """Raise before weights are evaluated or saved that are not finite, or that a bad step may have changed."""
        self.raise_if_diverged()
        # The 2-norm overflows for weights so large that no pass through the network would be finite: these have diverged, too.
        norms = torch._foreach_norm([parameter.detach() for parameter in self.network.parameters()])
        if not bool(torch.stack(norms).isfinite().all()):
            raise DivergedError(f"the weights are not finite after step {self.step}.\n{ADVICE}.")

    def divergence_message(self, loss: LossTerms) -> str:
        """The message for a loss or gradient that is not finite."""
        terms = ", ".join(f"{name} = {term.item():g}" for name, term in loss.terms.items())
        what = "gradient" if math.isfinite(loss.total.item()) else "loss"
        return f"the {what} is not finite at step {self.step}: {terms}.\n{ADVICE}."


def train(training: Training, observers: Observers) -> bool:
    """Run `training` to its end; False if `observers.stop` ended it early, after saving."""
    plan = training.plan
    evaluate_every = min(plan.evaluate_every, -(-training.total_steps // observers.evaluations))
    started_at, seconds_before = time.perf_counter(), training.seconds
    logged_at, logged_images = started_at, training.images
    while training.step < training.total_steps:
        if training.runtime.processes.any(observers.stop()):
            training.check_weights()
            observers.save(training.checkpoint())
            return False
        rate = training.learning_rate  # of this step: take_step moves on to the next one
        batch, loss = training.take_step()
        values = {f"loss/{name}": term for name, term in loss.terms.items()} | {"loss/total": loss.total}
        values |= {f"monitor/{name}": value for name, value in loss.monitors.items()}
        training.meter.add({**values, **observers.observe(batch, loss)})
        # Taken before evaluation and checkpoint, whose time is added with the next step.
        training.seconds = seconds_before + time.perf_counter() - started_at
        step, is_last = training.step, training.step == training.total_steps
        evaluates = is_last or step % evaluate_every == 0
        if evaluates or step % plan.log_every == 0:
            line: LogLine = {"step": step, "learning_rate": rate, **training.meter.means()}
            training.raise_if_diverged()
            line["images_per_second"] = (training.images - logged_images) / (time.perf_counter() - logged_at)
            if evaluates:
                training.check_weights()
                line |= observers.evaluate(step, training.models)
            line["seconds"] = training.seconds
            observers.check(step, training.models)
            observers.log(line)
            logged_at, logged_images = time.perf_counter(), training.images  # images_per_second leaves out evaluation
        if is_last or step % plan.checkpoint_every == 0:
            training.check_weights()
            observers.save(training.checkpoint())
        observers.advance(step)
    return True
