from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from taskmill.evaluation.summary import ClusteredMean, PlainMean, pass_at_k, summarize, summary_table
from taskmill.records import CallRecord, ErrorRecord, Judgement, Timing, Trace, Usage
from taskmill.store.jsonl import encode_row
from taskmill.store.run import RunDirectory


def rolled(
    task: str, number: int, reward: float | None = None, state: str = "completed", **rest: Any
) -> Trace:
    return Trace(f"{task}-{number}", state, number=number, reward=reward, **rest)  # type: ignore[arg-type]


def failed(task: str, number: int, *errors: ErrorRecord) -> Trace:
    return rolled(task, number, None, "failed", errors=errors, stop_reason="error")


def written(path: Path, traces: Iterable[Trace], attempts: Iterable[Trace] = ()) -> RunDirectory:
    (path / "traces.jsonl").write_bytes(b"".join(map(encode_row, traces)))
    (path / "attempts.jsonl").write_bytes(b"".join(map(encode_row, attempts)))
    return RunDirectory(path)


def summed(path: Path, traces: list[Trace], attempts: Iterable[Trace] = (), **options: Any) -> dict[str, Any]:
    asked = {"planned": len(traces), "num_rollouts": 1, "pass_reward": 1.0} | options
    return summarize(written(path, traces, attempts), **asked)


def test_the_error_of_one_rollout_a_task_is_the_ordinary_one(tmp_path: Path) -> None:
    rewards = [0.0, 1.0, 1.0, 0.5, 0.25]
    told = summed(tmp_path, [rolled(f"t{i}", 0, reward) for i, reward in enumerate(rewards)])
    assert told["reward"]["mean"] == pytest.approx(0.55)
    assert told["reward"]["stderr"] == pytest.approx(statistics.stdev(rewards) / 5**0.5)
    assert told["reward"]["scored"] == 5
    assert told["tasks"] == 5


def test_the_error_is_clustered_by_task_where_tasks_have_several_rollouts(tmp_path: Path) -> None:
    # Task a gave 1 and 0, task b 1 and 1: deviations from 3/4 sum to -1/2 and 1/2, so sqrt(2/1 * 1/2) / 4 = 1/4.
    told = summed(
        tmp_path,
        [rolled("a", 0, 1.0), rolled("b", 0, 1.0), rolled("b", 1, 1.0), rolled("a", 1, 0.0)],
        num_rollouts=2,
    )
    assert told["reward"]["mean"] == pytest.approx(0.75)
    assert told["reward"]["stderr"] == pytest.approx(0.25)
    assert told["tasks"] == 2


def test_clusters_of_unequal_size(tmp_path: Path) -> None:
    # Task a gave 1, task b 0 and 0: deviations from 1/3 sum to 2/3 and -2/3, so sqrt(2/1 * 8/9) / 3 = 4/9.
    told = summed(tmp_path, [rolled("a", 0, 1.0), rolled("b", 0, 0.0), rolled("b", 1, 0.0)], num_rollouts=2)
    assert told["reward"]["mean"] == pytest.approx(1 / 3)
    assert told["reward"]["stderr"] == pytest.approx(4 / 9)


def test_both_means_agree_at_one_value_a_task() -> None:
    drawn = random.Random(3)
    plain, clustered = PlainMean(), ClusteredMean()
    for task in range(200):
        value = 1e6 + drawn.random()
        plain.add(value, task)
        clustered.add(value, task)
    assert plain.result()["mean"] == pytest.approx(clustered.result()["mean"], rel=1e-12)
    assert plain.result()["stderr"] == pytest.approx(clustered.result()["stderr"], rel=1e-6)


@pytest.mark.parametrize("num_rollouts", [1, 2])
def test_too_little_to_tell_an_error_from(tmp_path: Path, num_rollouts: int) -> None:
    told = summed(tmp_path, [rolled("a", 0, 1.0)], num_rollouts=num_rollouts)
    assert told["reward"]["mean"] == 1.0
    assert told["reward"]["stderr"] is None
    told = summed(tmp_path, [], num_rollouts=num_rollouts)
    assert told["reward"]["mean"] is None
    assert "none" in summary_table(told)


