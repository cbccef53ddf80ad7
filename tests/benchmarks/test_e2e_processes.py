"""The processes of `benchmarks.e2e.compare`: what goes over the pipe, and that nobody runs unasked."""

import sys
from pathlib import Path

import pytest

from benchmarks.e2e.processes import WorkerProcess

MEGABYTE = 1 << 20


def start(loader: str = "counting", log=None, **settings) -> WorkerProcess:
    told = {"module": "tests.benchmarks.fake_provider", "loader": loader, "packages": [], "held_bytes": 0, **settings}
    return WorkerProcess(sys.executable, told, {}, log)


@pytest.fixture
def log(tmp_path):
    with (tmp_path / "log").open("w+") as file:
        yield file


def state_of(process: WorkerProcess) -> str:
    return Path(f"/proc/{process._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_decodes_a_batch_and_keeps_prints_out_of_the_pipe(log) -> None:
    worker = start(log=log)
    try:
        assert worker.notes == {"version": "1"}
        answer = worker.ask({"prompts": [[5], [7, 9]], "max_new_tokens": 4})
        assert answer["texts"] == [[6, 7, 8, 9], [10, 11, 12, 13]]
        assert answer["passes"] == 2
        assert answer["seconds"] > 0
        assert worker.ask({"prompts": [[1], [2]], "queries": [[0, 1, 2, 3]]}) == {"gaps": [2.0]}
    finally:
        worker.close()
    log.seek(0)
    assert log.read().splitlines() == ["a library prints while it loads", "and while it decodes"]


def test_tokens_per_step_leaves_out_the_prompts_token(log) -> None:
    worker = start(log=log)
    try:
        assert worker.ask({"prompts": [[0]], "max_new_tokens": 8})["tokens_per_step"] == 7 / 4
        assert worker.ask({"prompts": [[0], [0]], "max_new_tokens": 8})["tokens_per_step"] is None
    finally:
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_stands_still_until_it_is_asked(log) -> None:
    worker = start(log=log)
    try:
        assert state_of(worker) == "T"
        worker.ask({"prompts": [[1]], "max_new_tokens": 1})
        assert state_of(worker) == "T"
    finally:
        worker.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak")
def test_peak_memory_is_that_of_the_call(log) -> None:
    worker = start(log=log, held_bytes=64 * MEGABYTE)
    try:
        peak = worker.ask({"prompts": [[1]], "max_new_tokens": 1})["peak_bytes"]
    finally:
        worker.close()
    assert 63 * MEGABYTE <= peak < 80 * MEGABYTE


@pytest.mark.parametrize(
    ("loader", "message"), [("failing", "OSError: no such model$"), ("crashing", "its process has ended with 3")]
)
def test_says_why_a_provider_cannot_load(loader, message, log) -> None:
    with pytest.raises(RuntimeError, match=message):
        start(loader, log)


def test_gives_up_on_a_provider_that_loads_for_ever(log) -> None:
    told = {"module": "tests.benchmarks.fake_provider", "loader": "sleeping", "packages": []}
    with pytest.raises(RuntimeError, match=r"not done within 0\.1 s"):
        WorkerProcess(sys.executable, told, {}, log, load_s=0.1)


def test_says_that_there_is_no_such_interpreter(log) -> None:
    with pytest.raises(RuntimeError, match="nowhere/python"):
        WorkerProcess("nowhere/python", {}, {}, log)
