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
from tests.cli.conftest import Place, ended

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
        assert process.poll() is None
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
