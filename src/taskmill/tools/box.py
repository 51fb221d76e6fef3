"""Runs the tool calls of one rollout, so that every call ends as exactly one success or failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from time import perf_counter
from typing import Any

from taskmill.errors import ConfigurationError, SandboxError, ToolError, ToolTimeoutError, UnknownToolError
from taskmill.records import Message, ToolCall, ToolEvent, ToolSpec
from taskmill.store.jsonl import without_surrogates
from taskmill.tools.arguments import parse_arguments
from taskmill.tools.base import Tool, ToolContext, ToolResult
from taskmill.tools.function import to_result

logger = logging.getLogger(__name__)

RESULT_LIMIT = 50_000
"""Characters of a result that a model reads; the middle of a longer one is left out."""

LONGEST = 3600.0
"""Seconds no tool call may exceed, whatever the tool says of itself."""

GRACE = 5.0
"""Seconds an async tool has to clean up once it was cancelled; then it is left behind."""

PARALLEL = 16
"""Calls of one turn that run side by side."""

_ERROR_LIMIT = 2_000

_left_behind: set[asyncio.Task[Any]] = set()


def left_behind() -> int:
    """How many async tool calls go on although they were cancelled, in this process."""
    return len(_left_behind)


class ToolBox:
    """The tools offered to one rollout.

    Calls of one turn run side by side, at most `PARALLEL` at a time. A call of an `exclusive` tool waits for
    those before it, runs alone, and is waited for by those after it. Each call has its tool's deadline, which is
    put off while the sandbox is being set up. An async function that blocks the event loop can't be interrupted by
    anything (see `FunctionTool`).

    Raises `ConfigurationError` for two tools with one name.
    """

    def __init__(
        self, tools: Sequence[Tool], context: ToolContext, *, result_limit: int = RESULT_LIMIT
    ) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            name = tool.spec.name
            if name in self._tools:
                raise ConfigurationError(f"two tools are called {name!r}; give one of them another name")
            self._tools[name] = tool
        if result_limit < 1:
            raise ConfigurationError(f"result_limit must be at least 1 character, not {result_limit!r}")
        self.context = context
        self.specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in tools)
        self._limit = result_limit

    async def run(self, calls: Sequence[ToolCall]) -> list[tuple[Message, ToolEvent]]:
        """Run the calls of one turn; answers stand in the order of the calls.

        Raises nothing but `SandboxError` (no tool of the rollout can work) and `CancelledError`, and then nothing
        of the calls goes on, except what can't be stopped: a stuck thread, or an async tool that ignores its
        cancellation for `GRACE` seconds.
        """
        if len(calls) == 1:
            return [await self._answer(calls[0])]
        answers: list[tuple[Message, ToolEvent]] = []
        for group in self._groups(calls):
            if len(group) == 1:
                answers.append(await self._answer(group[0]))
                continue
            gate = asyncio.Semaphore(PARALLEL)
            try:
                async with asyncio.TaskGroup() as side_by_side:
                    tasks = [side_by_side.create_task(self._answer(call, gate)) for call in group]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            answers.extend(task.result() for task in tasks)
        return answers

    def _groups(self, calls: Sequence[ToolCall]) -> Iterator[list[ToolCall]]:
        group: list[ToolCall] = []
        for call in calls:
            tool = self._tools.get(call.name)
            if tool is None or not tool.exclusive:
                group.append(call)
                continue
            if group:
                yield group
                group = []
            yield [call]
        if group:
            yield group

    async def _answer(
        self, call: ToolCall, gate: asyncio.Semaphore | None = None
    ) -> tuple[Message, ToolEvent]:
        if gate is not None:
            async with gate:
                return await self._answer(call)
        started = perf_counter()
        note = error = kind = None
        try:
            tool = self._tools.get(call.name)
            if tool is None:
                raise UnknownToolError(self._unknown(call.name))
            arguments, note = parse_arguments(call.arguments)
            result = await _within_deadline(tool, arguments, self.context)
            if not result.success:
                kind, error = "ToolError", result.error or result.content
            content = result.content
        except SandboxError:
            raise  # no tool of this rollout can work: that is the rollout's failure, not the model's
        except ToolError as raised:
            kind, error = type(raised).__name__, str(raised) or type(raised).__name__
            content = f"Error: {error}"
        except Exception as raised:
            kind, error = type(raised).__name__, _described(raised)
            content = f"Error: {error}"
            logger.info("tool %r raised", call.name, exc_info=True)
        seconds = perf_counter() - started
        message = Message(
            role="tool",
            content=without_surrogates(shortened(content, self._limit)),
            tool_call_id=call.id,
            name=call.name,
            success=error is None,
        )
        event = ToolEvent(
            call_id=call.id,
            name=call.name,
            success=error is None,
            seconds=seconds,
            error=None if error is None else without_surrogates(shortened(error, _ERROR_LIMIT)),
            error_type=kind,
            note=note,
        )
        return message, event

    def _unknown(self, name: str) -> str:
        names = sorted(self._tools)
        near = get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        offered = f"The tools are: {', '.join(names)}." if names else "No tools are offered."
        return f"There is no tool {name!r}.{hint} {offered}"


async def _within_deadline(tool: Tool, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
    """The tool's answer; raises `ToolTimeoutError` when it is late."""
    seconds = tool.timeout
    if not 0 < seconds <= LONGEST:
        seconds = LONGEST
    if getattr(tool, "runs_in_thread", False):
        # Waiting for a thread ends at once when it is cancelled, so it needs no task of its own.
        try:
            async with asyncio.timeout(seconds) as deadline:
                return to_result(await tool.call(arguments, context))
        except TimeoutError:
            if not deadline.expired():
                raise
        raise _late(tool, seconds)

    # The deadline must hold from outside: an async tool that swallows its cancellation would keep its caller.
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ToolResult | None] = loop.create_future()
    timer = loop.call_later(seconds, lambda: ring())

    def ring() -> None:
        nonlocal timer
        if context.setting_up:  # an image is pulled, say, which is not the time of the tool that comes first
            timer = loop.call_later(seconds, ring)
        elif not answer.done():
            answer.set_result(None)

    task = loop.create_task(_call(tool, arguments, context, answer))
    try:
        result = await answer
    except asyncio.CancelledError:
        await _stop(task)
        raise
    finally:
        timer.cancel()
    if result is None:
        await _stop(task)
        raise _late(tool, seconds)
    return result


