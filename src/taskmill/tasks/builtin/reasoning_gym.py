"""`reasoning_gym`: tasks of any generator of the `reasoning-gym` package, scored by its own scorer."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, cast

from pydantic import Field, field_validator

from taskmill.errors import RewardError, TasksetError
from taskmill.records import Trace
from taskmill.tasks.builtin._draws import Draws
from taskmill.tasks.builtin._shared import inside, last_answer, needed_package
from taskmill.tasks.scoring import reward
from taskmill.tasks.task import Task, TaskData
from taskmill.tasks.taskset import Taskset, TasksetConfig

BY_HASH = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Generators that choose from sets of texts, whose order is another one in each process."""

_SYSTEM = (
    "Think the problem through. Then give your final answer, and nothing else, between <answer> and </answer>, "
    "in the form that the problem asks for."
)


class ReasoningGymConfig(TasksetConfig):
    """Which generator, and its parameters."""

    generator: str = "chain_sum"
    """The name of a generator of the package."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The generator's own, such as its difficulty. Its seed and size are not among them."""
    seed: int = Field(0, ge=0)

    @field_validator("parameters")
    @classmethod
    def _own(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "seed" in value or "size" in value:
            raise ValueError("each task has a seed of its own, from the field seed, and there is no size")
        return value


class ReasoningGymData(TaskData):
    """Where the task comes from, which is enough to make it again, and the generator's answer where it has one."""

    generator: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    seed: int
    answer: str | None = None


class ReasoningGymTask(Task[ReasoningGymData]):
    """Reward: what the generator's own scorer gives for what stands in the tags, 0 where there are none."""

    @reward
    def score(self, trace: Trace) -> float:
        said = inside(last_answer(trace.messages), "answer")
        if said is None:
            return 0.0
        data = self.data
        _check(data.generator, data.parameters)
        with Draws(data.seed):
            maker = _made(data.generator, data.parameters, data.seed)
            # The entry is made again rather than kept, so that stored data alone is enough to score.
            entry = maker[0]
            if entry["question"] != data.prompt:
                raise RewardError(
                    f"generator {data.generator!r} does not make the same task from seed {data.seed} any more, "
                    "so its scorer can't be asked; was another version of reasoning-gym installed?"
                )
            return float(maker.score_answer(said, entry))


class SolvedReasoningGymTask(ReasoningGymTask):
    """A task whose generator says an answer."""

    def solve(self) -> str:
        return f"<answer>{self.data.answer}</answer>"


class ReasoningGymTaskset(Taskset[ReasoningGymTask]):
    """Puzzles of a generator of the package reasoning-gym, with its own scorer, another seed for each task."""

    INFINITE: ClassVar[bool] = True
    Config: ClassVar[type[TasksetConfig]] = ReasoningGymConfig
    needs: ClassVar[tuple[str, ...]] = ("reasoning_gym",)

    def load(self) -> Iterator[ReasoningGymTask]:
        config = cast("ReasoningGymConfig", self.config)
        _check(config.generator, config.parameters)
        for idx in itertools.count():
            seed = config.seed + idx
            with Draws(seed):
                entry = _made(config.generator, config.parameters, seed)[0]
            data = ReasoningGymData(
                idx=idx,
                prompt=entry["question"],
                system_prompt=_SYSTEM,
                generator=config.generator,
                parameters=config.parameters,
                seed=seed,
                answer=entry["answer"],
            )
            yield (ReasoningGymTask if data.answer is None else SolvedReasoningGymTask)(data, config.task)


def _check(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise `TasksetError` unless there is such a generator with such parameters, which gives the same everywhere."""
    generators = _generators()
    if name not in generators:
        raise TasksetError(f"taskset 'reasoning_gym': there is no generator {_unknown(name, generators)}")
    known = {field.name for field in dataclasses.fields(generators[name][1])} - {"seed", "size"}
    for parameter in parameters:
        if parameter not in known:
            raise TasksetError(
                f"taskset 'reasoning_gym': the generator {name!r} has no parameter {_unknown(parameter, known)}"
            )
    if (
        name in BY_HASH
        and sys.flags.hash_randomization
        and not os.environ.get("PYTHONHASHSEED", "").isdigit()
    ):
        raise TasksetError(
            f"taskset 'reasoning_gym': the generator {name!r} makes other tasks in each process, unless the "
            "environment variable PYTHONHASHSEED is set to a number, such as 0, before they start"
        )


def _unknown(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"{name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}")


@cache
def _generators() -> Mapping[str, tuple[type[Any], type[Any]]]:
    """The package's generators: names, and the classes of generator and parameters."""
    # The package draws from the process's generator when it is imported.
    with Draws(0):
        needed_package("reasoning_gym", "reasoning_gym", "games")
        factory = needed_package("reasoning_gym.factory", "reasoning_gym", "games")
    return cast("Mapping[str, tuple[type[Any], type[Any]]]", factory.DATASETS)


def _made(name: str, parameters: Mapping[str, Any], seed: int) -> Any:
    """The generator with one seed. Its first and only entry is the task of that seed."""
    maker, settings = _generators()[name]
    try:
        return maker(settings(**parameters, seed=seed, size=1))
    except (AssertionError, TypeError, ValueError) as error:
        raise TasksetError(
            f"taskset 'reasoning_gym': the generator {name!r} does not take {dict(parameters)!r}: {error}"
        ) from error
