from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from taskmill.cli.compare import as_text
from taskmill.errors import ConfigurationError, RunNotFoundError
from taskmill.evaluation import evaluate
from taskmill.evaluation.compare import Comparison, compare, t_quantile
from taskmill.models.base import Request
from taskmill.models.scripted import ScriptedModel
from taskmill.records import ErrorRecord, Trace
from taskmill.store.jsonl import encode_json, encode_row
from tests.evaluate.lab import Adder, SumsTaskset, TenSumsTaskset, adder


def scored(name: str, reward: float | None, number: int = 0, **rest: Any) -> Trace:
    given = {"task": {"idx": int(name, 36), "prompt": name}} | rest
    return Trace(f"{name}-{number}", "completed", reward=reward, number=number, **given)


def run_of(path: Path, *traces: Trace, command: str = "eval") -> Path:
    path.mkdir()
    config = {"command": command, "taskset": {"name": "x"}, "model": path.name}
    (path / "run.json").write_bytes(encode_json({"format": 1, "config": config}))
    (path / "traces.jsonl").write_bytes(b"".join(map(encode_row, traces)))
    return path


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.70620), (2, 4.30265), (3, 3.18245), (10, 2.22814), (29, 2.04523), (1000, 1.96234)],
)
def test_the_quantile_is_that_of_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=1e-5)


def test_the_difference_is_paired_by_task(tmp_path: Path) -> None:
    # Differences 1, 0, 1, 0: mean 1/2, deviation sqrt(1/3), so the interval is 1/2 +- 3.18245 * sqrt(1/3) / 2.
    a = run_of(
        tmp_path / "a", *[scored(task, reward) for task, reward in zip("abcd", (0, 0, 0, 1), strict=True)]
    )
    b = run_of(
        tmp_path / "b", *[scored(task, reward) for task, reward in zip("dcba", (1, 1, 0, 1), strict=True)]
    )
    found = compare(a, b)
    assert found.reward is not None
    assert (found.reward.a, found.reward.b, found.reward.difference) == (0.25, 0.75, 0.5)
    half = 3.18245 * math.sqrt(1 / 3) / 2
    assert found.reward.low == pytest.approx(0.5 - half, abs=1e-5)
    assert found.reward.high == pytest.approx(0.5 + half, abs=1e-5)
    assert (found.wins, found.losses, found.ties) == (2, 0, 2)
    assert (found.a.model, found.b.model) == ("a", "b")
    assert found.by_prompt == 0