def _late(tool: Tool, seconds: float) -> ToolTimeoutError:
    return ToolTimeoutError(f"{tool.spec.name} did not end within {seconds:g} s and was given up.")


async def _call(
    tool: Tool, arguments: Mapping[str, Any], context: ToolContext, answer: asyncio.Future[ToolResult | None]
) -> None:
    error: Exception
    try:
        result = to_result(await tool.call(arguments, context))
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except asyncio.CancelledError:
        error = ToolError("the tool cancelled itself")
    except StopIteration as raised:
        error = ToolError(_described(raised))  # can't travel through a future
    except Exception as raised:
        error = raised
    except BaseException as raised:
        # SystemExit and its like would end the event loop; a tool has no say over the process.
        error = ToolError(_described(raised))
    else:
        if not answer.done():
            answer.set_result(result)
        return
    if not answer.done():
        answer.set_exception(error)


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    try:
        await asyncio.wait((task,), timeout=GRACE)
    finally:
        if task.done():
            _end(task)
        else:
            _left_behind.add(task)
            task.add_done_callback(_end)
            logger.warning("an async tool ignores its cancellation and was left behind")


def _end(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as never retrieved


def _described(error: BaseException) -> str:
    """Class and message; the class alone is often all there is (`KeyError: 'x'`)."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = "(its message can't be shown)"
    return f"{name}: {text}" if text else name


def shortened(text: str, limit: int) -> str:
    """`text` with its middle left out, and said so, when it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    tail = limit // 2
    cut = len(text) - limit
    note = f"\n[… {cut:,} of {len(text):,} characters left out here …]\n"
    return text[:head] + note + text[len(text) - tail :]
