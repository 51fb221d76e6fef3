"""What a tool is: a name, a description, a schema, and something that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from taskmill.records import ToolSpec
from taskmill.sandbox.base import Sandbox


class ToolResult(Struct, frozen=True):
    """What a tool says. `content` is the text the model reads; `success` is the tool's own word on how it went."""

    content: str
    success: bool = True
    error: str | None = None


class ToolContext:
    """What a running tool may use: the rollout's sandbox, and a place for state that lives as long as the rollout.

    `sandbox` is made when a tool first asks for it, where a function that makes one was given. `state` is keyed
    by tool or toolset name (the todo list, the shell's directory). Nothing of a context is shared between
    rollouts; `close` ends the sandbox and what runs in it.
    """

    __slots__ = ("_sandbox", "locks", "memory_path", "rollout_id", "state")

    def __init__(
        self, rollout_id: str, sandbox: Sandbox | Callable[[], Sandbox], *, memory_path: str | None = None
    ) -> None:
        self.rollout_id = rollout_id
        self._sandbox = sandbox
        self.memory_path = memory_path
        self.state: dict[str, Any] = {}
        self.locks: dict[str, asyncio.Lock] = {}

    @property
    def sandbox(self) -> Sandbox:
        """The rollout's sandbox. Raises `SandboxError` where it can't be had."""
        if callable(self._sandbox):
            self._sandbox = self._sandbox()
        return self._sandbox

    @property
    def setting_up(self) -> bool:
        """Whether a tool waits for the sandbox to be set up, which has a deadline of its own."""
        return getattr(self._sandbox, "setting_up", False)

    async def close(self) -> None:
        """Kill what the rollout's tools started and delete its workspace. May be called twice."""
        if not callable(self._sandbox):
            await self._sandbox.close()


class Tool(Protocol):
    """One thing an agent can do.

    `exclusive` tools run alone within a turn, in the order of the calls (they change what others see); the
    rest may run side by side. `call` may raise `taskmill.errors.ToolError`; any other exception is a failure
    of the tool as well and is shown to the model as class and message.
    """

    @property
    def spec(self) -> ToolSpec: ...
    @property
    def exclusive(self) -> bool: ...
    @property
    def timeout(self) -> float:
        """Seconds after which a call is given up. Always finite."""
        ...

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run with arguments that were parsed from JSON but not yet checked against the schema."""
        ...
