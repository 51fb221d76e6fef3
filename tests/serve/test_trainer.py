"""The worked example of a trainer's loop."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from taskmill.records import CallRecord, Trace

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trainer.py"


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trainer_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trainer_example"] = module
    spec.loader.exec_module(module)
    return module


def test_it_runs_and_has_something_to_learn_from() -> None:
    command = [
        sys.executable,
        str(EXAMPLE),
        "--steps",
        "2",
        "--tasks",
        "2",
        "--group-size",
        "6",
        "--workers",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    for step in steps:
        assert (step["rollouts"], step["failed"]) == (12, 0)
        assert 0 < step["reward"] < 1
        assert step["samples"] == step["with_logprobs"] > 0
        assert step["tokens"] >= step["samples"]


def test_advantages_are_how_much_better_than_the_group(trainer: Any) -> None:
    assert trainer.advantages([1.0, 0.0, 1.0, 0.0]) == pytest.approx([1, -1, 1, -1], abs=1e-4)
    assert trainer.advantages([0.5, 0.5]) == [0.0, 0.0]


def test_a_group_without_differences_or_with_failures_teaches_only_what_it_can(trainer: Any) -> None:
    def trace(reward: float | None) -> Trace:
        state = "failed" if reward is None else "completed"
        return Trace("t", state, reward=reward, calls=(CallRecord(token_ids=(1,), logprobs=(-0.5,)),))  # type: ignore[arg-type]

    assert list(trainer.samples([trace(1.0), trace(1.0)])) == []
    assert list(trainer.samples([trace(1.0), trace(None)])) == []
    learnt = list(trainer.samples([trace(1.0), trace(None), trace(0.0)]))
    assert [round(sample.advantage) for sample in learnt] == [1, -1]
    assert {sample.logprobs for sample in learnt} == {(-0.5,)}
