"""What the run of a taskset came to, worked out from its stored traces and from nothing else."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from taskmill.records import DONE_STATES, Timing, Usage
from taskmill.store.run import RunDirectory
from taskmill.tasks.words import counted


class _Call(Struct, gc=False):
    usage: Usage = Usage()
    cost: float | None = None
    replayed: bool = False


class _Judged(Struct):
    call: _Call


class _Error(Struct):
    type: str = "Unknown"
    message: str = ""


class _Bill(Struct):
    """The fields of a stored trace that say what it cost. See `Trace.billed`."""

    id: str
    state: str
    calls: list[_Call] = []
    billed_before: int = 0
    lost_calls: list[_Call] = []
    judgements: list[_Judged] = []


class _Row(_Bill):
    """The fields of a stored trace that the summary needs; everything else on the line is passed over."""

    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    stop_reason: str = ""
    truncated: bool = False
    errors: list[_Error] = []
    timing: Timing = Timing()
    reward: float | None = None


class _Turn(Struct):
    role: str
    content: str = ""
    tool_calls: list[msgspec.Raw] = []


class _Turns(Struct):
    messages: list[_Turn] = []


_decode = msgspec.json.Decoder(_Row).decode
_decode_turns = msgspec.json.Decoder(_Turns).decode
_decode_bill = msgspec.json.Decoder(_Bill).decode


class Mean(Protocol):
    """Numbers of rollouts on the way to their mean and its standard error."""

    def add(self, value: float, task: int) -> None: ...

    def result(self) -> dict[str, Any]: ...


class PlainMean:
    """Where every task has one rollout. Memory: three numbers."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, value: float, task: int) -> None:
        """Count a value (Welford's way, which loses no digits)."""
        self._count += 1
        off = value - self._mean
        self._mean += off / self._count
        self._squares += off * (value - self._mean)

    def result(self) -> dict[str, Any]:
        """Mean, standard error and count; `None` where there are too few values to say."""
        count = self._count
        stderr = math.sqrt(self._squares / (count - 1) / count) if count > 1 else None
        return {"mean": self._mean if count else None, "stderr": stderr, "count": count}


class ClusteredMean:
    """Where tasks have several rollouts, which are alike. Memory: two numbers a task.

    The error is that of a mean of clusters: with G tasks, n values and `s` the sum of a task's deviations from the
    mean, sqrt(G / (G - 1) * sum of s²) / n. With one rollout a task it is the ordinary one; with equally many it is
    the ordinary one of the tasks' own means.
    """

    def __init__(self) -> None:
        self._sums = array("d")
        self._counts = array("L")

    def add(self, value: float, task: int) -> None:
        """Count a value of the task with that place."""
        while len(self._sums) <= task:
            self._sums.append(0.0)
            self._counts.append(0)
        self._sums[task] += value
        self._counts[task] += 1

    def result(self) -> dict[str, Any]:
        """Mean, standard error and count; `None` where there are too few values or tasks to say."""
        count = sum(self._counts)
        if not count:
            return {"mean": None, "stderr": None, "count": 0}
        mean = math.fsum(self._sums) / count
        tasks = sum(1 for of_task in self._counts if of_task)
        squares = math.fsum(
            (total - of_task * mean) ** 2 for total, of_task in zip(self._sums, self._counts, strict=True)
        )
        stderr = math.sqrt(tasks / (tasks - 1) * squares) / count if tasks > 1 else None
        return {"mean": mean, "stderr": stderr, "count": count}


class _Passes:
    """Rollouts that passed, of those that ended. Memory: two counts a task, or two in all at one rollout a task."""

    def __init__(self, num_rollouts: int) -> None:
        self._largest = num_rollouts
        self._ended = array("L")
        self._passed = array("L")

    def add(self, passed: bool, task: int) -> None:
        if self._largest == 1:
            task = 0
        while len(self._ended) <= task:
            self._ended.append(0)
            self._passed.append(0)
        self._ended[task] += 1
        self._passed[task] += passed

    def result(self) -> dict[str, dict[str, Any]]:
        if self._largest == 1:
            tasks = sum(self._ended)
            share = sum(self._passed) / tasks if tasks else None
            return {"1": {"mean": share, "tasks": tasks}}
        return {str(k): self._at(k) for k in _powers(self._largest)}

    def _at(self, k: int) -> dict[str, Any]:
        chances = [
            pass_at_k(ended, passed, k)
            for ended, passed in zip(self._ended, self._passed, strict=True)
            if ended >= k
        ]
        return {"mean": math.fsum(chances) / len(chances) if chances else None, "tasks": len(chances)}


def pass_at_k(ended: int, passed: int, k: int) -> float:
    """The chance that at least one of `k` rollouts, drawn from the `ended` ones without putting back, passed."""
    return 1.0 - math.comb(ended - passed, k) / math.comb(ended, k)


def _powers(largest: int) -> list[int]:
    return [1 << power for power in range(largest.bit_length())]


