"""Two runs of a taskset side by side, task by task."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from taskmill.evaluation.runner import stored_config
from taskmill.records import DONE_STATES
from taskmill.store.jsonl import content_hash
from taskmill.store.run import RunDirectory

logger = logging.getLogger(__name__)

MOST = 10
"""Tasks that are named where the runs disagree."""

COMPARABLE = ("eval", "replay")
"""Commands whose runs have rewards."""


class _Row(Struct):
    """The fields of a stored trace that a comparison needs."""

    id: str
    state: str
    task: dict[str, Any] = {}
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}


_decode = msgspec.json.Decoder(_Row).decode


class Paired(Struct, frozen=True):
    """A number of both runs: its means over the tasks that both scored, and the mean difference (`b` less `a`).

    `low` and `high` bound the difference with 95 % confidence, by the t distribution of the tasks' differences; `None`
    for fewer than two tasks.
    """

    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    tasks: int


class Disagreement(Struct, frozen=True):
    """A task whose mean reward differs: where it stands in its taskset, and its rollouts' ids in both runs."""

    idx: int
    name: str | None
    a: float
    b: float
    ids_a: tuple[str, ...]
    ids_b: tuple[str, ...]


class Side(Struct, frozen=True):
    """What one of the runs brings: its path, model, tasks with a reward, and rollouts with and without one."""

    path: str
    model: str
    tasks: int
    scored: int
    unscored: int


class Comparison(Struct, frozen=True):
    """Run `b` against run `a`.

    Tasks are matched by the hash of all that a task is; `by_prompt` counts those that are not the same in all, and were
    matched by number and prompt. `only_a` and `only_b` count tasks that the other has not scored. `names_a` and
    `names_b` are the rewards and metrics that the other run does not have: the two were not scored alike.
    """

    a: Side
    b: Side
    by_prompt: int
    reward: Paired | None
    wins: int
    losses: int
    ties: int
    only_a: int
    only_b: int
    rewards: dict[str, Paired] = field(default_factory=dict)
    metrics: dict[str, Paired] = field(default_factory=dict)
    names_a: tuple[str, ...] = ()
    names_b: tuple[str, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()


class _Mean(Struct):
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        return self.total / self.count


class _Task(Struct):
    """What a run has of one task."""

    key: str
    idx: int
    name: str | None
    reward: _Mean = field(default_factory=_Mean)
    rewards: dict[str, _Mean] = field(default_factory=dict)
    metrics: dict[str, _Mean] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)


class _Run:
    """A run's tasks by hash, and how many of its rollouts have a reward."""

    def __init__(self, path: Path | str) -> None:
        config = stored_config(path, *COMPARABLE)
        self.path = str(path)
        self.model = str(config["model"])
        self.tasks: dict[str, _Task] = {}
        self.names: set[str] = set()
        self.scored = self.unscored = 0
        damaged = 0
        for _, line in RunDirectory(path).read_traces():
            try:
                row = _decode(line)
            except (msgspec.DecodeError, RecursionError):
                damaged += 1
                continue
            self._add(row)
        if damaged:
            logger.warning(
                "%d lines of traces.jsonl in %r can't be read and are passed over", damaged, self.path
            )

    def _add(self, row: _Row) -> None:
        if row.reward is None or row.state not in DONE_STATES:
            self.unscored += 1
            return
        self.scored += 1
        hash = row.id.rpartition("-")[0]
        task = self.tasks.get(hash)
        if task is None:
            data = row.task
            key = content_hash({"idx": data.get("idx"), "prompt": data.get("prompt")}).hex()
            task = self.tasks[hash] = _Task(key, int(data.get("idx", 0)), data.get("name"))
        task.reward.add(row.reward)
        task.ids.append(row.id)
        for kind, values, means in (
            ("reward", row.rewards, task.rewards),
            ("metric", row.metrics, task.metrics),
        ):
            for name, value in values.items():
                self.names.add(f"{kind} {name}")
                means.setdefault(name, _Mean()).add(value)

    @property
    def side(self) -> Side:
        return Side(self.path, self.model, len(self.tasks), self.scored, self.unscored)


