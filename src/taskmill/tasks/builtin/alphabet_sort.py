"""`alphabet_sort`: sort names, then sort them again with the names that were added, over several turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, ValidationInfo, field_validator

from taskmill.errors import TasksetError
from taskmill.records import Trace
from taskmill.tasks.builtin._shared import all_inside, answers, bundled_words, similarity
from taskmill.tasks.scoring import metric, reward
from taskmill.tasks.task import Task, TaskConfig, TaskData
from taskmill.tasks.taskset import Taskset, TasksetConfig

LONGEST_LIST = 15
_LISTS = 3000

Count = Annotated[int, Field(ge=1)]


class AlphabetSortTaskConfig(TaskConfig):
    """How likeness becomes a reward."""

    similarity_power: Annotated[float, Field(gt=0)] = 4.0
    """The likeness of a turn, from 0 to 1, is raised to this, so that almost right is worth much less than right."""
    power_per_turn: bool = True
    """Whether each turn is raised to it, or the average of all turns."""


class AlphabetSortConfig(TasksetConfig):
    """How many turns and names a task has. Both are drawn anew for each, from and up to what is said here."""

    task: AlphabetSortTaskConfig = Field(default_factory=AlphabetSortTaskConfig)
    min_turns: Count = 1
    max_turns: Count = Field(3, validate_default=True)
    min_names_per_turn: Count = 1
    max_names_per_turn: Count = Field(5, validate_default=True)
    seed: int = 0

    @field_validator("max_turns", "max_names_per_turn")
    @classmethod
    def _not_below(cls, value: int, info: ValidationInfo) -> int:
        lowest = str(info.field_name).replace("max_", "min_")
        if value < info.data.get(lowest, 1):
            raise ValueError(f"Input should be at least {lowest}, which is {info.data[lowest]}")
        return value


class AlphabetSortData(TaskData):
    """The names of each turn in the order in which they are told, and by which name they are sorted."""

    turns: list[list[str]]
    sort_by: Literal["first", "last"]

    def question(self, turn: int) -> str:
        """What the user says in a turn, the first being 0."""
        names = ", ".join(self.turns[turn])
        if turn == 0:
            return (
                f"Sort these names alphabetically by {self.sort_by.upper()} name: {names}\n\n"
                "Use exactly this format:\n<alphabetical_sorted>\nName 1\nName 2\n</alphabetical_sorted>"
            )
        return (
            f"Now sort ALL names so far together with these, alphabetically by {self.sort_by.upper()} name: {names}\n\n"
            "Mark the names that are new in this turn with `// new name!`. Use exactly this format:\n"
            "<combined_alphabetical_sorted>\nName 1\nName 2 // new name!\nName 3\n</combined_alphabetical_sorted>"
        )

    def truth(self, turn: int) -> list[str]:
        """The lines of the right answer in a turn."""
        new = set(self.turns[turn]) if turn > 0 else set()
        names = sorted(itertools.chain.from_iterable(self.turns[: turn + 1]), key=self._key)
        return [f"{name} // new name!" if name in new else name for name in names]

    def _key(self, name: str) -> str:
        first, last = name.split(" ", 1)
        return (first if self.sort_by == "first" else last).casefold()


def tag_of(turn: int) -> str:
    """The tag in which the answer of a turn stands."""
    return "alphabetical_sorted" if turn == 0 else "combined_alphabetical_sorted"


def attempt_score(attempts: Sequence[str], truth: Sequence[str]) -> float:
    """The likeness of one turn's answer, from 0 to 1.

    Who corrects himself within one answer is scored by the last attempt, but only if each was better than the one
    before: shuffling until something fits is worth nothing.
    """
    right = "\n".join(truth).lower()
    scores = []
    for attempt in attempts:
        lines = [" ".join(line.split()) for line in attempt.splitlines() if line.strip()]
        scores.append(similarity("\n".join(lines).lower(), right))
    if not scores or any(later <= earlier for earlier, later in itertools.pairwise(scores)):
        return 0.0
    return scores[-1]


class AlphabetSortTask(Task[AlphabetSortData]):
    """Reward: the likeness of each turn's list to the truth, raised to a power."""

    def user(self, state: dict[str, Any]) -> str | None:
        turn: int = state.get("turn", 0)
        if turn >= len(self.data.turns):
            return None
        state["turn"] = turn + 1
        return self.data.question(turn)

    def solve(self, state: dict[str, Any]) -> str:
        turn = state["turn"] - 1
        tag = tag_of(turn)
        return "\n".join([f"<{tag}>", *self.data.truth(turn), f"</{tag}>"])

    @reward
    def sorted_well(self, trace: Trace) -> float:
        config = cast("AlphabetSortTaskConfig", self.config)
        likeness = self._likeness(trace)
        if config.power_per_turn:
            likeness = [math.pow(value, config.similarity_power) for value in likeness]
            return sum(likeness) / len(likeness)
        return math.pow(sum(likeness) / len(likeness), config.similarity_power)

    @metric
    def turns_right(self, trace: Trace) -> float:
        likeness = self._likeness(trace)
        return sum(value == 1.0 for value in likeness) / len(likeness)

    def _likeness(self, trace: Trace) -> list[float]:
        """One number for each turn; a turn without an answer has 0."""
        said = answers(trace.messages)
        return [
            attempt_score(all_inside(said[turn], tag_of(turn)), self.data.truth(turn))
            if turn < len(said)
            else 0.0
            for turn in range(len(self.data.turns))
        ]


class AlphabetSortTaskset(Taskset[AlphabetSortTask]):
    """Sort names, then sort them again with the names that were added, over several turns.

    Goes round its lists of names for ever, with one generator that carries on, so that no pass repeats another.
    """

    INFINITE: ClassVar[bool] = True
    Config: ClassVar[type[TasksetConfig]] = AlphabetSortConfig

    def load(self) -> Iterator[AlphabetSortTask]:
        config = cast("AlphabetSortConfig", self.config)
        draws = Random(config.seed)
        idx = 0
        while True:
            before = idx
            for names in name_lists():
                turns = draws.randint(config.min_turns, config.max_turns)
                counts = [
                    draws.randint(config.min_names_per_turn, config.max_names_per_turn) for _ in range(turns)
                ]
                by: Literal["first", "last"] = "first" if draws.random() < 0.5 else "last"
                if sum(counts) > len(names):
                    continue
                chosen = iter(draws.sample(names, sum(counts)))
                told = [list(itertools.islice(chosen, count)) for count in counts]
                yield AlphabetSortTask(AlphabetSortData(idx=idx, turns=told, sort_by=by), config.task)
                idx += 1
            if idx == before:
                raise TasksetError(
                    f"taskset 'alphabet_sort': none of its {len(name_lists())} lists has the names for "
                    f"min_turns={config.min_turns} turns of min_names_per_turn={config.min_names_per_turn} names "
                    f"(the longest has {LONGEST_LIST}); lower min_turns, max_turns, min_names_per_turn or "
                    "max_names_per_turn"
                )


@cache
def name_lists() -> tuple[tuple[str, ...], ...]:
    """Lists of 1 to `LONGEST_LIST` names, the same in every process.

    No two names of a list share a first or a last name, so that there is one right order.
    """
    firsts, lasts = bundled_words("first_names.txt"), bundled_words("last_names.txt")
    draws = Random(2024)
    lists = []
    for _ in range(_LISTS):
        size = draws.randint(1, LONGEST_LIST)
        pairs = zip(draws.sample(firsts, size), draws.sample(lasts, size), strict=True)
        lists.append(tuple(f"{first} {last}" for first, last in pairs))
    return tuple(lists)
