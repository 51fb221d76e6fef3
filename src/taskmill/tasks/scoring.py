"""The marks on a task's methods (`@reward`, `@metric`, `@group_reward`, `@stop`), and calling them by name."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar, cast, overload

from taskmill.errors import RewardError, TaskError, TaskmillError
from taskmill.tools.threads import THREADS

Kind = Literal["reward", "metric", "group_reward", "stop"]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_MARK = "__taskmill_mark__"


class Scorer(NamedTuple):
    """A marked method: under which name, as what, and how much it weighs."""

    name: str
    kind: Kind
    weight: float


@overload
def reward(function: FunctionT, /) -> FunctionT: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[FunctionT], FunctionT]: ...
def reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method of a task as a reward: it returns a number, or a mapping of names to numbers.

    A rollout's reward is the sum of its rewards, each times its weight. A method that raises, or returns what is no
    finite number, is an error of the rollout and never a zero.
    """
    return _marking(function, "reward", weight)


@overload
def group_reward(function: FunctionT, /) -> FunctionT: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[FunctionT], FunctionT]: ...
def group_reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method that sees all rollouts of one task (`traces`) and returns one number for each, in order."""
    return _marking(function, "group_reward", weight)


def metric(function: FunctionT, /) -> FunctionT:
    """Mark a method as a metric: recorded like a reward, and no part of it."""
    marked: FunctionT = _marking(function, "metric", 0.0)
    return marked


def stop(function: FunctionT, /) -> FunctionT:
    """Mark a method as a stop condition, asked after every turn of the model: true ends the conversation."""
    marked: FunctionT = _marking(function, "stop", 0.0)
    return marked


def _marking(function: Any, kind: Kind, weight: float) -> Any:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise TaskError(f"the weight of a {kind} must be a finite number, not {weight!r}")

    def mark(target: Any) -> Any:
        setattr(target, _MARK, Scorer(target.__name__, kind, float(weight)))
        return target

    return mark if function is None else mark(function)


def scorers(kind: type, of: Kind) -> tuple[Scorer, ...]:
    """The marked methods of a class of tasks, inherited ones first, in the order of their definition.

    A method that is overridden without a mark is none any more.
    """
    return _scorers(cast(Hashable, kind), of)


@cache
def _scorers(kind: Any, of: Kind) -> tuple[Scorer, ...]:
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    found = (getattr(getattr(kind, name, None), _MARK, None) for name in names)
    return tuple(scorer for scorer in found if isinstance(scorer, Scorer) and scorer.kind == of)


class Plain(NamedTuple):
    """A plain function with its arguments, ready to be called in a thread."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


def arguments_for(function: Callable[..., Any], what: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """What `function` asks for by name, of what is offered. Raises `TaskError` for a name that is not there.

    An offered value that is a `Later` is worked out only if it is asked for.
    """
    arguments: dict[str, Any] = {}
    for name, required in _parameters(_plain_function(function)):
        if name in offered:
            value = offered[name]
            arguments[name] = value.make() if isinstance(value, Later) else value
        elif required:
            raise TaskError(f"{what} asks for {name!r}, and there is only {', '.join(sorted(offered))}")
    return arguments


class Later(NamedTuple):
    """A value that costs something to make."""

    make: Callable[[], Any]


def _plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "__func__", function)


@cache
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Names of the parameters after `self`, and whether each must be given."""
    parameters = list(inspect.signature(function).parameters.values())
    return tuple(
        (p.name, p.default is p.empty)
        for position, p in enumerate(parameters)
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and not (position == 0 and p.name == "self")
    )


async def call(function: Callable[..., Any], what: str, offered: Mapping[str, Any], *, timeout: float) -> Any:
    """Call a method of a task with what it asks for. `what` is how errors name it; `timeout` is in seconds.

    Raises `TaskError` when it is late or asks for what is not there; what it raises itself passes through.
    """
    arguments = arguments_for(function, what, offered)
    try:
        async with asyncio.timeout(timeout) as deadline:
            if inspect.iscoroutinefunction(function):
                return await function(**arguments)
            value = await THREADS.run(function, **arguments)
            return await value if inspect.isawaitable(value) else value
    except TimeoutError:
        if not deadline.expired():
            raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody cancelled the rollout: it came out of something the function awaited.
        raise TaskError(f"{what} was cancelled by what it awaited") from error
    except SystemExit as error:
        raise TaskError(f"{what} tried to end the process (SystemExit: {error})") from error
    raise TaskError(f"{what} did not end within {timeout:g} s")


def explained(what: str, error: Exception, kind: type[TaskError] = TaskError) -> TaskError:
    """`error` as one that names the function it came from."""
    if isinstance(error, kind):
        return error
    told = str(error) if isinstance(error, TaskmillError) else f"{type(error).__name__}: {error}"
    made = kind(told if what in told else f"{what} failed: {told}")
    made.__cause__ = error
    return made


def named_numbers(name: str, value: Any, what: str) -> dict[str, float]:
    """What a reward or metric returned, as numbers by name. Raises `RewardError` for what is no finite number."""
    given = value if isinstance(value, Mapping) else {name: value}
    numbers: dict[str, float] = {}
    for key, number in given.items():
        if not isinstance(key, str) or not isinstance(number, Real) or not math.isfinite(number):
            where = "" if key == name else f" for {key!r}"
            raise RewardError(f"{what} returned {number!r}{where}; a finite number is needed")
        numbers[key] = float(number)
    return numbers
