"""Ctrl-C, really pressed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any

import psutil
import pytest

from taskmill.testing.endpoint import answer, call, rate_limited, refusal
from tests.batch.mill import prompts_of
from tests.batch.serving import LONGEST, serving
from tests.cli.conftest import PROGRAM, Place, ended

MESSAGE = "interrupted: taking no more rows"


def first_line_with(process: subprocess.Popen[str], text: str) -> None:
    """Wait for a line on standard error."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said")


class Held:
    """Answers the first calls at once and holds the rest until the end."""

    def __init__(self, answered: int, step: Any = None) -> None:
        self.reached = threading.Event()
        self._left = answered
        self._step = step or answer("late", latency=3600)

    def __call__(self, body: dict[str, Any]) -> Any:
        if self._left:
            self._left -= 1
            return answer("fine", reasoning="hm")
        self.reached.set()
        return self._step


def test_the_first_ctrl_c_says_what_it_does_and_leaves_a_run_that_resumes(place: Place) -> None:
    place.prompts(*[str(number) for number in range(12)])
    script = Held(5)
    with serving(script) as endpoint:
        arguments = ["batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "-b", "3", "-c", "2"]
        process = place.start(*arguments)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGINT)
        first_line_with(process, MESSAGE)
        said = ended(process)

        assert said.code == 130
        assert "7 rows are left. To go on:" in said.err
        assert "5/12 done, 2 cancelled, 5 completed, 7 left, 5 calls, " in said.err
        command = said.err.strip().splitlines()[-1].strip()
        assert command == f"taskmill {' '.join(arguments)} --resume"
        assert "Traceback" not in said.err
        stored = place.run()
        assert len(stored.rows) == 5
        assert {row["state"] for row in stored.outcomes} == {"cancelled"}
        assert endpoint.calls <= 7, "no row was taken after it"

    with serving(lambda body: answer("fine", reasoning="hm")) as endpoint:
        arguments[5] = endpoint.url
        resumed = place.finish(*arguments, "--resume")
    assert resumed.code == 0
    assert endpoint.calls == 7
    assert sorted(map(int, prompts_of(place.run().trajectories))) == list(range(12))


