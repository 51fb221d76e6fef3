"""One row: its workspace, its tools, its conversation, and the record that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from taskmill.batch.settings import BatchSettings
from taskmill.batch.toolkit import Toolkit
from taskmill.engine.dataset import PromptRow, extra_json, task_fields
from taskmill.models.base import Completion, Model
from taskmill.models.journaled import Journaled
from taskmill.programs.agent import AgentRun, AgentSettings
from taskmill.programs.row import trajectory_row, usage_fields
from taskmill.records import State, Trace
from taskmill.sandbox.base import SandboxFactory
from taskmill.store.journal import CallJournal
from taskmill.store.ledger import PlannedRow
from taskmill.tools.base import ToolContext
from taskmill.tools.box import ToolBox

NO_REASONING = "no_reasoning"


class Rolled(NamedTuple):
    """A row that ran: its trace, the state it is recorded with, why it is discarded (else empty), and its bill."""

    trace: Trace
    state: State
    reason: str
    billed: Mapping[str, Any]


class RowMill:
    """Everything the rows of a run share."""

    def __init__(
        self,
        settings: BatchSettings,
        *,
        model: Model,
        journal: CallJournal,
        sandboxes: SandboxFactory,
        toolkit: Toolkit,
        on_answer: Callable[[Completion], None] | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._on_answer = on_answer
        self._journal = journal
        self._sandboxes = sandboxes
        self._toolkit = toolkit
        self._prefill = settings.prefill()
        self._agent = AgentSettings(
            max_iterations=settings.max_iterations,
            sampling=settings.sampling(),
            reasoning=settings.reasoning(),
            provider=settings.provider(),
        )

    def start(self, planned: PlannedRow, row: PromptRow, attempt: int) -> RowRun:
        """Set a row up for its attempt of that number; nothing runs yet."""
        rollout_id = planned.rollout_id
        toolsets, tools = self._toolkit.draw(rollout_id)
        make_sandbox = partial(self._sandboxes.create, rollout_id, image=row.image, cwd=row.cwd)
        context = ToolContext(rollout_id, make_sandbox)
        box = ToolBox(tools, context, result_limit=self._settings.tool_result_limit)
        model = Journaled(self._model, self._journal, rollout_id, attempt=attempt, on_answer=self._on_answer)
        agent = AgentRun(
            rollout_id=rollout_id,
            prompt=row.prompt,
            model=model,
            tools=box if tools else None,
            settings=self._agent_for(rollout_id),
            hidden_system=self._settings.ephemeral_system_prompt,
            prefill=self._prefill,
            task=task_fields(row),
            toolsets=toolsets,
        )
        return RowRun(agent, box, model, self._settings.discard_without_reasoning)

    def _agent_for(self, rollout_id: str) -> AgentSettings:
        sampling = self._agent.sampling.for_rollout(rollout_id)
        return self._agent if sampling is self._agent.sampling else replace(self._agent, sampling=sampling)

    def record(
        self,
        rolled: Rolled,
        planned: PlannedRow,
        row: PromptRow,
        *,
        batch: int,
        timestamp: str,
    ) -> dict[str, Any]:
        """The row as it is stored: in a shard, or as an outcome."""
        return trajectory_row(
            rolled.trace,
            prompt_index=planned.index,
            batch_num=batch,
            known_tools=self._toolkit.known_tools,
            timestamp=timestamp,
            task_key=planned.key.hex(),
            task_detail=planned.detail.hex(),
            row=extra_json(row),
            billed=rolled.billed,
        )


class RowRun:
    """One row under way."""

    def __init__(
        self, agent: AgentRun, box: ToolBox, model: Journaled, discard_without_reasoning: bool
    ) -> None:
        self._agent = agent
        self._box = box
        self._model = model
        self._discard = discard_without_reasoning

    async def drive(self) -> None:
        """Hold the conversation; whatever it started is dead afterwards."""
        try:
            await self._agent.drive()
        finally:
            await self._box.context.close()

    def result(self) -> Rolled:
        """What was had so far, and how it is recorded."""
        trace = self._agent.trace()
        bill = billed(trace, self._model)
        if self._discard and trace.state in ("completed", "partial") and not trace.has_reasoning:
            return Rolled(trace, "discarded", NO_REASONING, bill)
        return Rolled(trace, trace.state, "", bill)


def billed(trace: Trace, model: Journaled) -> Mapping[str, Any]:
    """What a record adds to the bill: calls that no earlier record of the rollout was billed for.

    The attempt after a failed one replays its calls from the journal, and they must not be paid for twice in the
    sums; calls that a kill left without a record are billed here, even where the conversation went another way.
    """
    let_go = model.let_go()
    if model.billed_before or let_go:
        left = tuple(completion.call_record() for completion in let_go)
        trace = replace(trace, calls=(*trace.calls[model.billed_before :], *left))
    priced = [call.cost for call in trace.calls if call.cost is not None]
    return {
        "calls": len(trace.calls),
        "usage": usage_fields(trace.usage),
        "cost": float(sum(priced)) if priced else None,
        "unpriced_calls": len(trace.calls) - len(priced),
    }
