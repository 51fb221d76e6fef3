"""What holds for every taskset that comes along."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import ConfigurationError, TasksetError
from taskmill.tasks.registry import BUILT_IN, find_taskset
from taskmill.tasks.taskset import Taskset
from tests.tasks.reference import solved, untouched

MODULES = {"reasoning_gym": "reasoning_gym", "textarena": "textarena", "wordle": "textarena"}


def _param(name: str) -> Any:
    there = importlib.util.find_spec(MODULES.get(name, "taskmill")) is not None
    return pytest.param(
        name, marks=pytest.mark.skipif(not there, reason="the extra 'games' is not installed")
    )


ALL = [_param(name) for name in BUILT_IN]
INFINITE = [_param(name) for name in BUILT_IN if name not in ("gsm8k", "jsonl", "reverse_text")]


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Makes a taskset of a name, with what it can't do without."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {n}", "answer": f"{n}"}) + "\n" for n in range(40)))
    needed = {"jsonl": {"path": str(file)}, "gsm8k": {"source": "sample"}}
    return lambda name, **fields: find_taskset(name)(**{**needed.get(name, {}), **fields})


@pytest.mark.parametrize("name", ALL)
async def test_the_reference_solution_has_all_of_the_reward_and_silence_less(name: str, made: Any) -> None:
    for task in made(name).select(12):
        best, nothing = await solved(task), await untouched(task)
        assert (best.state, best.reward, best.errors) == ("completed", 1.0, ()), task.data
        assert nothing.errors == ()
        assert nothing.reward is not None
        assert nothing.reward < 1.0


@pytest.mark.parametrize("name", ALL)
def test_no_more_tasks_are_built_than_taken(name: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taskset = made(name)
    built = []
    load = taskset.load

    def counted() -> Iterator[Any]:
        for task in load():
            built.append(task)
            yield task

    monkeypatch.setattr(taskset, "load", counted)
    tasks = taskset.select(7)
    assert built == tasks
    assert [task.data.idx for task in tasks] == list(range(7))


@pytest.mark.parametrize("name", ALL)
async def test_the_generators_of_the_process_are_left_alone(name: str, made: Any) -> None:
    numpy = pytest.importorskip("numpy")
    random.seed(5)
    numpy.random.seed(5)
    before, words = random.getstate(), numpy.random.get_state()[1].tolist()
    for task in made(name).select(3):
        await solved(task)
    assert random.getstate() == before
    assert numpy.random.get_state()[1].tolist() == words


@pytest.mark.parametrize("name", INFINITE)
def test_endless_ones_have_no_size_in_their_configuration(name: str, made: Any) -> None:
    taskset = made(name)
    assert taskset.INFINITE
    with pytest.raises(ValueError, match="is infinite - select a bounded subset with num_tasks"):
        taskset.select()
    with pytest.raises(ConfigurationError, match="unknown field 'num_tasks'"):
        made(name, num_tasks=10)


_FIRST = """
import hashlib, itertools, json, sys
from taskmill.tasks.registry import find_taskset
found = {}
for name, count, fields in json.loads(sys.argv[1]):
    digest = hashlib.sha256()
    place = -1
    for place, task in enumerate(itertools.islice(find_taskset(name)(**fields).load(), count)):
        digest.update(json.dumps(task.data.fields(), sort_keys=True).encode())
    found[f"{name} {fields}"] = [place + 1, digest.hexdigest()]
print(json.dumps(found))
"""


def test_two_processes_have_the_same_first_tasks(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {n}", "answer": n}) + "\n" for n in range(10_000)))
    wanted = [
        ("alphabet_sort", 10_000, {}),
        ("color_codeword", 10_000, {}),
        ("gsm8k", 10_000, {"source": "sample"}),
        ("jsonl", 10_000, {"path": str(file)}),
        ("reverse_text", 10_000, {}),
    ]
    if importlib.util.find_spec("textarena"):
        wanted += [("textarena", 10_000, {}), ("wordle", 10_000, {}), ("textarena", 40, {"game": "2048-v0"})]
    if importlib.util.find_spec("reasoning_gym"):
        wanted += [("reasoning_gym", 10_000, {}), ("reasoning_gym", 20, {"generator": "pool_matrix"})]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _FIRST, json.dumps(wanted)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (json.loads(process.communicate()[0]) for process in running)
    assert one == other
    counts = {key: count for key, (count, _) in one.items()}
    assert counts["alphabet_sort {}"] == 10_000
    assert counts["reverse_text {}"] == 200
    assert counts["gsm8k {'source': 'sample'}"] == 32
    assert len(counts) == len(wanted)


@pytest.mark.parametrize(
    ("name", "package"),
    [("textarena", "textarena"), ("wordle", "textarena"), ("reasoning_gym", "reasoning_gym")],
)
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(name: str, package: str) -> None:
    # In a process of its own, where nothing of it was imported before.
    script = f"""
import sys
sys.modules[{package!r}] = None
from taskmill.tasks.registry import find_taskset
find_taskset({name!r})().select(1)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert last == (
        f"taskmill.errors.TasksetError: taskset {name!r} needs the package {package!r}, which is not installed; "
        "get it with: pip install 'taskmill[games]'"
    )


def test_finding_them_imports_no_package_of_an_extra() -> None:
    script = """
import sys
from taskmill.tasks.registry import BUILT_IN, find_taskset
for name in BUILT_IN:
    find_taskset(name)
heavy = {"textarena", "reasoning_gym", "datasets", "numpy", "nltk"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_each_is_what_its_name_says() -> None:
    for name in BUILT_IN:
        kind: type[Taskset[Any]] = find_taskset(name)
        assert kind.name == name
    with pytest.raises(TasksetError, match="did you mean 'wordle'"):
        find_taskset("wordel")
