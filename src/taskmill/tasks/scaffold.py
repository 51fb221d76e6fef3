"""A small taskset to begin with, and its test."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from taskmill.errors import ConfigurationError
from taskmill.store.files import create, make_directory

_TASKSET = '''\
"""{module}: a taskset to begin with. Its tasks are words to be written backwards."""

from collections.abc import Iterator

from taskmill import Trace
from taskmill.tasks import Task, TaskData, Taskset, reward

WORDS = ["maple", "river", "stone", "cloud", "ember"]


class {kind}Data(TaskData):
    answer: str


class {kind}Task(Task[{kind}Data]):
    @reward
    def correct(self, trace: Trace) -> float:
        return float(trace.messages[-1].content.strip() == self.data.answer)

    def solve(self) -> str:
        return self.data.answer


class {kind}Taskset(Taskset[{kind}Task]):
    """Words to be written backwards."""

    def load(self) -> Iterator[{kind}Task]:
        for idx, word in enumerate(WORDS):
            prompt = f"Write {{word!r}} backwards. Answer with the word alone."
            yield {kind}Task({kind}Data(idx=idx, prompt=prompt, answer=word[::-1]))
'''

_TEST = '''\
"""Tests of the taskset in {module}.py, which run without a model."""

import asyncio
from pathlib import Path

from taskmill.evaluation import evaluate, validate
from taskmill.testing import ScriptedModel

from {module} import {kind}Taskset


def test_each_reference_solution_passes_and_doing_nothing_does_not(tmp_path: Path) -> None:
    result = asyncio.run(validate({kind}Taskset, output_dir=tmp_path))
    assert [check.reasons for check in result.failures()] == []


def test_a_wrong_answer_gets_nothing(tmp_path: Path) -> None:
    model = ScriptedModel(lambda request: "wrong")
    result = asyncio.run(evaluate({kind}Taskset, model=model, output_dir=tmp_path))
    assert result.reward == 0.0
'''


def write_taskset(name: str, folder: Path) -> list[Path]:
    """Write a taskset called `name` and its test into `folder`, which is made where it is missing.

    Gives the two files. Nothing is overwritten. Raises `ConfigurationError` for a name that no module can have, and
    where one of the files is there already.
    """
    module = name.replace("-", "_")
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", module) is None or keyword.iskeyword(module):
        raise ConfigurationError(
            f"{name!r} can't be the name of a module: take letters, digits and underscores"
        )
    if module in sys.stdlib_module_names or module == "taskmill":
        raise ConfigurationError(f"{name!r} is the name of a module that would be hidden by it: take another")
    kind = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    files = {
        folder / f"{module}.py": _TASKSET.format(kind=kind, module=module),
        folder / f"test_{module}.py": _TEST.format(kind=kind, module=module),
    }
    for path in files:
        if path.exists() or path.is_symlink():
            raise ConfigurationError(
                f"{str(path)!r} is there already, and nothing is overwritten: take another name"
            )
    make_directory(folder)
    for path, text in files.items():
        try:
            create(path, text.encode())
        except FileExistsError:
            raise ConfigurationError(f"{str(path)!r} has just been made by somebody else") from None
    return list(files)
