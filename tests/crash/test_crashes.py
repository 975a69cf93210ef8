"""The crash suite in short; `make crash-test` runs it in full and writes docs/results/survival.md."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from crashes import Forks, Lab

from finished import result_of

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Forks() as forks:
        yield Lab(forks, tmp_path_factory.mktemp("crashes"), seed=1)


def test_ten_kills_at_random_moments_lose_at_most_an_interval_and_nothing_of_the_result(lab: Lab) -> None:
    kills = 0
    methods = iter(["crmatch", "plcb", "flexmatch", "remixmatch"] * 5)
    while kills < 10:
        kills += len(lab.kill_until_done(next(methods), min(4, 10 - kills)))


@pytest.mark.parametrize("method", ["label_propagation", "mean_teacher"])
def test_five_resumes_at_random_steps_equal_the_run_that_was_never_stopped(lab: Lab, method: str) -> None:
    assert len(lab.resume(method, 5)) == 5


def test_the_second_process_on_a_run_is_refused_and_the_first_goes_on(lab: Lab) -> None:
    expected, _ = lab.straight("crmatch")
    spec, workspace = lab.spec("crmatch"), lab.workspace()
    directory = workspace.run_directory(spec)
    first = lab.forks.begin(spec, workspace)
    for _ in range(1000):
        if directory.metrics.exists() and directory.metrics.stat().st_size:
            break
        time.sleep(0.01)
    assert lab.forks.finish(spec, workspace) == 4
    assert lab.forks.wait(first) == 0
    assert result_of(directory) == expected
