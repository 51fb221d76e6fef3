"""`AIAgent`: one conversation at a time with a model that has tools."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import msgspec

from taskmill.errors import ConfigurationError, RunAbortedError
from taskmill.models.base import Model, Reasoning, Sampling
from taskmill.models.families import routing
from taskmill.programs.agent import AgentRun, AgentSettings
from taskmill.programs.chat import from_chat, to_chat
from taskmill.programs.context import context_text, data_home
from taskmill.programs.row import usage_fields
from taskmill.programs.sharegpt import to_sharegpt
from taskmill.records import Message, Trace
from taskmill.sandbox.base import SandboxFactory, SandboxLimits
from taskmill.sandbox.choose import Kind
from taskmill.tools.base import Tool, ToolContext

_log = logging.getLogger(__name__)

SAMPLES = "trajectory_samples.jsonl"
FAILED_SAMPLES = "failed_trajectories.jsonl"
WORKSPACES_KEPT = 8
"""Task ids whose workspaces are there for another conversation; those used longest ago are removed."""


class AIAgent:
    """A model with tools that holds conversations, one after another; two callers wait for each other.

    Nothing is opened before the first conversation. Use it as an async context manager, or call `close`.
    Tools work in a workspace of the agent's own, which is gone when the agent is closed.

    The positional arguments are those of the field's agents. Not skipped, the context files of the working
    directory (`AGENTS.md` and its like) and the notes kept by the `memory` tool are part of the system prompt
    that is sent; like `ephemeral_system_prompt` and `prefill_messages` they never stand in a record.

    Args:
        model: a name at the endpoint `base_url`, or a model object; `None` is the embedded model.
        max_iterations: model calls of a conversation before it is asked for its answer.
        enabled_toolsets: names of toolsets to offer; `None` is all there are.
        disabled_toolsets: toolsets whose tools are not offered, whatever else offers them.
        reasoning_config: `{"enabled": bool, "effort": "none" … "max"}`.
        save_trajectories: append each conversation to `trajectory_samples.jsonl` in the current directory, or
            to `failed_trajectories.jsonl` when it did not complete.
        tools: own tools, offered besides the toolsets.
        cwd: the directory commands start in, as in a row of a batch: relative, it is made in the workspace;
            absolute, it is copied there. Context files are looked for in it, else in the current directory.
        image: container image for the workspace.
        sandbox: what confines the commands: `auto`, `bubblewrap`, `plain` or `docker`.
        memory_path: file of the notes, by default `memory.md` under `TASKMILL_HOME`.
        prices: US dollars per million tokens by model, for what the price table doesn't know.
        clock: seconds, for durations. now: this moment.

    Raises:
        ConfigurationError: naming the argument, and what would do.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        model: str | Model | None = None,
        max_iterations: int = 30,
        enabled_toolsets: Sequence[str] | None = None,
        disabled_toolsets: Sequence[str] | None = None,
        ephemeral_system_prompt: str | None = None,
        max_tokens: int | None = None,
        reasoning_config: Mapping[str, Any] | None = None,
        prefill_messages: Sequence[Mapping[str, Any] | Message] | None = None,
        save_trajectories: bool = False,
        skip_context_files: bool = False,
        skip_memory: bool = False,
        providers_allowed: Sequence[str] | None = None,
        providers_ignored: Sequence[str] | None = None,
        providers_order: Sequence[str] | None = None,
        provider_sort: str | None = None,
        *,
        tools: Sequence[Tool] = (),
        cwd: str | None = None,
        image: str | None = None,
        sandbox: Kind = "auto",
        sandbox_limits: SandboxLimits | None = None,
        memory_path: str | Path | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        prices: Mapping[str, Mapping[str, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        _require_count("max_iterations", max_iterations)
        if max_tokens is not None:
            _require_count("max_tokens", max_tokens)
        self._settings = AgentSettings(
            max_iterations=max_iterations,
            sampling=Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed),
            reasoning=reasoning_of(reasoning_config),
            provider=routing(
                only=providers_allowed, ignore=providers_ignored, order=providers_order, sort=provider_sort
            ),
        )
        self._enabled = None if enabled_toolsets is None else _expanded("enabled_toolsets", enabled_toolsets)
        self._disabled = _expanded("disabled_toolsets", disabled_toolsets or ())
        self._prefill = from_chat(prefill_messages or (), field="prefill_messages")
        self._ephemeral = ephemeral_system_prompt
        self._save_trajectories = save_trajectories
        self._skip_context_files = skip_context_files
        self._skip_memory = skip_memory
        self._own_tools = tuple(tools)
        self._cwd = cwd
        self._image = image
        if sandbox not in get_args(Kind):
            raise ConfigurationError(f"sandbox={sandbox!r} must be one of {', '.join(get_args(Kind))}")
        self._sandbox_kind: Kind = sandbox
        self._sandbox_limits = sandbox_limits or SandboxLimits()
        self._memory_path = Path(memory_path) if memory_path is not None else None
        self._given_model = model
        self._base_url = base_url
        self._api_key = api_key
        self._prices = prices
        self._clock = clock
        self._now = now

        self._turn = asyncio.Lock()
        self._model: Model | None = None
        self._tools: tuple[Tool, ...] | None = None
        self._toolsets: tuple[str, ...] = ()
        self._directory: Path | None = None
        self._sandboxes: SandboxFactory | None = None
        self._contexts: dict[str | None, ToolContext] = {}
        self._closed = False

    # -- conversations ----------------------------------------------------------------------------------------

    async def run_conversation(
        self,
        user_message: str,
        system_message: str | None = None,
        conversation_history: Sequence[Mapping[str, Any] | Message] | None = None,
        task_id: str | None = None,
    ) -> dict[str, Any]:
        """Hold one conversation to its end.

        `conversation_history` is chat messages from before, such as the `messages` of an earlier result.
        Conversations of one `task_id` share a workspace, and so do all those without. The workspaces of the
        eight task ids used last are kept; a task id from before them starts anew.

        Returns:
            `final_response`, `messages` (the conversation as chat messages), `completed`, `partial`,
            `api_calls`; and `stop_reason`, `error` (what failed, or `None`), `usage` (tokens), `cost` (US
            dollars, `None` where a price is unknown) and `trace`, the whole record.
        """
        run = await self._converse(user_message, system_message, conversation_history, task_id)
        trace = run.trace()
        error = trace.errors[-1] if trace.errors else None
        return {
            "final_response": run.final_response,
            "messages": to_chat(trace.messages),
            "completed": trace.state == "completed",
            "partial": trace.state == "partial",
            "api_calls": len(trace.calls),
            "stop_reason": trace.stop_reason,
            "error": None if error is None else f"{error.type}: {error.message}",
            "usage": usage_fields(trace.usage),
            "cost": trace.cost,
            "trace": trace,
        }

    async def chat(self, message: str) -> str:
        """Say one thing and get the answer; nothing is remembered from one `chat` to the next.

        Raises what ended the conversation where it failed (a `ModelError`, say).
        """
        run = await self._converse(message, None, None, None)
        if run.failure is not None:
            raise run.failure
        return run.final_response

    async def _converse(
        self,
        user_message: str,
        system_message: str | None,
        conversation_history: Sequence[Mapping[str, Any] | Message] | None,
        task_id: str | None,
    ) -> AgentRun:
        if not isinstance(user_message, str) or not user_message.strip():
            raise ConfigurationError(f"user_message={user_message!r:.80} must be a text that is not blank")
        history = from_chat(conversation_history or (), field="conversation_history")
        if history and history[0].role == "system":
            system_message = history[0].content if system_message is None else system_message
            history = history[1:]
        async with self._turn:
            run = await self._prepare(user_message, system_message, history, task_id)
            try:
                await run.drive()
            finally:
                # Also for a conversation that is cancelled: what was said so far was said.
                if self._save_trajectories:
                    self._save(run.trace())
        return run

    async def _prepare(
        self, prompt: str, system: str | None, history: Sequence[Message], task_id: str | None
    ) -> AgentRun:
        from taskmill.tools.box import ToolBox

        if self._closed:
            raise RunAbortedError("this agent was closed; make a new one")
        model = self._open_model()
        tools = self._open_tools()
        rollout_id = task_id or f"conversation-{uuid.uuid4().hex}"
        hidden = await asyncio.to_thread(self._hidden_system)
        return AgentRun(
            rollout_id=rollout_id,
            prompt=prompt,
            model=model,
            tools=ToolBox(tools, await self._context(task_id, rollout_id)) if tools else None,
            settings=self._settings,
            system=system,
            hidden_system=hidden,
            prefill=self._prefill,
            history=history,
            toolsets=self._toolsets,
            clock=self._clock,
            now=self._now,
        )

    def _hidden_system(self) -> str:
        """What is sent as system prompt besides the user's own: read anew for each conversation."""
        from taskmill.tools.memory import notes_text

        parts = []
        if not self._skip_context_files:
            absolute = self._cwd is not None and Path(self._cwd).is_absolute()
            parts.append(context_text(Path(self._cwd or "") if absolute else Path.cwd()))
        if not self._skip_memory and (notes := notes_text(self._notes_path())):
            parts.append(f"What you noted in earlier conversations:\n\n{notes}")
        parts.append(self._ephemeral or "")
        return "\n\n".join(part for part in parts if part)

    def _notes_path(self) -> Path:
        return self._memory_path or data_home() / "memory.md"

    def _save(self, trace: Trace) -> None:
        """Append the conversation; one write, which a cancellation can't cut."""
        from taskmill.store.files import append_shared
        from taskmill.store.jsonl import encode_row

        completed = trace.state == "completed"
        row = {
            "conversations": to_sharegpt(trace.messages, trace.tools),
            "timestamp": self._now().isoformat(timespec="milliseconds"),
            "model": trace.model,
            "completed": completed,
        }
        append_shared(Path.cwd() / (SAMPLES if completed else FAILED_SAMPLES), encode_row(row))

    # -- what it works with -----------------------------------------------------------------------------------

    def _open_model(self) -> Model:
        if self._model is None:
            from taskmill.models.choose import open_model

            self._model = open_model(
                self._given_model, base_url=self._base_url, api_key=self._api_key, prices=self._prices
            )
        return self._model

    def _open_tools(self) -> tuple[Tool, ...]:
        if self._tools is None:
            from taskmill.tools.toolsets import TOOLSETS, expand, offer

            asked = TOOLSETS if self._enabled is None else self._enabled
            refused = {*self._disabled, *(("memory",) if self._skip_memory else ())}
            offered = offer(name for name in expand(asked) if name not in refused)
            for name, reason in offered.left_out.items():
                level = logging.DEBUG if self._enabled is None else logging.WARNING
                _log.log(level, "toolset %r is left out: %s", name, reason)
            self._tools = (*offered.tools, *self._own_tools)
            self._toolsets = (*offered.toolsets, *(("own",) if self._own_tools else ()))
        return self._tools

    async def _context(self, task_id: str | None, rollout_id: str) -> ToolContext:
        context = self._contexts.pop(task_id, None)
        if context is None:
            if self._sandboxes is None:
                from taskmill.sandbox.choose import open_sandboxes

                self._directory = Path(tempfile.mkdtemp(prefix="taskmill-"))
                self._sandboxes = open_sandboxes(
                    self._sandbox_kind, directory=self._directory, limits=self._sandbox_limits
                )
            sandbox = self._sandboxes.create(rollout_id, image=self._image, cwd=self._cwd)
            notes = None if self._skip_memory else str(self._notes_path())
            context = ToolContext(rollout_id, sandbox, memory_path=notes)
        self._contexts[task_id] = context
        named = [(task, kept) for task, kept in self._contexts.items() if task is not None]
        for longest_ago, kept in named[:-WORKSPACES_KEPT]:
            await kept.close()
            self._contexts.pop(longest_ago, None)
        return context

    # -- the end ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End what the tools started, remove their workspaces, close the model opened here. Twice is fine."""
        self._closed = True
        contexts, self._contexts = self._contexts, {}
        model, self._model = self._model, None
        directory, self._directory = self._directory, None
        try:
            for context in contexts.values():
                await context.close()
        finally:
            if directory is not None:
                from taskmill.store.files import remove_tree

                await asyncio.to_thread(remove_tree, directory)
            if model is not None and model is not self._given_model:
                await model.close()

    async def __aenter__(self) -> AIAgent:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def reasoning_of(config: Mapping[str, Any] | None) -> Reasoning | None:
    """The reasoning setting a request carries; raises `ConfigurationError` for what is none."""
    if config is None:
        return None
    wanted = "reasoning_config must be {'enabled': bool, 'effort': none|minimal|low|medium|high|xhigh|max}"
    if not isinstance(config, Mapping) or not config.keys() <= {"enabled", "effort"}:
        raise ConfigurationError(f"{wanted}, not {config!r}")
    try:
        return msgspec.convert(dict(config), Reasoning)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{wanted}: {error}") from None


def _expanded(field: str, names: Sequence[str]) -> tuple[str, ...]:
    """Toolset names without composites; raises `ConfigurationError` naming `field` and the nearest name."""
    from taskmill.tools.toolsets import expand

    if isinstance(names, str):
        raise ConfigurationError(f"{field}={names!r} must be a list of names, such as [{names!r}]")
    try:
        return tuple(expand(names))
    except ConfigurationError as error:
        raise ConfigurationError(f"{field}: {error}") from None


def _require_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{field}={value!r} must be a whole number of at least 1")
