"""run(spec) -> RunRecord: train one run in its directory, resume it (resume.py), or return its finished record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from pydantic import TypeAdapter
from torch import Tensor

import crmatch
from crmatch.atomic_files import checksum, read_json, remove_leftovers, write_file, write_json
from crmatch.augment.ctaugment import CTAugment
from crmatch.data.images import DataSet
from crmatch.data.splits import Split, describe_split, keep_split
from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from crmatch.errors import DataError, DivergedError, RequestError, StoppedError
from crmatch.evaluation import measure
from crmatch.losses import sharpen
from crmatch.networks.config import AnyNetwork, NetworkConfig, PretrainedConfig
from crmatch.runs.calibration import Calibration, Predictions, calibrate
from crmatch.runs.cost import check_memory, free_bytes
from crmatch.runs.directory import CurveFile, RunDirectory, run_directory
from crmatch.runs.experiment import Experiment, Progress, load_run_data
from crmatch.runs.model_card import model_card
from crmatch.runs.record import CrossValidation, Errors, RunRecord
from crmatch.runs.resume import checkpoint_values, finished_record, locate_divergence, restore
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import head_of, labels_checksum
from crmatch.spec.run_spec import NUMERICS, RunSpec
from crmatch.training.checkpoint import Checkpoint, save_checkpoint
from crmatch.training.execution import Execution
from crmatch.training.loop import LogLine, Training, train
from crmatch.training.runtime import Runtime, choose_runtime, describe_machine

FEWEST_EVALUATIONS = 4
"""A curve needs a few points, also if `--steps` makes a run shorter than the rhythm of its recipe."""


def run(
    spec: RunSpec,
    workspace: Workspace | Path | str = "runs",
    execution: Execution = Execution(),
    *,
    resume: Literal["auto", "never"] = "auto",
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> RunRecord:
    """Train `spec` and return its record; a stopped run is resumed, and the record of a finished one is returned at once.

    Args:
        spec: what to train.
        workspace: where runs and data are kept; a path is the directory of the runs. This run is kept in
            `<out>/<setting>/<method>[-<variant>]/split<k>-seed<s>/`.
        execution: device, compiled or not, recomputing or not.
        resume: `auto` resumes an unfinished run; `never` refuses to.
        progress: is told about steps and curves.
        stop: called before every step; if it returns True, the run is saved and `StoppedError` is raised.
        processes: the processes that share the run; each calls this function, and the main one writes.
    """
    workspace = workspace if isinstance(workspace, Workspace) else Workspace.at(workspace)
    setting = workspace.setting_of(spec)  # once: for a folder it looks at every picture
    directory = run_directory(workspace.out, spec, setting, workspace.name)
    if (finished := finished_record(directory, spec, resume)) is not None:
        return finished
    runtime = choose_runtime(execution, spec.precision, processes)
    # The main process returns from main_first when all others have called it: by then all have looked into the directory.
    data, split = processes.main_first(lambda: load_run_data(spec, setting, workspace.data_dir))
    if spec.data.labels_checksum not in (None, labels_checksum(setting)):
        raise RequestError(f"the labels of {setting.name} are no longer those of this run.\nRun the command again.")
    free = torch.cuda.mem_get_info(runtime.device)[0] if runtime.device.type == "cuda" else free_bytes()
    check_memory(spec, setting, free, runtime.activations)
    experiment = make_experiment(spec, data, split, runtime, workspace, execution, progress, stop)
    with directory.locked() if processes.is_main else nullcontext():
        # Another command may have finished the run while this one loaded its data.
        finished = finished_record(directory, spec, resume) if processes.is_main else None
        if processes.any(finished is not None) and (finished := directory.read_record()) is not None:
            return finished
        return _train(experiment, directory, progress, stop)


def make_experiment(
    spec: RunSpec,
    data: DataSet,
    split: Split,
    runtime: Runtime,
    workspace: Workspace,
    execution: Execution,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> Experiment:
    """The experiment of a spec. A pretrained backbone is frozen (`head`), or starts from the head that is trained first."""
    initial = starting_weights(spec, data.train.class_names)
    if not isinstance(spec.network, PretrainedConfig):
        return Experiment(spec, data, split, runtime, initial)
    if spec.network.train == "head":
        from crmatch.runs.features import HeadExperiment

        report = progress.features if progress else None
        return runtime.processes.main_first(lambda: HeadExperiment(spec, data, split, runtime, workspace.features, report))
    if initial is not None:
        return Experiment(spec, data, split, runtime, initial)
    head, workspace = head_of(spec, workspace.setting_of(spec)), workspace.named(None)
    if (
        progress and not workspace.run_directory(head).record.exists()
    ):  # its features are worth a progress bar, its steps are not
        make_experiment(head, data, split, runtime, workspace, execution, progress, stop)
    run(head, workspace, execution, stop=stop, processes=runtime.processes)
    # The others wait until rank 0 has written the head's model.
    initial = runtime.processes.main_first(lambda: safetensors.torch.load_file(workspace.run_directory(head).model))
    return Experiment(spec, data, split, runtime, initial)


def starting_weights(spec: RunSpec, class_names: Sequence[str]) -> dict[str, Tensor] | None:
    """Backbone and classifier of the run that `spec` starts from; without the classifier if that run had other classes."""
    if spec.start_from is None:
        return None
    path, _, expected = spec.start_from.rpartition("#")
    directory = RunDirectory(Path(path))
    content = directory.model.read_bytes() if directory.model.is_file() else b""
    if checksum(content)[:8] != expected:
        raise DataError(f"the model in {path} is gone or not the one to start from.\nRestore it, or train without --from.")
    try:
        config = read_json(directory.model_config)
        network, names = TypeAdapter[AnyNetwork](NetworkConfig).validate_python(config["network"]), config["class_names"]
        weights = safetensors.torch.load(content)
        if not {"classifier.weight", "classifier.bias"} <= weights.keys():
            raise ValueError("no classifier")
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise DataError(f"the model in {path} is damaged.\nRestore it, or train without --from.") from error
    if getattr(network, "backbone", network) != getattr(spec.network, "backbone", spec.network):
        raise RequestError(f"{path} has another network than this run.\nLeave out --from, or what changes the network.")
    kept = ("backbone.", "classifier.") if names == list(class_names) else ("backbone.",)
    return {name: tensor for name, tensor in weights.items() if name.startswith(kept)}


def _train(experiment: Experiment, directory: RunDirectory, progress: Progress | None, stop: Callable[[], bool]) -> RunRecord:
    spec, training, processes = experiment.spec, experiment.training(), experiment.runtime.processes
    rule = "folder" if spec.data.folder else spec.data.split_rule
    split = describe_split(experiment.split, experiment.data.train, spec.setting, spec.split, rule)
    if processes.is_main:
        for place in (directory.path, directory.checkpoints):
            remove_leftovers(place)
    if not restore(training, directory, split["data_fingerprint"]) and processes.is_main:
        keep_split(directory.split, split)
        write_json(directory.spec, spec.to_json())
    curves = CurveFile(directory, training.step, processes.is_main)

    def log(line: LogLine) -> None:
        curves.append(line)
        if progress:
            progress.log(line)

    def save(state: Checkpoint) -> None:
        if processes.is_main:
            values = {**state.values, **checkpoint_values(training)}
            save_checkpoint(directory.checkpoints, state._replace(values=values))

    if progress:
        progress.start(training.step, training.total_steps)
    advance = progress.advance if progress else lambda steps: None
    evaluations = FEWEST_EVALUATIONS if spec.headline == "last" else 1  # more would change a median over the last ones
    try:
        finished = train(training, experiment.observers(log, save=save, advance=advance, stop=stop, evaluations=evaluations))
    except DivergedError as error:
        raise locate_divergence(error, experiment.training, directory, training.step) from error
    if not finished:
        reached = f"stopped after step {training.step} of {training.total_steps}"
        raise StoppedError(f"{reached}; everything is saved in {directory.path}.\nResume with the same command.")
    tested, held_out = experiment.test_predictions(experiment.evaluated(training.models)), _held_out(experiment)
    calibration = calibrate(tested, held_out)
    record = _record(experiment, training, curves.lines, calibration, tested, held_out)
    if processes.is_main:
        weights, config = experiment.deployed(training.models, record.error)
        config["calibration"] = calibration.model_dump(mode="json") if calibration else None
        write_file(directory.model, weights)
        write_json(directory.model_config, config)
        write_file(directory.card, model_card(record, config, calibration).encode())
        write_json(directory.record, record.model_dump(mode="json"))  # last: it marks the run as finished
    return record


def _held_out(experiment: Experiment) -> Predictions | None:
    """Predictions of held-out labels: by cross-validation where that takes seconds, on frozen features."""
    if not isinstance(experiment.spec.network, PretrainedConfig) or experiment.runtime.processes.count > 1:
        return None
    from crmatch.runs.cross_validation import cross_validate
    from crmatch.runs.features import HeadExperiment

    return cross_validate(experiment) if isinstance(experiment, HeadExperiment) else None


def _record(
    experiment: Experiment,
    training: Training,
    lines: list[LogLine],
    calibration: Calibration | None,
    tested: Predictions | None,
    held_out: Predictions | None,
) -> RunRecord:
    if not lines:
        raise DataError("the curves (metrics.jsonl) of this run are gone.\nRemove its directory to start it again.")
    data, spec = experiment.data, experiment.spec
    quality = measure(sharpen(tested[0], calibration.temperature), tested[1]) if tested and calibration else None
    curve = {name: [line[f"error/{name}"] for line in lines if f"error/{name}" in line] for name in ("ema", "raw")}
    policy = training.batches.policy
    shares = [line["mask_rate"] for line in lines if "mask_rate" in line]
    return RunRecord(
        spec=spec,
        numerics=NUMERICS,
        crmatch_version=crmatch.__version__,
        evaluated=spec.method.evaluated,
        ema=Errors.from_curve(curve["ema"]) if curve["ema"] else None,
        raw=Errors.from_curve(curve["raw"]) if curve["raw"] else None,
        per_class_error=quality.per_class if quality else [],
        confusion=quality.confusion if quality else [],
        calibration_error=quality.calibration_error if quality else None,
        class_names=list(data.train.class_names),
        labeled_images=len(experiment.split.labeled),
        unlabeled_images=len(experiment.split.unlabeled),
        test_images=len(data.test) if data.test else 0,
        data_fingerprint=data.train.fingerprint,
        steps=training.step,
        images_seen=training.images,
        seconds=round(training.seconds, 3),
        machine=describe_machine(experiment.runtime),
        final=lines[-1],
        pseudo_labels_used=any(shares) if shares else None,
        cross_validation=held_out
        and CrossValidation(error=100 * float((held_out[0].argmax(1) != held_out[1]).double().mean()), labels=len(held_out[1])),
        policy=policy.rates() if isinstance(policy, CTAugment) else None,
    )
