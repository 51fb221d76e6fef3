"""`taskmill validate`, `debug`, `replay` and `init`, as they are called."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from taskmill.testing.endpoint import answer
from tests.batch.serving import serving
from tests.cli.conftest import PROGRAM, Place, Said, ended

TASKS = """
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from taskmill import Trace
from taskmill.tasks import Task, TaskConfig, TaskData, Taskset, TasksetConfig, reward


class SumData(TaskData):
    answer: int


class SumConfig(TaskConfig):
    bonus: float = 0.0


class SumTask(Task[SumData]):
    @reward
    def right(self, trace: Trace) -> float:
        return float(trace.messages[-1].content == str(self.data.answer)) + self.config.bonus

    def solve(self) -> str:
        return "3" if self.data.idx == 1 else str(self.data.answer)


class Config(TasksetConfig):
    task: SumConfig = SumConfig()


class SumsTaskset(Taskset[SumTask]):
    INFINITE = True
    Config = Config

    def load(self) -> Iterator[SumTask]:
        idx = 0
        while True:
            yield SumTask(SumData(idx=idx, name=f"sum-{idx}", prompt=f"{idx}+1=", answer=idx + 1), self.config.task)
            idx += 1
"""


@pytest.fixture
def sums(place: Place) -> str:
    (place.folder / "sums.py").write_text(TASKS)
    return "sums.py"


Run = Callable[..., Said]


def run_of(said: Said) -> Path:
    found = re.search(r"^run: (.+)$", said.out, re.MULTILINE)
    assert found is not None, said
    return Path(found[1])


# -- validate -------------------------------------------------------------------------------------------------


def test_validate_says_what_is_wrong_with_which_task(taskmill: Run, sums: str) -> None:
    said = taskmill("validate", sums, "-n", "3")
    assert said.code == 1
    assert said.out.splitlines()[:4] == [
        "task  name   what is wrong",
        "1     sum-1  its reference solution got 0, and 1 is needed (right 0; answer)",
        "3 tasks: 2 valid, 1 invalid, 0 missing",
        f"run: {run_of(said)}",
    ]
    assert {"validation.jsonl", "summary.json", "config.toml", "run.log"} <= {
        path.name for path in run_of(said).iterdir()
    }
    assert f"taskmill validate --resume {run_of(said)}" in said.err


def test_validate_ends_well_when_every_task_is_valid(taskmill: Run, sums: str) -> None:
    said = taskmill("validate", sums, "-n", "1")
    assert said.code == 0
    assert said.out.splitlines()[0] == "1 task: 1 valid, 0 invalid, 0 missing"


def test_validate_goes_on_where_it_was(taskmill: Run, sums: str, place: Place) -> None:
    first = taskmill("validate", sums, "-n", "3")
    file = place.folder / sums
    file.write_text(TASKS.replace('"3" if self.data.idx == 1 else ', ""))
    # In a process of its own: this one has the module as it was.
    again = place.finish("validate", "--resume", str(run_of(first)), "-n", "4", "--json")
    assert again.code == 0, again.err
    last = again.events()[-1]
    assert last["summary"]["outcomes"] == {"valid": 4, "invalid": 0, "missing": 0}
    assert sorted(event["idx"] for event in again.events() if event["event"] == "recorded") == [1, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sums.py"], "SumsTaskset is infinite - select a bounded subset with num_tasks (-n on the CLI)"),
        (["sums.py", "-n", "0"], "num_tasks=0: Input should be greater than or equal to 1"),
        (["sums.py", "-n", "1", "--model", "gpt"], "--model: 'taskmill validate' asks no model"),
        (["sums.py", "-n", "1", "--pass-rewart", "1"], "did you mean --pass-reward?"),
        (["nowhere.py", "-n", "1"], "there is no taskset file 'nowhere.py'"),
        (["--resume", "nowhere"], "there is no run in 'nowhere'"),
    ],
)
def test_validate_refuses_what_cannot_be_meant(
    taskmill: Run, sums: str, place: Place, words: list[str], message: str
) -> None:
    said = taskmill("validate", *words)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert not (place.folder / "runs").exists()


def test_an_interrupted_validation_keeps_what_it_found(place: Place) -> None:
    (place.folder / "slow.py").write_text(
        TASKS.replace(
            '        return "3" if self.data.idx == 1 else str(self.data.answer)',
            "        import time\n\n        if self.data.idx == 2:\n            time.sleep(3600)\n"
            "        return str(self.data.answer)",
        )
    )
    process = place.start("validate", "slow.py", "-n", "4", "-c", "1", "-v")
    assert process.stderr is not None
    assert any("task 1: valid" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    said = ended(process)
    assert said.code == 130
    assert "To go on" in said.err
    (folder,) = (place.folder / "runs").iterdir()
    assert len((folder / "validation.jsonl").read_text().splitlines()) == 2
    assert json.loads((folder / "summary.json").read_text())["outcomes"] == {
        "valid": 2,
        "invalid": 0,
        "missing": 2,
    }


def test_what_a_task_says_cannot_steer_the_terminal(taskmill: Run, place: Place) -> None:
    (place.folder / "evil.py").write_text(
        TASKS.replace(
            'return "3" if self.data.idx == 1 else str(self.data.answer)', r'raise ValueError("\x1b[2J")'
        )
    )
    said = taskmill("validate", "evil.py", "-n", "1", "-v")
    assert said.code == 1
    assert "\x1b" not in said.out + said.err
    assert r"\x1b[2J" in said.out


# -- replay ---------------------------------------------------------------------------------------------------


def test_replay_scores_a_run_again_beside_it(taskmill: Run, sums: str) -> None:
    with serving(answer("1")) as endpoint:
        first = taskmill("eval", sums, "-n", "2", "-m", "m", "--base-url", endpoint.url)
        assert first.code == 0, first.err
        asked = endpoint.calls
        said = taskmill("replay", str(run_of(first)), "--task.bonus", "0.25", "--json")
        assert said.code == 0, said.err
        assert endpoint.calls == asked
    last = said.events()[-1]
    assert last["summary"]["reward"]["mean"] == 0.75
    assert Path(last["path"]).parent.resolve() == run_of(first).parent.resolve()
    assert taskmill("replay", str(run_of(first))).out.splitlines()[0].startswith("total reward")


def test_a_replay_whose_tasks_are_gone_does_not_suggest_itself(
    taskmill: Run, place: Place, sums: str
) -> None:
    with serving(answer("1")) as endpoint:
        first = taskmill("eval", sums, "-n", "2", "-m", "m", "--base-url", endpoint.url)
    path = run_of(first)
    only_one = TASKS.replace("INFINITE = True", "INFINITE = False").replace("while True", "while idx < 1")
    Path(sums).write_text(only_one)
    said = place.finish("replay", str(path))
    assert said.code == 1
    assert "the taskset has no task 1 any more" in said.out
    assert f"taskmill eval --resume {path}" in said.err
    assert "taskmill replay" not in said.err
    assert f"run: {path.parent}/" in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the directory of one run"),
        (["nowhere"], "there is no run in 'nowhere'"),
        (["nowhere", "--model", "gpt"], "asks no model"),
    ],
)
def test_replay_refuses_what_cannot_be_meant(
    taskmill: Run, place: Place, words: list[str], message: str
) -> None:
    said = taskmill("replay", *words)
    assert said.code == 2
    assert message in said.err


def test_replay_refuses_a_run_without_traces(taskmill: Run, sums: str) -> None:
    said = taskmill("replay", str(run_of(taskmill("validate", sums, "-n", "1"))))
    assert said.code == 2
    assert "name a directory of `taskmill eval`" in said.err


# -- debug ----------------------------------------------------------------------------------------------------


def test_debug_shows_each_step(taskmill: Run, sums: str) -> None:
    said = taskmill("debug", sums, "--solve")
    assert said.code == 0
    lines = [re.sub(r"\d\.\d+ s", "T", line) for line in said.out.splitlines()]
    assert lines == [
        "== task 0 (SumTask), answered by reference ==",
        '  name: "sum-0"',
        "  answer: 1",
        "",
        "-- call 1: the model is sent --",
        "  user: 0+1=",
        "-- it answers (stop; 0 tokens in, 0 out, T) --",
        "  assistant: 1",
        "* reward right(trace=<trace: 2 messages, answer>) gave 1.0  [T]",
        "",
        "== completed (answer) after 1 call: reward 1 ==",
        "  reward right: 1",
    ]


def test_debug_with_a_model(taskmill: Run, sums: str) -> None:
    with serving(answer("8", reasoning="7 and one")) as endpoint:
        said = taskmill(
            "debug", sums, "--idx", "7", "-m", "m", "--base-url", endpoint.url, "--sampling.seed", "1"
        )
    assert said.code == 0, said.err
    assert "  reasoning: 7 and one" in said.out
    assert "reward 1 ==" in said.out
    assert "  sampling: seed=" in said.out


def test_debug_with_given_answers(taskmill: Run, sums: str) -> None:
    said = taskmill("debug", sums, "-n", "2", "--answer", "1", "--json")
    assert said.code == 0
    assert [event["reward"] for event in said.events() if event["event"] == "ended"] == [1.0, 0.0]
    assert [event["idx"] for event in said.events() if event["event"] == "task"] == [0, 1]


def test_debug_with_somebody_typing(place: Place, sums: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, "debug", sums, "--type"],
        cwd=place.folder,
        input="1\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert "reward 1 ==" in process.stdout


def test_an_answer_in_the_debugger_cannot_steer_the_terminal_or_look_like_a_step(
    taskmill: Run, sums: str
) -> None:
    said = taskmill("debug", sums, "--answer", "\x1b[2J\n== completed (answer): reward 1 ==")
    assert "\x1b" not in said.out
    assert r"    \x1b[2J" in said.out
    assert "    == completed (answer): reward 1 ==" in said.out.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--solve", "--answer", "1"], "one of --solve and --answer can answer, not both"),
        (["--answer"], "--answer needs a value"),
        (["--idx", "x"], "--idx x: the number of a task is needed, from 0"),
        (["-n", "0", "--solve"], "num_tasks=0: Input should be greater than or equal to 1"),
    ],
)
def test_debug_refuses_what_cannot_be_meant(taskmill: Run, sums: str, words: list[str], message: str) -> None:
    said = taskmill("debug", sums, *words)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_debug_says_that_a_task_is_not_there(taskmill: Run, place: Place) -> None:
    (place.folder / "few.py").write_text(
        TASKS.replace("INFINITE = True", "").replace("while True", "while idx < 2")
    )
    said = taskmill("debug", "few.py", "--idx", "5", "--solve")
    assert said.code == 2
    assert "has no task 5" in said.err


# -- init -----------------------------------------------------------------------------------------------------


def test_init_writes_a_taskset_that_is_valid_and_its_test_that_passes(place: Place) -> None:
    said = place.finish("init", "my-words", "--dir", "new/tasks")
    assert said.code == 0, said.err
    assert "taskmill validate new/tasks/my_words.py -n 3" in said.out
    file = place.folder / "new" / "tasks" / "my_words.py"
    assert len(file.read_text().splitlines()) <= 32
    assert place.finish("validate", "new/tasks/my_words.py").code == 0
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(file.parent)],
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout


@pytest.mark.parametrize("there", ["words.py", "test_words.py"])
def test_init_overwrites_nothing(taskmill: Run, place: Place, there: str) -> None:
    (place.folder / there).write_text("mine")
    said = taskmill("init", "words")
    assert said.code == 2
    assert f"{there!r} is there already" in said.err
    assert [path.name for path in place.folder.iterdir()] == [there]
    assert (place.folder / there).read_text() == "mine"


@pytest.mark.parametrize("name", ["1st", "a b", "class", "random", "taskmill", "../up", ""])
def test_init_refuses_names_that_no_module_can_have(taskmill: Run, place: Place, name: str) -> None:
    said = taskmill("init", name)
    assert said.code == 2
    assert repr(name) in said.err
    assert list(place.folder.iterdir()) == []


@pytest.mark.parametrize("command", ["validate", "debug", "replay"])
def test_help_tells_every_option(taskmill: Run, command: str) -> None:
    said = taskmill(command, "--help")
    assert said.code == 0
    assert said.out.startswith(f"Usage: taskmill {command} ")
