"""The commands as a user types them: answers, exit codes, at most two lines for a wrong request."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scipy.stats import binomtest

from conftest import Command, Outcome, tiny_command, write_packed
from crmatch import __version__
from crmatch.cli.display import describe_error
from crmatch.cli.help import EXAMPLES, OPTION_PANELS
from crmatch.runs.finished import find_run
from crmatch.runs.record import describe_interval


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["figure", "curves", "--help"]])
def test_help_answers_in_half_a_second_without_torch(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = {['crmatch', *arguments]!r}\nfrom crmatch.cli.app import main\n"
    heavy = {"torch"} if len(arguments) > 1 else {"torch", "pydantic"}  # for a command's own options Typer imports pydantic
    code += f"try: main()\nexcept SystemExit as stop: assert not stop.code\nassert not {heavy} & set(sys.modules)"

    def processor_seconds(program: str) -> tuple[float, str]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, answer.stdout

    helps = [processor_seconds(code) for _ in range(3)]
    assert "train" in helps[0][1].lower()
    # Importing typer takes 0.12 s where help takes 0.3 to 0.5. If that is slower, too, the machine is used by others.
    typer_alone = min(processor_seconds("import typer.main, rich.console")[0] for _ in range(3))
    assert min(seconds for seconds, _ in helps) < 0.5 * max(1, typer_alone / 0.12)


def test_help_shows_panels_and_examples_and_no_type_beside_flags(crmatch: Command) -> None:
    for name, examples in EXAMPLES.items():
        said = crmatch(*([name] if name != "crmatch" else []), "--help").out
        assert all(example in said for example in examples)
        assert "<bool>" not in said
    for panel in OPTION_PANELS:
        assert f"─ {panel} ─" in said


@pytest.mark.process
def test_the_shell_completes_commands() -> None:
    program = Path(sys.executable).with_name("crmatch")
    environment = {**os.environ, "_CRMATCH_COMPLETE": "complete_bash", "COMP_WORDS": "crmatch ev", "COMP_CWORD": "1"}
    answer = subprocess.run([program], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.split() == ["evaluate"]


@pytest.mark.process
def test_the_first_training_step_comes_within_six_seconds(tmp_path: Path) -> None:
    seconds = []
    for number in range(2):
        out = tmp_path / str(number)
        command = [sys.executable, "-m", "crmatch", "train", "digits@4", "--set=plan.log_every=1", f"--out={out}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not any(file.stat().st_size for file in out.rglob("metrics.jsonl")):
                assert process.poll() is None
                time.sleep(0.01)
            times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            process.kill()
        seconds.append((int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"))
    assert min(seconds) < 6  # processor time, as above


def test_train_ends_with_error_and_directory_and_writes_everything(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    outcome = crmatch(*tiny_command(stripes, tmp_path / "runs"))
    assert outcome.code == 0
    assert "CR-Match on stripes@2, split 1, 6 labels: test error" in outcome.out
    directory = Path(outcome.out.partition("Saved in ")[2].splitlines()[0])
    names = {"spec.json", "split.json", "metrics.jsonl", "record.json", "model.safetensors", "config.json", "checkpoint"}
    assert names <= {file.name for file in directory.iterdir()}
    assert directory.parent.parent == tmp_path / "runs" / "stripes@2"
    assert "step 5 of 20: loss" in outcome.err
    assert "20 steps of 42 images, about" in outcome.err, "the cost is said before the first step"


def test_the_record_says_everything_about_the_run(finished: Path) -> None:
    record, split = (json.loads((finished / name).read_text()) for name in ("record.json", "split.json"))
    assert record["spec"]["setting"] == "stripes@2"
    assert set(record["ema"]) == set(record["raw"]) == {"last", "median_last_20", "best_on_test"}
    assert (record["labeled_images"], record["unlabeled_images"], record["test_images"]) == (6, 30, 18)
    assert (record["steps"], record["images_seen"]) == (20, 20 * (6 + 12 + 12 + 3 * 4))
    machine = record["machine"]
    assert machine["versions"]["torch"]
    assert (machine["threads"], machine["device"]) == (1, "cpu")
    assert "commit" in machine
    assert len(record["per_class_error"]) == 3
    assert record["class_names"] == ["stripe 0", "stripe 1", "stripe 2"]
    assert len(split["labeled"]) == 6
    assert split["data_fingerprint"] == record["data_fingerprint"]


def test_the_curves_hold_terms_masks_errors_and_speed(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    keys = {"loss/supervised", "loss/pseudo_label", "loss/feature_distance", "loss/rotation", "loss/total", "monitor/cosine"}
    keys |= {"mask_rate", "pseudo_label_error", "contributing_error", "images_per_second", "learning_rate", "seconds"}
    assert all(keys <= line.keys() for line in lines)
    assert {"error/ema", "error/raw"} <= lines[-1].keys()


def test_the_same_command_again_returns_the_finished_record_at_once(crmatch: Command, finished: Path, stripes: Path) -> None:
    before = (finished / "record.json").read_bytes()
    outcome = crmatch(*tiny_command(stripes, finished.parents[2]), "--json")
    assert json.loads(outcome.out)["run"] == str(finished)
    assert (finished / "record.json").read_bytes() == before
    assert outcome.err == ""


def test_the_baseline_is_trained_on_the_same_labels_and_compared(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    answer = json.loads(crmatch(*tiny_command(stripes, tmp_path), "--baseline", "--json").out)
    assert [part["spec"]["method"]["name"] for part in (answer, answer["baseline"])] == ["crmatch", "supervised"]
    assert answer["baseline"]["spec"]["plan"]["steps"] == 20
    one, two = (json.loads(path.read_text())["labeled"] for path in tmp_path.rglob("split.json"))
    assert one == two
    assert find_run(tmp_path / "latest") == Path(answer["run"])  # not the baseline
    said = crmatch(*tiny_command(stripes, tmp_path), "--baseline").out
    assert "Supervised only on stripes@2, split 1, 6 labels: test error" in said
    assert "Using the 30 unlabeled images" in said


def test_an_error_comes_with_its_interval_and_the_accuracy() -> None:
    assert describe_error(3.8, 500) == "3.80 % (95 % interval 2.4–5.9 %), accuracy 96.20 %"
    for wrong, images in ((0, 4), (1, 1), (37, 100), (2640, 10_000), (300, 300)):
        low, high = binomtest(wrong, images).proportion_ci(method="wilson")
        assert describe_interval(100 * wrong / images, images) == f"95 % interval {100 * low:.1f}–{100 * high:.1f} %"


def test_evaluate_repeats_the_records_error(crmatch: Command, finished: Path, stripes: Path) -> None:
    record = json.loads((finished / "record.json").read_text())
    outcome = crmatch("evaluate", finished, "--data-dir", stripes, "--json")
    assert outcome.code == 0, outcome.err
    answer = json.loads(outcome.out)
    assert answer["error"] == record["ema"]["last"]
    assert answer["confusion"] == record["confusion"]
    assert "stripe 1" in crmatch("evaluate", finished, "--data-dir", stripes).out


def test_show_methods_lists_each_with_its_paper(crmatch: Command) -> None:
    rows = json.loads(crmatch("show", "methods", "--json").out)["rows"]
    assert {"crmatch", "fixmatch", "supervised"} <= {row["name"] for row in rows}
    assert all(row["summary"] and row["paper"] for row in rows)
    assert "arXiv 2112.05825" in crmatch("show", "methods").out


def test_show_settings_lists_packed_sets_too(crmatch: Command, stripes: Path) -> None:
    rows = json.loads(crmatch("show", "settings", "--data-dir", stripes, "--json").out)["rows"]
    assert {"cifar10", "digits", "stripes"} <= {row["data set"] for row in rows}


def test_show_config_prints_every_key_and_diffs_two_recipes(crmatch: Command) -> None:
    assert "method.threshold" in crmatch("show", "config", "cifar10@4").out
    spec = json.loads(crmatch("show", "config", "cifar10@4", "--set", "method.threshold=0.9", "--json").out)
    assert spec["method"]["threshold"] == 0.9
    difference = crmatch("show", "config", "cifar10@4", "--recipe", "paper", "--diff", "usb").out
    assert "method.rotation_source" in difference
    assert "method.threshold" not in difference
    assert "are the same" in crmatch("show", "config", "cifar10@4", "--diff", "paper").out


def test_config_files_are_read_before_set(crmatch: Command, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"method": {"threshold": 0.8, "clamp": False}, "plan.steps": 12}))
    arguments = ["show", "config", "digits@4", "--config", file, "--set", "method.threshold=0.7", "--json"]
    spec = json.loads(crmatch(*arguments).out)
    assert (spec["method"]["threshold"], spec["method"]["clamp"], spec["plan"]["steps"]) == (0.7, False, 12)


WRONG: list[tuple[list[str], int, str]] = [
    (["train", "digts@4"], 2, "Did you mean 'digits'?"),
    (["train", "digits"], 2, "Write DATASET@LABELS_PER_CLASS"),
    (["train", "digits@4", "--method", "fixmach"], 2, "Did you mean 'fixmatch'?"),
    (["train", "digits@4", "--recipe", "papr"], 2, "Did you mean 'paper'?"),
    (["train", "digits@4", "--set", "method.treshold=0.9"], 2, "Did you mean 'method.threshold'?"),
    (["train", "digits@4", "--set", "method.threshold=high"], 2, "method.threshold: input should be a valid number"),
    (["train", "digits@4", "--set", "nonsense"], 2, "has no '='"),
    (["train", "digits@4", "--steps", "0"], 2, "plan.steps"),
    (["train", "digits@4", "--steps", "few"], 2, "--steps"),
    (["train", "digits@4", "--split", "0"], 2, "split"),
    (["train", "digits@4", "--config", "/nowhere.json"], 2, "No such file"),
    (["train", "digits@4", "--stpes", "3"], 2, "--steps"),
    (["train", "digits@4", "--device", "tpu"], 2, "device"),
    (["train", "digits@4", "--image-size", "4"], 2, "data.image_size"),
    (["train", "digits@400"], 2, "Use at most"),
    (["train", "digits@4", "--set", "data.mean=[0.1,0.2]"], 2, "Give one value, or 1"),
    (["train"], 2, "SETTING"),
    (["trian"], 2, "trian"),
    (["show", "config", "digits@4", "--diff", "ubs"], 2, "Did you mean 'usb'?"),
    (["show", "config", "digits@4", "--set", "recipe=paper"], 2, "cannot be changed"),
    (["show", "config", "digits@4", "--set", "setting=../../elsewhere"], 2, "cannot be changed"),
    (["train", "cifar10@4"], 3, "crmatch data fetch cifar10"),
    (["train", "broken@4"], 3, "cannot be read as a packed set"),
    (["evaluate", "/nowhere"], 3, "there is no directory /nowhere"),
    (["train", ""], 2, "is not a setting"),
    (["train", "a" * 5000], 2, "is not a setting"),
    (["train", "digits@" + "9" * 5000], 2, "is not a setting"),
    (["train", "digits@4", "--set", "augmentation.padding=16"], 2, "augmentation.padding"),
    (["train", "digits@4", "--set", "plan.unlabeled_batch_size=1000000000000"], 2, "plan.unlabeled_batch_size"),
    (["train", "digits@4", "--set", "network.filters=1000000"], 2, "network.filters"),
    (["train", "digits@4", "--set", "plan.steps=null", "--set", "plan.unlabeled_epochs=1e308"], 2, "unlabeled_epochs"),
    (["train", "digits@4", "--set", "plan.decay_rule=decoupled"], 2, "decay_rule"),
    (["data", "split", "."], 3, ""),
    (["data", "fetch", "cifr10"], 2, "Did you mean 'cifar10'?"),
    (["data", "fetch", "mini_imagenet"], 2, ""),
    (["data", "check", "cifar10"], 3, ""),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"), WRONG, ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else ""
)
def test_wrong_requests_get_two_plain_lines_and_their_exit_code(
    crmatch: Command, tmp_path: Path, arguments: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 this is not a packed set")
    (tmp_path / "labeled" / "a").mkdir(parents=True)
    outcome = crmatch(*arguments)
    assert outcome.code == code
    assert message in outcome.err
    assert 1 <= len(outcome.err.strip().splitlines()) <= 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "runs").exists()


def test_more_than_a_day_of_training_starts_only_if_it_was_asked_for(
    crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(tmp_path / "cifar10.npz", classes=10, side=32)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("crmatch.cli.session.run", lambda *arguments, **options: pytest.fail("it started"))
    arguments = ["train", "cifar10@4", "--data-dir", tmp_path, "--out", tmp_path / "runs"]
    outcome = crmatch(*arguments)
    assert outcome.code == 2
    assert "about 237 days with 2 threads" in outcome.err
    assert "--recipe quick (about" in outcome.err
    assert "--minutes 10" in crmatch("train", "digits@4", "--steps", 10**8).err
    for wanted in (["--recipe", "paper"], ["--yes"], ["--recipe", "quick"], ["--steps", 9]):
        with pytest.raises(pytest.fail.Exception, match="it started"):
            crmatch(*arguments, *wanted)


def test_a_directory_of_another_spec_is_left_alone(crmatch: Command, finished: Path, stripes: Path) -> None:
    spec = json.loads((finished / "spec.json").read_text())
    spec["method"]["threshold"] = 0.5
    (finished / "spec.json").write_text(json.dumps(spec))
    before = {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()}
    outcome = crmatch(*tiny_command(stripes, finished.parents[2]))
    assert outcome.code == 2
    assert "method.threshold is 0.5 there, 0.95 here" in outcome.err
    assert {file: file.read_bytes() for file in finished.rglob("*") if file.is_file()} == before


def test_resume_never_refuses_what_is_there(crmatch: Command, finished: Path, stripes: Path) -> None:
    outcome = crmatch(*tiny_command(stripes, finished.parents[2]), "--resume", "never")
    assert outcome.code == 2
    assert "--resume never" in outcome.err


def test_changed_data_is_noticed_before_a_run_continues(crmatch: Command, finished: Path, stripes: Path) -> None:
    (finished / "record.json").unlink()
    write_packed(stripes / "stripes.npz", per_class=13)
    outcome = crmatch(*tiny_command(stripes, finished.parents[2]))
    assert outcome.code == 3
    assert "changed since the run began" in outcome.err


def test_an_output_directory_below_a_file_is_a_data_error(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    outcome = crmatch(*tiny_command(stripes, tmp_path / "file" / "runs"))
    assert outcome.code == 3
    assert "Choose a directory you may write to" in outcome.err
    assert (tmp_path / "file").read_text() == "precious"


def test_seed_and_split_may_come_from_set_and_options_come_before_it(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    outcome = crmatch(*tiny_command(stripes, tmp_path), "--set=seed=5", "--set=split=2", "--seed", "4", "--json")
    assert Path(json.loads(outcome.out)["run"]).name == "split2-seed5"


def test_a_spec_file_of_a_run_is_a_config_file(crmatch: Command, finished: Path, stripes: Path) -> None:
    outcome = crmatch("show", "config", "stripes@2", "--data-dir", stripes, "--config", finished / "spec.json", "--json")
    assert json.loads(outcome.out) == json.loads((finished / "spec.json").read_text())


DAMAGE: list[tuple[str, bytes | None, int]] = [
    ("spec.json", b"{}", 3),
    ("spec.json", b"[]", 3),
    ("spec.json", b"{", 3),
    ("spec.json", None, 4),
    ("split.json", b"[]", 3),
    ("split.json", b"{}", 3),
    ("metrics.jsonl", None, 3),
    ("metrics.jsonl", b'[1]\n{"step": 20}\n', 3),
    ("metrics.jsonl", b'{"a": 1}\n{"step": 20}\n', 3),
    ("checkpoint", b"damaged", 4),
]


@pytest.mark.parametrize(("name", "content", "code"), DAMAGE)
def test_damaged_files_of_an_unfinished_run_are_named_in_two_lines(
    crmatch: Command, finished: Path, stripes: Path, name: str, content: bytes | None, code: int
) -> None:
    (finished / "record.json").unlink()
    for file in [finished / name] if name != "checkpoint" else (finished / name).iterdir():
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
    outcome = crmatch(*tiny_command(stripes, finished.parents[2]), "--json")
    assert outcome.code == code, outcome.err
    assert len(outcome.err.rpartition("crmatch: ")[2].splitlines()) <= 2


WRONG_CONFIG: list[dict[str, object]] = [
    {"std": [0, 0, 0]}, {"mean": [0.5]}, {"image_size": 10**9}, {"image_size": 0}, {"channels": 0}, {"network": {"kind": "x"}},
]  # fmt: skip


def test_a_damaged_model_or_changed_data_is_a_data_error(crmatch: Command, finished: Path, stripes: Path) -> None:
    def message() -> str:
        outcome = crmatch("evaluate", finished, "--data-dir", stripes)
        assert outcome.code == 3
        assert len(outcome.err.strip().splitlines()) <= 2
        return outcome.err

    config, weights = finished / "config.json", finished / "model.safetensors"
    whole, content = config.read_text(), weights.read_bytes()
    for change in WRONG_CONFIG:
        config.write_text(json.dumps({**json.loads(whole), **change}))
        message()
    config.write_text(whole)
    weights.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    message()
    weights.write_bytes(content)
    write_packed(stripes / "stripes.npz", per_class=13)
    assert "changed since it was trained" in message()


@pytest.mark.parametrize(("steps", "rate", "message"), [(20, 1e12, "is not finite at step"), (1, 1e38, "after step 1")])
def test_divergence_ends_with_code_5_and_saves_no_such_weights(
    crmatch: Command, stripes: Path, tmp_path: Path, steps: int, rate: float, message: str
) -> None:
    outcome = crmatch(*tiny_command(stripes, tmp_path), "--set", f"plan.learning_rate={rate}", "--set", f"plan.steps={steps}")
    assert outcome.code == 5
    assert message in outcome.err
    assert len([line for line in outcome.err.splitlines() if line.startswith("crmatch:")]) == 1
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_directory_named_like_a_setting_does_not_hide_it(
    crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits@4").mkdir()
    assert crmatch("show", "config", "digits@4").code == 0


def test_no_arguments_show_the_help_and_nothing_else(crmatch: Command) -> None:
    outcome = crmatch()
    assert "train" in outcome.out
    assert outcome.err == ""
    assert crmatch("--version") == Outcome(0, f"crmatch {__version__}\n", "")