def compare(run_a: Path | str, run_b: Path | str) -> Comparison:
    """Compare run `b` with run `a`, each task by the mean of its rollouts. Rollouts without a reward are left out.

    Memory: about 1 KB a task of both. Raises `RunNotFoundError`, or `ConfigurationError` where a run is
    of a kind that has no rewards.
    """
    a, b = _Run(run_a), _Run(run_b)
    both = [(task, b.tasks[hash]) for hash, task in a.tasks.items() if hash in b.tasks]
    same = len(both)
    left = {task.key: task for hash, task in b.tasks.items() if hash not in a.tasks}
    both += [
        (task, left[task.key]) for hash, task in a.tasks.items() if hash not in b.tasks and task.key in left
    ]
    differences = [other.reward.mean - task.reward.mean for task, other in both]
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    return Comparison(
        a=a.side,
        b=b.side,
        by_prompt=len(both) - same,
        reward=paired((task.reward.mean, other.reward.mean) for task, other in both),
        wins=wins,
        losses=losses,
        ties=len(both) - wins - losses,
        only_a=len(a.tasks) - len(both),
        only_b=len(b.tasks) - len(both),
        rewards=_named((task.rewards, other.rewards) for task, other in both),
        metrics=_named((task.metrics, other.metrics) for task, other in both),
        names_a=tuple(sorted(a.names - b.names)) if both else (),
        names_b=tuple(sorted(b.names - a.names)) if both else (),
        disagreements=_disagreements(both),
    )


def _named(pairs: Iterable[tuple[Mapping[str, _Mean], Mapping[str, _Mean]]]) -> dict[str, Paired]:
    """Each number that both runs have, over the tasks where both have it."""
    values: dict[str, list[tuple[float, float]]] = {}
    for a, b in pairs:
        for name in a.keys() & b.keys():
            values.setdefault(name, []).append((a[name].mean, b[name].mean))
    found = {name: paired(values[name]) for name in sorted(values)}
    return {name: pair for name, pair in found.items() if pair is not None}


def _disagreements(both: Iterable[tuple[_Task, _Task]]) -> tuple[Disagreement, ...]:
    differing = [(a, b) for a, b in both if a.reward.mean != b.reward.mean]
    differing.sort(key=lambda pair: (-abs(pair[1].reward.mean - pair[0].reward.mean), pair[0].idx))
    return tuple(
        Disagreement(a.idx, a.name, a.reward.mean, b.reward.mean, tuple(a.ids), tuple(b.ids))
        for a, b in differing[:MOST]
    )


def paired(pairs: Iterable[tuple[float, float]]) -> Paired | None:
    """Means of both sides and of their difference, with its interval; `None` where there is no pair."""
    values = list(pairs)
    count = len(values)
    if not count:
        return None
    mean_a = math.fsum(a for a, _ in values) / count
    mean_b = math.fsum(b for _, b in values) / count
    difference = math.fsum(b - a for a, b in values) / count
    low = high = None
    if count > 1:
        squares = math.fsum((b - a - difference) ** 2 for a, b in values)
        half = t_quantile(count - 1) * math.sqrt(squares / (count - 1) / count)
        low, high = difference - half, difference + half
    return Paired(mean_a, mean_b, difference, low, high, count)


def t_quantile(freedom: int, probability: float = 0.975) -> float:
    """The value that a t distribution with `freedom` degrees of freedom stays under with `probability` (> 0.5)."""
    low, high = 0.0, 2.0
    while _t_below(high, freedom) < probability:
        low, high = high, high * 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(value: float, freedom: int) -> float:
    """The probability that a t distribution stays under `value` (>= 0), by its finite series in the angle."""
    angle = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    even = freedom % 2 == 0
    term = 1.0 if even else cosine
    total = term if freedom > 1 else 0.0
    for step in range(2 if even else 3, freedom, 2):
        term *= cosine * cosine * (step - 1) / step
        if term < 1e-17 * total:
            break
        total += term
    inside = sine * total if even else 2 / math.pi * (angle + sine * total)
    return 0.5 + inside / 2