def test_pass_at_k_is_the_unbiased_estimate(tmp_path: Path) -> None:
    # Of 4 rollouts 2 pass: 1 - C(2,2)/C(4,2) = 5/6 at k=2. Of 4 rollouts 1 passes: 1 - C(3,2)/C(4,2) = 1/2.
    a = [rolled("a", n, reward) for n, reward in enumerate([1.0, 0.9, 1.0, 0.0])]
    b = [rolled("b", n, reward) for n, reward in enumerate([0.0, 0.0, 2.0, 0.0])]
    told = summed(tmp_path, [*a, *b], num_rollouts=4)["pass_at_k"]
    assert list(told) == ["1", "2", "4"]
    assert told["1"] == {"mean": pytest.approx(3 / 8), "tasks": 2}
    assert told["2"] == {"mean": pytest.approx((5 / 6 + 1 / 2) / 2), "tasks": 2}
    assert told["4"] == {"mean": 1.0, "tasks": 2}


def test_pass_at_k_equals_the_share_of_all_draws() -> None:
    from itertools import combinations

    results = [True, False, False, True, False, False]
    for k in range(1, 7):
        draws = list(combinations(results, k))
        assert pass_at_k(6, 2, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_failed_rollouts_are_not_passed_and_short_tasks_are_left_out(tmp_path: Path) -> None:
    error = ErrorRecord("RewardError", "reward 'right' failed")
    told = summed(
        tmp_path, [rolled("a", 0, 1.0), failed("a", 1, error), rolled("b", 0, 1.0)], num_rollouts=2, planned=4
    )
    assert told["pass_at_k"]["1"] == {"mean": pytest.approx(0.75), "tasks": 2}
    assert told["pass_at_k"]["2"] == {"mean": 1.0, "tasks": 1}


def test_the_bar_for_passing_is_the_runs_own(tmp_path: Path) -> None:
    traces = [rolled("a", 0, 0.5), rolled("b", 0, 0.4)]
    assert summed(tmp_path, traces, pass_reward=0.5)["pass_at_k"]["1"]["mean"] == 0.5
    assert summed(tmp_path, traces)["pass_at_k"]["1"]["mean"] == 0.0


def test_denominators_with_and_without_what_failed(tmp_path: Path) -> None:
    traces = [
        rolled("a", 0, 1.0),
        rolled("b", 0, 0.5, "partial"),
        failed("c", 0),
        rolled("d", 0, None, "cancelled"),
    ]
    told = summed(tmp_path, traces, planned=6)
    assert told["reward"]["mean"] == pytest.approx(0.75)
    assert told["reward"]["scored"] == 2
    assert told["reward"]["failed_as_zero"]["mean"] == pytest.approx(0.5)
    assert told["reward"]["failed_as_zero"]["count"] == 3
    assert told["outcomes"] == {"completed": 1, "partial": 1, "failed": 1, "cancelled": 1, "missing": 2}
    last = summary_table(told).splitlines()[-1]
    assert last.split("  ")[-1] == "6 planned: 1 completed, 1 partial, 1 failed, 1 cancelled, 2 missing"
    assert "with the 1 failed as 0, of 3" in summary_table(told)


def test_rewards_and_metrics_have_their_own_counts(tmp_path: Path) -> None:
    told = summed(
        tmp_path,
        [
            rolled("a", 0, 1.0, rewards={"right": 1.0}, metrics={"turns": 2.0}),
            rolled("b", 0, 0.0, rewards={"right": 0.0}, metrics={"turns": 4.0, "rare": 7.0}),
            rolled("c", 0, None, "failed", rewards={"right": 1.0}),
        ],
    )
    assert told["rewards"] == {"right": {"mean": 0.5, "stderr": 0.5, "count": 2}}
    assert told["metrics"]["turns"] == {"mean": 3.0, "stderr": 1.0, "count": 2}
    assert told["metrics"]["rare"] == {"mean": 7.0, "stderr": None, "count": 1}


def test_the_bill_has_every_call_once(tmp_path: Path) -> None:
    first, second, third = (CallRecord(Usage(10 * n, n, n, 1), cost=float(n)) for n in (1, 2, 3))
    judged = Judgement("tone", "grader", 1.0, call=CallRecord(Usage(100, 7), cost=10.0))
    again = Judgement("tone", "grader", 1.0, call=CallRecord(Usage(900, 9), cost=90.0, replayed=True))
    attempt = rolled("a", 0, None, "failed", calls=(first,), judgements=(judged,))
    done = rolled(
        "a", 0, 1.0, calls=(first, second), billed_before=1, lost_calls=(third,), judgements=(again,)
    )
    free = rolled("b", 0, 1.0, calls=(CallRecord(Usage(1, 1)),))
    told = summed(tmp_path, [done, free], [attempt])
    assert told["calls"] == 5
    assert told["usage"] == {
        "input_tokens": 161,
        "output_tokens": 14,
        "cached_tokens": 6,
        "reasoning_tokens": 3,
    }
    assert told["cost"] == pytest.approx(16.0)
    assert told["unpriced_calls"] == 1
    assert told["made_anew"] == 1


def test_no_price_at_all_is_no_cost(tmp_path: Path) -> None:
    told = summed(tmp_path, [rolled("a", 0, 1.0, calls=(CallRecord(Usage(1, 1)),))])
    assert told["cost"] is None
    assert "cost unknown" in summary_table(told)


def test_rollouts_are_counted_by_class_of_error_and_stop_reason(tmp_path: Path) -> None:
    right = ErrorRecord("RewardError", "reward 'right' returned nan")
    length = ErrorRecord("RewardError", "reward 'length' failed")
    away = ErrorRecord("TransientModelError", "no answer")
    told = summed(
        tmp_path,
        [
            failed("a", 0, right, length),
            failed("b", 0, length, away),
            rolled("c", 0, 1.0, stop_reason="answer", truncated=True),
        ],
    )
    assert told["errors"] == {
        "RewardError": {"count": 2, "message": right.message, "rollout": "a-0"},
        "TransientModelError": {"count": 1, "message": "no answer", "rollout": "b-0"},
    }
    assert told["stop_reasons"] == {"error": 2, "answer": 1}
    assert told["truncated"] == 1


def test_where_the_time_went(tmp_path: Path) -> None:
    timing = Timing(total=4.0, model=2.0, tools=1.0, waiting=0.5)
    told = summed(
        tmp_path, [rolled("a", 0, 1.0, timing=timing), rolled("b", 0, 1.0, timing=Timing(total=2.0))]
    )
    assert told["time"] == {
        "mean_seconds": 3.0,
        "total_seconds": 6.0,
        "model_seconds": 2.0,
        "tool_seconds": 1.0,
        "waiting_seconds": 0.5,
    }


def test_rollouts_of_tasks_that_are_gone_fill_no_gap(tmp_path: Path) -> None:
    told = summed(tmp_path, [rolled("a", 0, 1.0), rolled("gone", 0, 0.0)], planned=3, surplus={"gone"})
    assert told["outcomes"] == {"completed": 1, "partial": 0, "failed": 0, "cancelled": 0, "missing": 2}
    assert told["surplus"] == 1
    assert (told["reward"]["mean"], told["tasks"], told["pass_at_k"]["1"]["tasks"]) == (1.0, 1, 1)
    assert told["calls"] == summed(tmp_path, [rolled("a", 0, 1.0), rolled("b", 0, 0.0)], planned=2)["calls"]


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    directory = written(tmp_path, [rolled("a", 0, 1.0)])
    with (tmp_path / "traces.jsonl").open("ab") as file:
        file.write(b'{"id": 3}\nnonsense\n')
    told = summarize(directory, planned=3, num_rollouts=1, pass_reward=1.0)
    assert told["damaged_lines"] == 2
    assert told["outcomes"]["missing"] == 2
