"""Selecting tasks: how many are built, in which order, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import ConfigurationError, TasksetError
from taskmill.store.jsonl import content_hash
from taskmill.tasks import Task, TaskConfig, TaskData, Taskset, TasksetConfig, find_taskset, reward
from taskmill.tasks.task import AnyTaskData, read_data


class Counted(Taskset[Task[TaskData]]):
    """Five tasks by a generator; `built` is how many were made."""

    built = 0

    def load(self) -> Iterable[Task[TaskData]]:
        for idx in range(5):
            self.built += 1
            yield Task(TaskData(idx=idx, prompt=str(idx)))


class CountedList(Counted):
    def load(self) -> list[Task[TaskData]]:
        return list(super().load())


class Endless(Counted):
    INFINITE = True

    def load(self) -> Iterator[Task[TaskData]]:
        idx = 0
        while True:
            self.built += 1
            yield Task(TaskData(idx=idx, prompt=str(idx)))
            idx += 1


def numbers(tasks: Iterable[Task[Any]]) -> list[int]:
    return [task.data.idx for task in tasks]


@pytest.mark.parametrize(("kind", "built"), [(CountedList, 5), (Counted, 3), (Endless, 3)])
def test_selecting_builds_what_it_takes(kind: type[Counted], built: int) -> None:
    taskset = kind()
    assert numbers(taskset.select(3)) == [0, 1, 2]
    assert taskset.built == built


def test_the_iterator_builds_each_task_as_it_is_asked_for() -> None:
    taskset = Endless()
    tasks = taskset.draw(1_000_000)
    assert taskset.built == 0
    assert next(tasks).data.idx == 0
    assert taskset.built == 1
    assert tasks.total == 1_000_000


def test_all_of_a_finite_taskset_is_taken_without_a_number() -> None:
    assert numbers(Counted().select()) == numbers(CountedList().select(99)) == [0, 1, 2, 3, 4]
    assert Counted().draw().total is None
    assert CountedList().draw().total == 5
    assert CountedList().draw(3).total == 3


def test_an_infinite_one_needs_a_number_and_says_so_at_once() -> None:
    taskset = Endless()
    for choose in (taskset.select, taskset.draw):
        with pytest.raises(ValueError) as caught:
            choose()
        assert str(caught.value) == (
            "Endless is infinite - select a bounded subset with num_tasks (-n on the CLI)"
        )
    assert taskset.built == 0


@pytest.mark.parametrize("number", [0, -1, -5])
@pytest.mark.parametrize("kind", [Counted, Endless])
def test_fewer_than_one_task_is_an_error_of_configuration(kind: type[Counted], number: int) -> None:
    with pytest.raises(ConfigurationError, match=r"num_tasks.*Input should be greater than or equal to 1"):
        kind().select(number)


def test_a_shuffle_is_the_same_for_the_same_seed_and_keeps_the_ids() -> None:
    taskset = Counted()
    first = numbers(taskset.select(3, shuffle=True, seed=7))
    assert first == numbers(taskset.select(3, shuffle=True, seed=7))
    assert sorted(numbers(taskset.select(shuffle=True, seed=7))) == [0, 1, 2, 3, 4]
    assert first == numbers(taskset.select(5, shuffle=True, seed=7))[:3]
    assert len({tuple(numbers(taskset.select(5, shuffle=True, seed=seed))) for seed in range(9)}) > 1


def test_a_shuffle_of_an_infinite_one_is_no_shuffle_and_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="shuffle is a no-op on an infinite taskset"):
        assert numbers(Endless().select(3, shuffle=True)) == [0, 1, 2]


def test_selecting_leaves_the_global_generator_alone() -> None:
    before = random.getstate()
    Counted().select(3, shuffle=True, seed=1)
    assert random.getstate() == before


class Falling(Counted):
    def load(self) -> Iterator[Task[TaskData]]:
        yield Task(TaskData(idx=3, prompt=""))
        yield Task(TaskData(idx=3, prompt=""))


class Raising(Counted):
    def load(self) -> Iterator[Task[TaskData]]:
        yield Task(TaskData(idx=0, prompt=""))
        raise RuntimeError("no more")


class Refusing(Counted):
    def load(self) -> list[Task[TaskData]]:
        raise OSError("not there")


class Needy(Counted):
    def load(self) -> list[Task[TaskData]]:
        import a_package_nobody_has  # type: ignore[import-not-found]  # noqa: F401

        return []


class Strings(Counted):
    def load(self) -> list[Any]:
        return ["a prompt"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Falling, "taskset 'falling': task 1 has idx 3 after idx 3; they must rise"),
        (Raising, "taskset 'raising' failed at its task 1: RuntimeError: no more"),
        (Refusing, "taskset 'refusing' failed at its task 0: OSError: not there"),
        (Needy, "taskset 'needy' needs the package 'a_package_nobody_has', which is not installed"),
        (Strings, "taskset 'strings' gave a str as its task 0, not a Task: 'a prompt'"),
    ],
)
def test_a_taskset_that_goes_wrong_says_where(kind: type[Counted], message: str) -> None:
    with pytest.raises(TasksetError) as caught:
        kind().select()
    assert str(caught.value) == message


# -- configuration --------------------------------------------------------------------------------------------


class DicedConfig(TasksetConfig):
    min_turns: int = 1
    sides: int = 6


class DicedTaskset(Counted):
    Config = DicedConfig


def test_a_configuration_is_checked_and_named() -> None:
    assert DicedTaskset(sides=8).config.sides == 8  # type: ignore[attr-defined]
    assert (
        DicedTaskset({"task": {"judges": {"tone": {"rubric": "polite"}}}}).config.task.judges["tone"].weight
        == 1
    )
    with pytest.raises(ConfigurationError) as caught:
        DicedTaskset(min_turn=1)
    assert str(caught.value) == "taskset 'diced': unknown field 'min_turn'; did you mean 'min_turns'?"
    with pytest.raises(ConfigurationError, match=r"unknown field 'task\.juges'; did you mean 'task\.judges'"):
        DicedTaskset(task={"juges": {}})
    with pytest.raises(ConfigurationError, match="sides='many': Input should be a valid integer"):
        DicedTaskset(sides="many")


def test_a_taskset_is_named_after_its_class() -> None:
    assert (DicedTaskset.name, Endless.name, Counted.name) == ("diced", "endless", "counted")


# -- data -----------------------------------------------------------------------------------------------------


class Worded(TaskData):
    answer: str
    hints: tuple[str, ...] = ()


def test_a_reader_without_the_class_reads_every_field() -> None:
    data = Worded(idx=3, prompt="?", answer="yes", hints=("a",))
    stored = data.fields()
    assert stored == {"idx": 3, "prompt": "?", "answer": "yes", "hints": ["a"]}
    read = read_data(stored)
    assert isinstance(read, AnyTaskData)
    assert (read.idx, read.prompt, read.answer, read.hints) == (3, "?", "yes", ["a"])  # type: ignore[attr-defined]
    assert read_data(stored, Worded) == data


def test_data_is_frozen_and_checked() -> None:
    data = Worded(idx=0, answer="x")
    with pytest.raises(ValueError):
        data.answer = "y"
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        TaskData(idx=-1)
    with pytest.raises(ValueError, match="Extra inputs"):
        TaskData(idx=0, promt="x")  # type: ignore[call-arg]
    with pytest.raises(ValueError):
        TaskData(idx=0, timeouts={"scoring": float("nan")})  # type: ignore[arg-type]


# -- finding --------------------------------------------------------------------------------------------------

FILE = """
from taskmill.tasks import Task, TaskData, Taskset

