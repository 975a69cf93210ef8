"""`crmatch table --methods ... --settings ...`: tables of one's own, in every format."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

TABLE = ["table", "--methods", "supervised,crmatch", "--settings", "digits@4,digits@5", "--splits", "1-2"]
TINY = ["--steps", "2", "--set", "network.filters=4", "--set", "plan.unlabeled_batch_size=16"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


def test_every_format_shows_all_cells(out, crmatch):
    texts = {
        name: crmatch(*TABLE, *TINY, "--out", out / "runs", "--format", name)
        for name in ("terminal", "markdown", "latex", "csv", "json")
    }
    assert {outcome.code for outcome in texts.values()} == {0}
    cells = json.loads(texts["json"].out)["cells"]
    assert [(cell["method"], cell["setting"], cell["n"]) for cell in cells] == [
        (method, setting, 2) for method in ("supervised", "crmatch") for setting in ("digits@4", "digits@5")
    ]
    assert [cell["pseudo_labels_used"] for cell in cells] == [None, None, False, False]
    for name in ("terminal", "markdown"):
        assert "CR-Match ‡" in texts[name].out
        assert "‡ Pseudo-labels never counted" in texts[name].out
        assert "paper" not in texts[name].out
    latex = texts["latex"].out
    assert latex.startswith("% needs \\usepackage{booktabs}")
    (caption,) = [line for line in latex.splitlines() if line.startswith(r"\caption")]
    title, _, mark = caption.partition(r" $^\ddag$")
    assert len(title) < 150
    assert "no pseudo-label was ever used" in mark
    assert "% ‡ Pseudo-labels never counted" in latex
    Path(out / "table.tex").write_text(latex, encoding="utf-8")


def test_a_plus_sign_names_a_policy_or_the_confidence_rule_of_another_method(crmatch):
    table = [
        "table",
        "--methods",
        "fixmatch+ctaugment,crmatch+softmatch",
        "--settings",
        "digits@4",
        "--dry-run",
        "--format",
        "json",
    ]
    commands = [run["command"] for run in json.loads(crmatch(*table).out)["missing"]]
    assert commands == [
        "crmatch train digits@4 --method fixmatch --set augmentation.policy=ctaugment",
        "crmatch train digits@4 --set method.alignment=uniform --set method.mask=soft",
    ]
    wrong = crmatch("table", "--methods", "fixmatch+cta", "--settings", "digits@4")
    assert (wrong.code, wrong.err.splitlines()[0]) == (2, "crmatch: unknown policy or rule 'cta'.")


@pytest.mark.process
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_latex_compiles(out):
    page = r"\documentclass{article}\usepackage{booktabs}\usepackage{amssymb}\begin{document}\input{table}\end{document}"
    (out / "page.tex").write_text(page)
    subprocess.run(["pdflatex", "-halt-on-error", "page.tex"], cwd=out, check=True, capture_output=True)
    assert (out / "page.pdf").exists()


@pytest.mark.parametrize(
    "wrong",
    [[], ["--methods", "crmatch"], ["ablation", "--methods", "crmatch", "--settings", "digits@4"]],
)
def test_incomplete_requests_are_explained(wrong, crmatch):
    outcome = crmatch("table", *wrong)
    assert outcome.code == 2
    assert "--methods" in outcome.err


def test_files_that_never_existed_are_named(crmatch, tmp_path):
    outcome = crmatch("table", "--methods", "nowhere.py:X", "--settings", "digits@4", "--out", tmp_path)
    assert outcome.code == 2
    assert "nowhere.py:X" in outcome.err
