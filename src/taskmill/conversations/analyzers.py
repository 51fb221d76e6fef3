"""What looks at a conversation when it has ended: functions, or names under which functions are registered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

import msgspec

from taskmill.errors import ConfigurationError, TaskError
from taskmill.programs.conversation.recipes import imported
from taskmill.store.jsonl import encode_row

Analyzer = Callable[[Any], Any]
"""Is given the conversation and returns something JSON. It may be async."""

F = TypeVar("F", bound=Analyzer)

_registered: dict[str, Analyzer] = {}


def register_analyzer(name: str, function: F | None = None) -> Any:
    """Give an analyzer a name that conversations and worker processes know it by; also a decorator.

    Worker processes import the module that `function` is defined in, so that has to register it when it is imported.
    Raises `ConfigurationError` for a name that another function has.
    """
    if not isinstance(name, str) or not name.strip() or ":" in name:
        raise ConfigurationError(f"an analyzer needs a name that is not blank and has no colon, not {name!r}")

    def register(function: F) -> F:
        known = _registered.get(name)
        same = known is not None and (known.__module__, known.__qualname__) == (
            function.__module__,
            function.__qualname__,
        )
        if known is not None and not same:
            raise ConfigurationError(f"another analyzer is registered as {name!r}: {known.__qualname__}")
        _registered[name] = function
        return function

    return register if function is None else register(function)


def find_analyzer(analyzer: Analyzer | str) -> Analyzer:
    """The function an analyzer stands for: itself, one that is registered, or one at `module:name`."""
    if not isinstance(analyzer, str):
        return analyzer
    found = _registered.get(analyzer)
    if found is not None:
        return found
    if ":" not in analyzer:
        known = ", ".join(map(repr, sorted(_registered))) or "none"
        raise ConfigurationError(
            f"no analyzer is registered as {analyzer!r} (there are: {known}); register_analyzer(name, function), or "
            "give 'module:function'"
        )
    function = imported(analyzer, "analyzer")
    if not callable(function):
        raise ConfigurationError(f"analyzer {analyzer!r} is {function!r:.100}, and not a function")
    return function  # type: ignore[no-any-return]


def home_of(analyzer: Analyzer | str | None) -> str | None:
    """The module that registers an analyzer, where it is given by a registered name."""
    if isinstance(analyzer, str) and analyzer in _registered:
        return _registered[analyzer].__module__
    return None


async def analyse(analyzer: Analyzer | str, conversation: Any) -> Any:
    """What an analyzer says of a conversation, as plain JSON. A function that is not async runs in a thread.

    Raises `TaskError` where it failed, or said what is not JSON.
    """
    function = find_analyzer(analyzer)
    name = analyzer if isinstance(analyzer, str) else getattr(analyzer, "__qualname__", repr(analyzer))
    try:
        if iscoroutinefunction(function):
            said = await function(conversation)
        else:
            said = await asyncio.to_thread(function, conversation)
            if isawaitable(said):
                said = await said
    except (Exception, SystemExit) as error:
        raise TaskError(f"the analyzer {name!r} failed: {type(error).__name__}: {error}") from error
    try:
        return msgspec.json.decode(encode_row(plain(said)))
    except (TypeError, msgspec.MsgspecError) as error:
        raise TaskError(f"the analyzer {name!r} returned what is not JSON: {error}") from error


def plain(value: Any) -> Any:
    """`value` with numbers and arrays of other libraries as Python's own."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if hasattr(value, "tolist") and callable(value.tolist):
        return value.tolist()
    return value