def test_a_task_counts_by_the_mean_of_its_rollouts(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", scored("a", 1.0), scored("a", 0.0, 1), scored("b", 1.0))
    b = run_of(tmp_path / "b", scored("a", 0.0), scored("b", 1.0), scored("b", 1.0, 1), scored("b", 1.0, 2))
    found = compare(a, b)
    assert found.reward is not None
    assert (found.reward.a, found.reward.b, found.reward.tasks) == (0.75, 0.5, 2)
    assert (found.wins, found.losses, found.ties) == (0, 1, 1)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    from taskmill.evaluation.compare import paired

    drawn = random.Random(11)
    covered = 0
    for _ in range(2000):
        found = paired((0.0, drawn.gauss(0.3, 1.0)) for _ in range(6))
        assert found is not None
        low, high = found.low, found.high
        assert low is not None
        assert high is not None
        covered += low <= 0.3 <= high
    expected = statistics.NormalDist(0.95 * 2000, math.sqrt(0.95 * 0.05 * 2000))
    assert abs(expected.zscore(covered)) < 4


def test_tasks_of_one_run_alone_are_counted_and_left_out(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", scored("a", 1.0), scored("b", 0.0), scored("c", 0.0))
    b = run_of(tmp_path / "b", scored("a", 1.0), scored("z", 0.0))
    found = compare(a, b)
    assert (found.only_a, found.only_b) == (2, 1)
    assert found.reward is not None
    assert (found.reward.tasks, found.reward.low) == (1, None)


def test_runs_with_nothing_in_common(tmp_path: Path) -> None:
    found = compare(run_of(tmp_path / "a", scored("a", 1.0)), run_of(tmp_path / "b", scored("b", 1.0)))
    assert found.reward is None
    assert (found.only_a, found.only_b, found.disagreements) == (1, 1, ())


def test_rollouts_without_a_reward_are_counted_and_left_out(tmp_path: Path) -> None:
    failed = Trace(
        "a-1", "failed", task={"idx": 10, "prompt": "a"}, errors=(ErrorRecord("RewardError", "no"),)
    )
    found = compare(
        run_of(tmp_path / "a", scored("a", 1.0), failed), run_of(tmp_path / "b", scored("a", 1.0))
    )
    assert (found.a.scored, found.a.unscored, found.b.unscored) == (1, 1, 0)
    assert found.reward is not None
    assert found.reward.a == 1.0


def test_where_they_disagree_most_comes_first(tmp_path: Path) -> None:
    names = "abcdefghijklmno"
    a = run_of(tmp_path / "a", *[scored(name, 0.0) for name in names])
    b = run_of(tmp_path / "b", *[scored(name, place / 10) for place, name in enumerate(names)])
    worst = compare(a, b).disagreements
    assert len(worst) == 10
    assert [task.b for task in worst] == [place / 10 for place in range(14, 4, -1)]
    assert (worst[0].idx, worst[0].ids_a, worst[0].ids_b) == (24, ("o-0",), ("o-0",))


def test_numbers_that_both_have_are_compared_each(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", scored("a", 1.0, rewards={"right": 1.0}, metrics={"turns": 2.0, "old": 1.0}))
    b = run_of(tmp_path / "b", scored("a", 1.0, rewards={"right": 0.0}, metrics={"turns": 5.0, "new": 1.0}))
    found = compare(a, b)
    assert found.rewards["right"].difference == -1.0
    assert list(found.metrics) == ["turns"]
    assert found.metrics["turns"].difference == 3.0
    assert (found.names_a, found.names_b) == (("metric old",), ("metric new",))
    text = as_text(found)
    assert "the runs were not scored alike: only A has metric old" in text
    assert "only B has metric new" in text


def test_tasks_that_are_alike_only_in_number_and_prompt_are_paired_too(tmp_path: Path) -> None:
    a = run_of(
        tmp_path / "a", scored("a", 1.0), scored("x1", 0.0, task={"idx": 3, "prompt": "same", "level": 1})
    )
    b = run_of(
        tmp_path / "b", scored("a", 1.0), scored("x2", 1.0, task={"idx": 3, "prompt": "same", "level": 2})
    )
    found = compare(a, b)
    assert (found.by_prompt, found.wins, found.ties, found.only_a, found.only_b) == (1, 1, 1, 0, 0)


def test_only_runs_with_rewards_can_be_compared(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", scored("a", 1.0))
    with pytest.raises(ConfigurationError, match="of another kind"):
        compare(a, run_of(tmp_path / "checked", command="validate"))
    with pytest.raises(RunNotFoundError):
        compare(a, tmp_path / "nowhere")


async def test_two_real_runs(tmp_path: Path) -> None:
    def careless(request: Request) -> str:
        prompt = request.messages[-1].content
        return "0" if prompt.startswith(("3+", "7+")) else adder(request)

    right = await evaluate(TenSumsTaskset, model=Adder(), output_dir=tmp_path)
    wrong = await evaluate(
        TenSumsTaskset, model=ScriptedModel(careless, name="careless"), output_dir=tmp_path
    )
    found: Comparison = compare(right.path, wrong.path)
    assert found.reward is not None
    assert (found.reward.difference, found.losses, found.ties) == (pytest.approx(-0.2), 2, 8)
    assert [task.idx for task in found.disagreements] == [3, 7]
    # The same tasks in another taskset are still the same tasks.
    other = await evaluate(SumsTaskset, model=Adder(), num_tasks=12, output_dir=tmp_path)
    found = compare(right.path, other.path)
    assert (found.ties, found.only_a, found.only_b) == (10, 0, 2)
