"""A model that says what it was told to: for tests, dry runs and examples, without a network or weights."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

from taskmill.errors import BadRequestError
from taskmill.models.base import Completion, Request
from taskmill.models.reasoning import split_reasoning
from taskmill.records import Message

Line = Completion | Message | str | BaseException
"""One answer of a script. Text may hold `<think>`; an exception is raised instead of answering."""

Script = Iterable[Line] | Callable[[Request], Line | Awaitable[Line]]


class ScriptedModel:
    """Answers from `script`: its lines one after another, or whatever a function says to each request.

    A list that has come to its end raises `BadRequestError`, so a program that asks once too often is noticed.
    `latency` is seconds a call takes. `calls` counts; `requests` keeps the last thousand.
    """

    def __init__(self, script: Script, *, name: str = "scripted", latency: float = 0.0) -> None:
        self._name = name
        self._latency = latency
        self._function: Callable[[Request], Line | Awaitable[Line]] | None = None
        self._lines: Iterator[Line] = iter(())
        if callable(script):
            self._function = script
        else:
            self._lines = iter(script)
        self.calls = 0
        self.requests: deque[Request] = deque(maxlen=1000)
        self.closed = False

    @property
    def name(self) -> str:
        """The model's name, as it stands in records."""
        return self._name

    async def complete(self, request: Request) -> Completion:
        """Answer with the script's next line."""
        self.calls += 1
        self.requests.append(request)
        if self._latency:
            await asyncio.sleep(self._latency)
        line = await self._next(request)
        if isinstance(line, BaseException):
            raise line
        return as_completion(line, model=self._name)

    async def _next(self, request: Request) -> Line:
        if self._function is not None:
            said = self._function(request)
            return await said if inspect.isawaitable(said) else said
        try:
            return next(self._lines)
        except StopIteration:
            raise BadRequestError(
                f"the script of model {self._name!r} ended before call {self.calls}: give it more lines"
            ) from None

    async def close(self) -> None:
        """Nothing to let go of; remembered, so that a test can ask."""
        self.closed = True


def as_completion(line: Completion | Message | str, *, model: str) -> Completion:
    """Make a completion of what a script says."""
    if isinstance(line, Completion):
        return line
    if isinstance(line, str):
        reasoning, text = split_reasoning(line)
        line = Message("assistant", text, reasoning=reasoning)
    return Completion(line, finish_reason="tool_calls" if line.tool_calls else "stop", model=model)
