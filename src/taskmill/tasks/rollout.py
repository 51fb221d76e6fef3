"""One rollout of a task: set up, hold the conversation, finalize, score. Its trace tells all of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from taskmill.errors import (
    ConfigurationError,
    JudgeError,
    RunAbortedError,
    StoreError,
    TaskError,
)
from taskmill.models.base import Model, Reasoning, Sampling
from taskmill.programs.agent import AgentRun, AgentSettings, error_record
from taskmill.records import CallRecord, ErrorRecord, Judgement, Message, Trace
from taskmill.sandbox.base import Sandbox
from taskmill.tasks.judge import judge
from taskmill.tasks.limits import Limits, Spent
from taskmill.tasks.scores import Scores, storable_state
from taskmill.tasks.scoring import Later, call, explained, scorers
from taskmill.tasks.task import Task, TaskData, prompt_messages
from taskmill.tasks.words import a
from taskmill.tools.base import Tool, ToolContext
from taskmill.tools.box import RESULT_LIMIT, ToolBox
from taskmill.tools.function import tool
from taskmill.tools.toolsets import offer

ENDLESS = 1 << 30

MakeSandbox = Callable[[str, TaskData], Sandbox]
"""Makes the sandbox of a rollout (its id, its task's data). Nothing is started before the sandbox is used."""


class RolloutSettings(Struct, frozen=True):
    """What all rollouts of a run share. A `seed` of the sampling becomes another one for each rollout."""

    sampling: Sampling = Sampling()
    reasoning: Reasoning | None = None
    provider: Mapping[str, Any] | None = None
    limits: Limits = Limits()
    tool_result_limit: int = RESULT_LIMIT


class TaskRollout:
    """One rollout under way. `spent` counts for the whole run.

    `judges` are the models of the task's judges by name; where they are `None`, no judge is asked.
    """

    def __init__(
        self,
        task: Task[Any],
        *,
        rollout_id: str,
        model: Model,
        make_sandbox: MakeSandbox,
        number: int = 0,
        attempt: int = 1,
        settings: RolloutSettings | None = None,
        judges: Mapping[str, Model] | None = None,
        spent: Spent | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        settings = settings or RolloutSettings()
        self.task = task
        self._number = number
        self._attempt = attempt
        self._judges = judges
        self._limits = settings.limits
        self._own = Spent(settings.limits)
        self._spent = spent
        self._counted = 0
        self._tool_seconds = 0.0
        self.state: dict[str, Any] = {}
        self._context = ToolContext(rollout_id, lambda: make_sandbox(rollout_id, task.data))
        self._failed = self._cancelled = False
        self._errors: list[ErrorRecord] = []
        tools: list[Tool] = []
        toolsets: tuple[str, ...] = ()
        try:
            tools, toolsets = tools_of(task)
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:
            self._fail(TaskError(f"tools failed: {type(error).__name__}: {error}"))
        self._fields = task.data.fields() if fields is None else fields
        self._agent = AgentRun(
            rollout_id=rollout_id,
            prompt=prompt_messages(task.data),
            model=model,
            tools=ToolBox(tools, self._context, result_limit=settings.tool_result_limit) if tools else None,
            settings=AgentSettings(
                max_iterations=ENDLESS,
                last_answer=False,
                sampling=settings.sampling.for_rollout(rollout_id),
                reasoning=settings.reasoning,
                provider=settings.provider,
            ),
            system=task.data.system_prompt,
            task=self._fields,
            toolsets=toolsets,
            reply=self._reply if task.user is not None else None,
            stop=self._stop if scorers(type(task), "stop") else None,
            limit=self._limit,
        )
        self.offered: Mapping[str, Any] = {
            "task": task,
            "state": self.state,
            "sandbox": Later(lambda: self._context.sandbox),
            "messages": Later(lambda: self._agent.messages),
            # Their own copy of what is not frozen, so that none can change the record.
            "trace": Later(lambda: replace(self.trace(), task=copy.deepcopy(self._fields))),
        }
        """What the task's functions can ask for by name."""
        self._scores = Scores(task, self.offered)

    async def run(self) -> None:
        """Do all of it; whatever it started is dead afterwards. Raises only `StoreError` and `RunAbortedError`."""
        try:
            if self._failed or not await self._part("setup", self.task.data.timeouts.setup):
                return
            await self._converse()
            finalized = await self._part("finalize", self.task.data.timeouts.finalize)
            if finalized and self._agent.failure is None:
                await self._scores.take(None if self._judges is None else self._ask_judge)
        except asyncio.CancelledError:
            self._cancelled = True
            raise
        finally:
            self._count()
            await self._context.close()

    async def check(self) -> None:
        """Call the task's own `validate` instead of a conversation. What was wrong is among the trace's errors."""
        try:
            if not await self._part("setup", self.task.data.timeouts.setup):
                return
            assert self.task.validate is not None
            said = await call(
                self.task.validate, "validate", self.offered, timeout=self.task.data.timeouts.scoring
            )
            if said is not None and not said:
                self._fail(TaskError(f"validate returned {said!r}"))
        except (StoreError, RunAbortedError):
            raise
        except Exception as error:
            self._fail(explained("validate", error))
        finally:
            await self._context.close()

    async def _part(self, name: str, timeout: float) -> bool:
        """Call one of the task's own functions, if it has it; false when it failed, which is then recorded."""
        function = getattr(self.task, name)
        if function is None:
            return True
        try:
            await call(function, name, self.offered, timeout=timeout)
        except (StoreError, RunAbortedError):
            raise
        except Exception as error:
            self._fail(explained(name, error))
            return False
        return True

    def _fail(self, error: TaskError) -> None:
        self._failed = True
        self._errors.append(error_record(error))

    # -- the conversation -------------------------------------------------------------------------------------

    async def _converse(self) -> None:
        self._own.begin()
        ends = self._ends()
        if not ends:
            await self._agent.drive()
            return
        when, why = min(ends)
        try:
            async with asyncio.timeout_at(when) as deadline:
                await self._agent.drive()
        except TimeoutError:
            if not deadline.expired():
                raise
            self._agent.cut(why)

    def _ends(self) -> list[tuple[float, str]]:
        """The moments at which the wall clock would end the conversation, and what that is called."""
        ends = []
        if self._own.deadline is not None:
            ends.append((self._own.deadline, "max_seconds"))
        if self._spent is not None and self._spent.deadline is not None:
            ends.append((self._spent.deadline, "run_max_seconds"))
        own = self.task.data.timeouts.conversation
        if own is not None:
            ends.append((asyncio.get_running_loop().time() + own, "task_timeout"))
        return ends

    def _limit(self, agent: AgentRun) -> str | None:
        self._count()
        return self._own.reached() or (None if self._spent is None else self._spent.reached())

    def _count(self) -> None:
        calls: Sequence[CallRecord] = self._agent.calls
        if len(calls) > self._counted or self._agent.tool_seconds > self._tool_seconds:
            new, tools = calls[self._counted :], self._agent.tool_seconds - self._tool_seconds
            self._counted, self._tool_seconds = len(calls), self._agent.tool_seconds
            self._own.add(new, tool_seconds=tools)
            if self._spent is not None:
                self._spent.add([made for made in new if not made.replayed], tool_seconds=tools)

    async def _reply(self, agent: AgentRun) -> Sequence[Message]:
        assert self.task.user is not None
        try:
            said = await call(self.task.user, "user", self.offered, timeout=self.task.data.timeouts.scoring)
            return _as_messages(said)
        except Exception as error:
            raise explained("user", error) from error

    async def _stop(self, agent: AgentRun) -> str | None:
        for scorer in scorers(type(self.task), "stop"):
            what = f"stop condition {scorer.name!r}"
            try:
                function = getattr(self.task, scorer.name)
                said = await call(function, what, self.offered, timeout=self.task.data.timeouts.scoring)
                if said:
                    return said if isinstance(said, str) else scorer.name
            except Exception as error:
                raise explained(what, error) from error
        return None

    # -- scoring ----------------------------------------------------------------------------------------------

    async def _ask_judge(self, name: str) -> Judgement:
        assert self._judges is not None
        if name not in self._judges:
            raise JudgeError(
                f"judge {name!r} is not among the judges of the run: {', '.join(self._judges) or 'none'}"
            )
        said = await judge(name, self.task.config.judges[name], self._judges[name], self.task, self.trace())
        if self._spent is not None:
            self._spent.add([said.call])
        return said

    # -- the record -------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """The record of what was had so far; a rollout that did not come to its end counts as cancelled."""
        had, scores = self._agent.trace(), self._scores
        state, reason = had.state, had.stop_reason
        if self._cancelled:  # perhaps after the conversation: it has no score then
            state = reason = "cancelled"
        elif self._failed:
            state, reason = "failed", "error"
        elif scores.errors:  # the conversation keeps its ending, and can be scored again
            state = "failed"
        return replace(
            had,
            state=state,
            stop_reason=reason,
            errors=(*had.errors, *self._errors, *scores.errors),
            rewards=dict(scores.rewards),
            metrics=dict(scores.metrics),
            reward=None if self._cancelled else scores.total,
            judgements=tuple(scores.judgements),
            number=self._number,
            attempt=self._attempt,
            task_state=storable_state(self.state),
        )


def tools_of(task: Task[Any]) -> tuple[list[Tool], tuple[str, ...]]:
    """The tools a task offers, and the toolsets they are from. Raises `ConfigurationError` for what is no tool."""
    tools: list[Tool] = []
    toolsets: list[str] = []
    for entry in task.tools():
        if isinstance(entry, str):
            offered = offer([entry])
            if offered.left_out:
                name, lacks = next(iter(offered.left_out.items()))
                raise ConfigurationError(
                    f"task {task.data.idx} offers the toolset {name!r}, which can't be had: {lacks}"
                )
            tools.extend(offered.tools)
            toolsets.extend(offered.toolsets)
        elif hasattr(entry, "spec"):
            tools.append(entry)
        elif callable(entry):
            tools.append(tool(entry))
        else:
            raise ConfigurationError(f"task {task.data.idx} offers {entry!r}, which is no tool")
    return tools, tuple(toolsets)


def _as_messages(said: Any) -> list[Message]:
    if said is None:
        return []
    turns = said if isinstance(said, list | tuple) else [said]
    messages = [Message("user", turn) if isinstance(turn, str) else turn for turn in turns]
    for message in messages:
        if not isinstance(message, Message):
            raise TaskError(f"user said {a(message)}; a text, a Message or a list of them is needed")
        if not isinstance(message.content, str):
            raise TaskError(f"user said a Message whose content is {message.content!r}; a text is needed")
    return messages