class _Totals:
    """Adds calls up: what the run was billed for."""

    def __init__(self) -> None:
        self.calls = 0
        self.unpriced = 0
        self.cost = 0.0
        self.input = self.output = self.cached = self.reasoning = 0

    def add(self, row: _Bill) -> None:
        for call in row.calls[row.billed_before :] if row.billed_before else row.calls:
            self._count(call)
        for call in row.lost_calls:
            self._count(call)
        for judged in row.judgements:
            if not judged.call.replayed:
                self._count(judged.call)

    def _count(self, call: _Call) -> None:
        self.calls += 1
        used = call.usage
        self.input += used.input_tokens
        self.output += used.output_tokens
        self.cached += used.cached_tokens
        self.reasoning += used.reasoning_tokens
        if call.cost is None:
            self.unpriced += 1
        else:
            self.cost += call.cost


def summarize(
    directory: RunDirectory,
    *,
    planned: int,
    num_rollouts: int,
    pass_reward: float,
    surplus: Collection[str] = (),
    outcome: str = "finished",
) -> dict[str, Any]:
    """What `summary.json` says of a run: `planned` rollouts, `num_rollouts` for each task.

    - `outcomes` counts how rollouts ended; `missing` are those of the plan that left no row.
    - `reward.mean` is over the `scored` rollouts; `reward.failed_as_zero` has those that failed in it, as zeros.
    - `pass_at_k` has failed rollouts in it, as not passed; tasks with fewer than k ended rollouts are left out.
    - `rewards` and `metrics` are over rollouts that are done.
    - `usage`, `calls` and `cost` are the whole bill, with attempts that were made anew and with judges.
    - `errors` counts rollouts by class of error; one that has two of them is in both.
    - `empty_answers` counts the `truncated` rollouts whose last answer says nothing.
    - `surplus` counts the rollouts of tasks that the taskset no longer gives (`surplus` has their hashes). They are in
      the bill and in nothing else.

    One pass over the files. Memory: constant at one rollout a task; else about 200 bytes a task, and 16 more for each
    reward and metric.
    """
    kind = PlainMean if num_rollouts == 1 else ClusteredMean
    reward: Mean = kind()
    with_failed: Mean = kind()
    passes = _Passes(num_rollouts)
    rewards: dict[str, Mean] = {}
    metrics: dict[str, Mean] = {}
    states: Counter[str] = Counter()
    stop_reasons: Counter[str] = Counter()
    errors: dict[str, dict[str, Any]] = {}
    totals = _Totals()
    seconds, model, tools, waiting = 0.0, 0.0, 0.0, 0.0
    places: dict[str, int] = {}
    rows = damaged = truncated = empty = left_out = 0
    for _, line in directory.read_traces():
        try:
            row = _decode(line)
        except (msgspec.DecodeError, RecursionError):
            damaged += 1
            continue
        totals.add(row)
        if surplus and row.id.rpartition("-")[0] in surplus:
            left_out += 1
            continue
        rows += 1
        states[row.state] += 1
        timing = row.timing
        seconds += timing.total
        model += timing.model
        tools += timing.tools
        waiting += timing.waiting
        truncated += row.truncated
        empty += row.truncated and _is_empty(line)
        stop_reasons[row.stop_reason or "unknown"] += 1
        place = 0 if num_rollouts == 1 else places.setdefault(row.id.rpartition("-")[0], len(places))
        if row.state in DONE_STATES:
            if row.reward is not None:
                reward.add(row.reward, place)
                with_failed.add(row.reward, place)
            passes.add(row.reward is not None and row.reward >= pass_reward, place)
            for values, means in ((row.rewards, rewards), (row.metrics, metrics)):
                for name, value in values.items():
                    mean = means.get(name)
                    if mean is None:
                        mean = means[name] = kind()
                    mean.add(value, place)
        elif row.state == "failed":
            with_failed.add(0.0, place)
            passes.add(False, place)
            for error in {error.type: error for error in reversed(row.errors)}.values():
                seen = errors.setdefault(
                    error.type, {"count": 0, "message": error.message, "rollout": row.id}
                )
                seen["count"] += 1
    again = 0
    for _, line in directory.read_attempts():
        try:
            totals.add(_decode_bill(line))
        except (msgspec.DecodeError, RecursionError):
            damaged += 1
            continue
        again += 1
    scored = reward.result()
    known = ("completed", "partial", "failed", "cancelled")
    return {
        "outcome": outcome,
        "planned": planned,
        "outcomes": {
            **{state: states[state] for state in known},
            **{state: count for state, count in states.items() if state not in known},
            "missing": max(0, planned - rows),
        },
        "tasks": rows if num_rollouts == 1 else len(places),
        "num_rollouts": num_rollouts,
        "reward": {
            "mean": scored["mean"],
            "stderr": scored["stderr"],
            "scored": scored["count"],
            "failed_as_zero": with_failed.result(),
        },
        "pass_reward": pass_reward,
        "pass_at_k": passes.result(),
        "rewards": {name: rewards[name].result() for name in sorted(rewards)},
        "metrics": {name: metrics[name].result() for name in sorted(metrics)},
        "usage": {
            "input_tokens": totals.input,
            "output_tokens": totals.output,
            "cached_tokens": totals.cached,
            "reasoning_tokens": totals.reasoning,
        },
        "calls": totals.calls,
        "cost": None if totals.calls and totals.unpriced == totals.calls else totals.cost,
        "unpriced_calls": totals.unpriced,
        "time": {
            "mean_seconds": seconds / rows if rows else None,
            "total_seconds": seconds,
            "model_seconds": model,
            "tool_seconds": tools,
            "waiting_seconds": waiting,
        },
        "stop_reasons": dict(stop_reasons.most_common()),
        "truncated": truncated,
        "empty_answers": empty,
        "errors": dict(sorted(errors.items(), key=lambda item: -item[1]["count"])),
        "surplus": left_out,
        "made_anew": again,
        "damaged_lines": damaged,
    }