class {name}Taskset(Taskset):
    def load(self):
        return [Task(TaskData(idx=0, prompt="hello"))]
"""


def test_a_taskset_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(name="Mine"))
    assert find_taskset(str(file))().select()[0].data.prompt == "hello"
    assert find_taskset(f"{file}:MineTaskset").name == "mine"
    with pytest.raises(TasksetError, match="'OtherTaskset' is no class of tasksets"):
        find_taskset(f"{file}:OtherTaskset")
    file = tmp_path / "two.py"
    file.write_text(FILE.format(name="Mine") + FILE.format(name="Yours"))
    with pytest.raises(TasksetError, match="there are MineTaskset, YoursTaskset; add ':MineTaskset'"):
        find_taskset(str(file))


def test_a_taskset_is_found_in_a_module() -> None:
    found = find_taskset("tests.tasks.test_taskset:DicedTaskset")
    assert found.__name__ == "DicedTaskset"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("revers_text", "there is no taskset 'revers_text'; did you mean 'reverse_text'"),
        ("no/such/file.py", "there is no taskset file 'no/such/file.py'"),
        ("nothing.of:Kind", "there is no taskset 'nothing.of:Kind'"),
    ],
)
def test_an_unknown_taskset_is_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(TasksetError, match=message):
        find_taskset(name)


def test_a_missing_package_is_no_unknown_taskset(tmp_path: Path) -> None:
    file = tmp_path / "needy.py"
    file.write_text("import a_package_nobody_has.parts\n")
    with pytest.raises(TasksetError) as caught:
        find_taskset(str(file))
    assert str(caught.value) == (
        f"taskset {str(file)!r} needs the package 'a_package_nobody_has', which is not installed"
    )
    file.write_text("1 / 0")
    with pytest.raises(TasksetError, match="can't be imported: ZeroDivisionError"):
        find_taskset(str(file))


def test_the_hash_of_a_task_is_the_same_in_every_process() -> None:
    program = (
        "from tests.tasks.test_taskset import Worded; from taskmill.store.jsonl import content_hash; "
        "print(content_hash(Worded(idx=1, prompt='é', answer='b').fields()).hex())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == content_hash(Worded(idx=1, prompt="é", answer="b").fields()).hex()


def test_one_task_object_serves_all_rollouts_with_the_config_of_its_taskset() -> None:
    class Plain(Task[TaskData]):
        @reward
        def one(self) -> float:
            return 1.0

    assert Plain(TaskData(idx=0)).config == TaskConfig()
    judges = {"judges": {"tone": {"rubric": "polite"}}}
    for task in Counted(task=judges).select(2):
        assert list(task.config.judges) == ["tone"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Counted().select(1, shuffle=True, seed=0)