def test_status_after_ctrl_c_says_that_finished_calls_are_kept(place: Place) -> None:
    place.prompts("a", "b")
    under_way = threading.Semaphore(0)

    def slow(body: dict[str, Any]) -> Any:
        if len(body["messages"]) == 1:
            return answer("", calls=[call("todo", {})], reasoning="hm")
        under_way.release()
        return answer("late", latency=3600)

    with serving(slow) as endpoint:
        process = place.start("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "-b", "1")
        for _ in range(2):
            assert under_way.acquire(timeout=LONGEST)
        process.send_signal(signal.SIGINT)
        ended(process)
    told = place.finish("status", "data/p")

    assert "rows       2 planned: 2 cancelled" in told.out
    assert "kept       2 finished calls are kept and will not be paid for again" in told.out
    assert "in flight" not in told.out


def test_ctrl_c_while_a_call_waits_to_be_tried_again_ends_the_waiting(place: Place) -> None:
    place.prompts("a", "b")
    for step in (rate_limited(retry_after=60), refusal(503, headers={"Retry-After": "60"})):
        script = Held(0, step)
        with serving(script) as endpoint:
            process = place.start("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "--resume")
            assert script.reached.wait(LONGEST)
            process.send_signal(signal.SIGINT)
            said = ended(process)

        assert said.code == 130
        assert MESSAGE in said.err
        assert endpoint.calls <= 2
        assert {row["state"] for row in place.run().outcomes} == {"cancelled"}


STUCK = """
import asyncio, sys
from taskmill.batch.run import BatchRun
from taskmill.cli import main

async def stuck(self, outcome):
    await asyncio.sleep(3600)

BatchRun._end = stuck
sys.exit(main())
"""


def test_the_first_ctrl_c_is_answered_at_once_and_the_second_leaves_at_once(place: Place) -> None:
    """Even where the first one would wait for an hour before the run has ended."""
    place.prompts("a")
    script = Held(0)
    with serving(script) as endpoint:
        arguments = ["batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url]
        process = place.start(*arguments, program=STUCK)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGINT)
        first_line_with(process, MESSAGE)
        first_line_with(process, "waiting for what is under way to stop")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = ended(process)

    assert said.code == 130


SLOW_TO_LEAVE = """
import sys, time
from taskmill.cli import main

class Model:
    def __del__(self):
        time.sleep(3600)

sys.model = Model()
sys.exit(main())
"""
STUCK_AT_EXIT = """
import atexit, sys, time
from taskmill.cli import main

atexit.register(time.sleep, 3600)
sys.exit(main())
"""


def test_after_ctrl_c_nothing_waits_for_a_model_in_the_process_to_finish_its_answers(place: Place) -> None:
    place.prompts("a")
    script = Held(0)
    with serving(script) as endpoint:
        arguments = ["batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url]
        process = place.start(*arguments, program=SLOW_TO_LEAVE)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGINT)
        said = ended(process)
    assert said.code == 130
    assert "0/1 done, 1 cancelled, 1 left, in " in said.err


def test_what_takes_long_after_ctrl_c_is_told_and_a_second_one_leaves_at_once(place: Place) -> None:
    place.prompts("a")
    script = Held(0)
    with serving(script) as endpoint:
        arguments = ["batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url]
        process = place.start(*arguments, program=STUCK_AT_EXIT)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGINT)
        first_line_with(process, "waiting for the model to stop")
        process.send_signal(signal.SIGINT)
        said = ended(process)
    assert said.code == 130


def test_a_command_that_is_killed_leaves_no_process_behind(place: Place) -> None:
    place.prompts("a")
    mark = f"1000.{os.getpid()}{int(time.time() * 1000) % 10**6}"

    def script(body: dict[str, Any]) -> Any:
        command = f"setsid sleep {mark} & sleep {mark}"
        return answer("", calls=[call("terminal", {"command": command})], reasoning="hm")

    with serving(script) as endpoint:
        arguments = ["--model", "m", "--base-url", endpoint.url, "-d", "minimal"]
        process = place.start("batch", "p.jsonl", *arguments)
        while len(running(mark)) < 2:
            time.sleep(0.02)
        process.kill()
        ended(process)

    psutil.wait_procs(running(mark), timeout=10)
    assert running(mark) == []


def test_sigterm_ends_a_run_as_ctrl_c_does(place: Place) -> None:
    place.prompts("a")
    script = Held(0)
    with serving(script) as endpoint:
        process = place.start("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGTERM)
        said = ended(process)
    assert said.code == 128 + signal.SIGTERM
    assert "--resume" in said.err


def test_a_terminal_that_is_closed_ends_a_run_as_ctrl_c_does(place: Place) -> None:
    """It sends more than one signal, and none of them cuts short what the first one began."""
    place.prompts("a")
    script = Held(0)
    with serving(script) as endpoint:
        process = place.start("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
        assert script.reached.wait(LONGEST)
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        said = ended(process)
    assert said.code == 128 + signal.SIGHUP
    assert "--resume" in said.err
    assert [row["state"] for row in place.run().outcomes] == ["cancelled"]


NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


def test_a_run_under_nohup_goes_on_when_the_terminal_is_closed(place: Place) -> None:
    place.prompts("a", "b")
    reached, go_on = threading.Event(), threading.Event()

    def script(body: dict[str, Any]) -> Any:
        reached.set()
        assert go_on.wait(LONGEST)
        return answer("fine", reasoning="hm")

    with serving(script) as endpoint:
        arguments = ["batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url]
        process = place.start(*arguments, program=NOHUP + PROGRAM)
        assert reached.wait(LONGEST)
        process.send_signal(signal.SIGHUP)
        go_on.set()
        said = ended(process)
    assert said.code == 0
    assert place.run().outcome_counts() == {"completed": 2}


INTERRUPTED_WHILE_READING = """
import os, signal, sys
import taskmill.batch.runner as runner
from taskmill.cli import main

def index_rows(*_, **__):
    os.kill(os.getpid(), signal.{name})
    yield None

runner.index_rows = index_rows
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_interrupted_while_nothing_usable_was_found_the_exit_code_is_that_of_the_signal(
    place: Place, name: str, code: int
) -> None:
    place.prompts(b"no row")
    program = INTERRUPTED_WHILE_READING.format(name=name)
    process = place.start(
        "batch", "p.jsonl", "--model", "m", "--base-url", "http://localhost:1", program=program
    )
    said = ended(process)
    assert said.code == code
    assert "Traceback" not in said.err


def test_ctrl_c_leaves_no_process_behind(place: Place) -> None:
    place.prompts("a", "b")
    mark = f"1000.{os.getpid()}{int(time.time() * 1000) % 10**6}"

    def script(body: dict[str, Any]) -> Any:
        command = f"setsid sleep {mark} & sleep {mark}"
        return answer("", calls=[call("terminal", {"command": command})], reasoning="hm")

    with serving(script) as endpoint:
        process = place.start(
            "batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "-d", "minimal", "-b", "1"
        )
        while len(running(mark)) < 4:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said = ended(process)

    assert said.code == 130
    psutil.wait_procs(running(mark), timeout=10)
    assert running(mark) == []
    assert not (place.run().path / "workspaces").exists()


def test_interrupted_with_json_events_the_last_event_says_how_to_go_on(place: Place) -> None:
    place.prompts("a")
    script = Held(0)
    with serving(script) as endpoint:
        arguments = ["batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "--json"]
        process = place.start(*arguments)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGINT)
        said = ended(process)
    last = said.events()[-1]
    assert (said.code, last["event"], last["exit"]) == (130, "ended", 130)
    assert last["resume"] == f"taskmill {' '.join(arguments)} --resume"
    assert last["states"] == {"cancelled": 1}


@pytest.mark.parametrize("rows", [200_000])
def test_ctrl_c_while_a_large_dataset_is_read_is_answered_too(place: Place, rows: int) -> None:
    (place.folder / "p.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(rows)))
    with serving(Held(0)) as endpoint:
        process = place.start("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
        first_line_with(process, "model: m at")
        process.send_signal(signal.SIGINT)
        said = ended(process)
    assert said.code == 130
    assert said.err.strip().endswith("--resume")
    assert "Traceback" not in said.err


def running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        dead = process.info["status"] == psutil.STATUS_ZOMBIE
        if not dead and mark in (process.info["cmdline"] or []):
            found.append(process)
    return found