def _is_empty(line: bytes) -> bool:
    """Whether the last turn of a stored trace is an answer that says nothing."""
    try:
        messages = _decode_turns(line).messages
    except (msgspec.DecodeError, RecursionError):
        return False
    last = messages[-1] if messages else None
    return last is not None and last.role == "assistant" and not last.content.strip() and not last.tool_calls


def summary_table(summary: Mapping[str, Any]) -> str:
    """A summary as lines for people; the last one counts the outcomes."""
    reward, outcomes, usage, time = (summary[name] for name in ("reward", "outcomes", "usage", "time"))
    clustered = ", clustered by task" if summary["num_rollouts"] > 1 else ""
    scored = counted(reward["scored"], "rollout")
    rows = [("total reward", f"{_shown(reward)}  (standard error{clustered}; {scored} scored)")]
    failed_as_zero = reward["failed_as_zero"]
    if outcomes["failed"]:
        told = f"with the {outcomes['failed']:,} failed as 0, of {failed_as_zero['count']:,}"
        rows.append(("", f"{_shown(failed_as_zero)}  ({told})"))
    chances = [
        f"pass@{k} {found['mean']:.4f} ({counted(found['tasks'], 'task')})"
        for k, found in summary["pass_at_k"].items()
        if found["mean"] is not None
    ]
    if chances:
        rows.append(
            (
                "passed",
                f"{', '.join(chances)}; passed means a total reward of at least {summary['pass_reward']:g}",
            )
        )
    for title, group in (("reward", "rewards"), ("metric", "metrics")):
        for name, found in summary[group].items():
            rows.append((title, f"{name}: {_shown(found)}  ({counted(found['count'], 'rollout')})"))
    unpriced = f", {summary['unpriced_calls']:,} without a price" if summary["unpriced_calls"] else ""
    spent = summary["cost"]
    cost = "cost unknown" if spent is None else f"${spent:.4f}" if spent < 1 else f"${spent:,.2f}"
    rows += [
        ("calls", f"{summary['calls']:,}, {cost}{unpriced}"),
        (
            "tokens",
            f"{usage['input_tokens']:,} in ({usage['cached_tokens']:,} cached), "
            f"{usage['output_tokens']:,} out ({usage['reasoning_tokens']:,} reasoning)",
        ),
    ]
    if time["mean_seconds"] is not None:
        rows.append(
            (
                "time",
                f"{time['mean_seconds']:.2f} s a rollout; together {time['model_seconds']:,.1f} s in the model, "
                f"{time['tool_seconds']:,.1f} s in tools, {time['waiting_seconds']:,.1f} s waiting",
            )
        )
    if summary["stop_reasons"]:
        told = ", ".join(f"{count:,} {reason}" for reason, count in summary["stop_reasons"].items())
        rows.append(("stopped by", told))
    if summary["truncated"]:
        cut = f"{counted(summary['truncated'], 'rollout')} with a turn cut at the token limit"
        empty = summary.get("empty_answers", 0)
        if empty:
            cut += f"; {counted(empty, 'answer')} {'is' if empty == 1 else 'are'} empty: raise --sampling.max-tokens"
        rows.append(("truncated", cut))
    for kind, error in summary["errors"].items():
        rows.append(("error", f"{error['count']:,} × {kind}: {' '.join(error['message'].split()):.300}"))
    if summary["made_anew"]:
        told = f"{counted(summary['made_anew'], 'attempt')} that a later one took the place of: in the bill alone"
        rows.append(("replaced", told))
    if summary["surplus"]:
        told = f"{counted(summary['surplus'], 'rollout')} of tasks that the taskset no longer gives: in the bill alone"
        rows.append(("surplus", told))
    if summary["damaged_lines"]:
        rows.append(("damaged", f"{summary['damaged_lines']:,} stored lines can't be read"))
    counts = ", ".join(f"{count:,} {state}" for state, count in outcomes.items())
    rows.append(("rollouts", f"{summary['planned']:,} planned: {counts}"))
    width = max(len(title) for title, _ in rows)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in rows)


def _shown(found: Mapping[str, Any]) -> str:
    if found["mean"] is None:
        return "none"
    return f"{found['mean']:.4f}" + ("" if found["stderr"] is None else f" ± {found['stderr']:.4f}")
