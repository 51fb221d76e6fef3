"""`color_codeword`: coloured squares are described one after another; each colour stands for a letter."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from random import Random
from typing import Annotated, Any, ClassVar, cast

from pydantic import Field, ValidationInfo, field_validator

from taskmill.records import Trace
from taskmill.tasks.builtin._shared import inside, last_answer
from taskmill.tasks.scoring import metric, reward
from taskmill.tasks.task import Task, TaskData
from taskmill.tasks.taskset import Taskset, TasksetConfig

COLORS = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "gray",
    "cyan",
)

Count = Annotated[int, Field(ge=1)]


class ColorCodewordConfig(TasksetConfig):
    """How long the code words are, and how many squares a turn shows at most."""

    min_squares: Count = 3
    max_squares: Count = Field(6, validate_default=True)
    max_squares_per_turn: Count = 2
    seed: int = 0

    @field_validator("max_squares")
    @classmethod
    def _not_below(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("min_squares", 1):
            raise ValueError(f"Input should be at least min_squares, which is {info.data['min_squares']}")
        return value


class ColorCodewordData(TaskData):
    """The letters of the colours, the squares of each turn, and the word they spell. `seed` made all of it."""

    seed: int
    letters: dict[str, str]
    turns: list[list[str]]
    answer: str

    def question(self, turn: int) -> str:
        """What the user says in a turn, the first being 0."""
        shown = sum(map(len, self.turns[:turn]))
        squares = "\n".join(
            f"Square {shown + place}: a solid {color} square."
            for place, color in enumerate(self.turns[turn], 1)
        )
        said = [squares]
        if turn == 0:
            key = "\n".join(f"{color} = {letter}" for color, letter in self.letters.items())
            said.insert(
                0,
                "I will show you coloured squares, some in each message. Each colour stands for a letter:\n"
                f"{key}\n\nThe letters of all squares, in the order in which they come, are a code word.",
            )
        if turn == len(self.turns) - 1:
            said.append("That was the last square. Give the code word between <codeword> and </codeword>.")
        else:
            said.append("There are more squares to come. Say OK to go on.")
        return "\n\n".join(said)


class ColorCodewordTask(Task[ColorCodewordData]):
    """Reward: 1 for the code word, else 0."""

    def user(self, state: dict[str, Any]) -> str | None:
        turn: int = state.get("turn", 0)
        if turn >= len(self.data.turns):
            return None
        state["turn"] = turn + 1
        return self.data.question(turn)

    def solve(self, state: dict[str, Any]) -> str:
        return f"<codeword>{self.data.answer}</codeword>" if state["turn"] == len(self.data.turns) else "OK"

    @reward
    def correct(self, trace: Trace) -> float:
        return float(self._said(trace) == self.data.answer)

    @metric
    def letters_right(self, trace: Trace) -> float:
        said, answer = self._said(trace), self.data.answer
        right = sum(one == other for one, other in zip(said, answer, strict=False))
        return right / max(len(said), len(answer))

    def _said(self, trace: Trace) -> str:
        return (inside(last_answer(trace.messages), "codeword") or "").upper()


class ColorCodewordTaskset(Taskset[ColorCodewordTask]):
    """Squares of colours are described turn by turn; the model gives the code word they stand for.

    Made from nothing but a seed, which is another one for each task.
    """

    INFINITE: ClassVar[bool] = True
    Config: ClassVar[type[TasksetConfig]] = ColorCodewordConfig

    def load(self) -> Iterator[ColorCodewordTask]:
        config = cast("ColorCodewordConfig", self.config)
        for idx in itertools.count():
            yield ColorCodewordTask(_drawn(idx, config), config.task)


def _drawn(idx: int, config: ColorCodewordConfig) -> ColorCodewordData:
    seed = config.seed + idx
    draws = Random(seed)
    order, alphabet = draws.sample(COLORS, len(COLORS)), draws.sample(string.ascii_uppercase, len(COLORS))
    letters = dict(zip(order, alphabet, strict=True))
    squares = draws.choices(COLORS, k=draws.randint(config.min_squares, config.max_squares))
    turns = []
    rest = squares
    while rest:
        count = draws.randint(1, config.max_squares_per_turn)
        turns.append(rest[:count])
        rest = rest[count:]
    answer = "".join(letters[color] for color in squares)
    return ColorCodewordData(idx=idx, seed=seed, letters=letters, turns=turns, answer=answer)
