"""One rollout of a taskset's run, whose calls are paid for once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from taskmill.models.base import Completion, Model
from taskmill.models.journaled import Journaled
from taskmill.records import Trace
from taskmill.store.run import RunDirectory
from taskmill.tasks.limits import Spent
from taskmill.tasks.rollout import RolloutSettings, TaskRollout
from taskmill.tasks.task import Task


class Rollout:
    """One rollout of a run, its calls kept in the journal of the run until its trace is on disk."""

    def __init__(
        self,
        task: Task[Any],
        *,
        fields: Mapping[str, Any],
        id: str,
        number: int,
        attempt: int,
        model: Model,
        judges: Mapping[str, Model],
        directory: RunDirectory,
        make_sandbox: Any,
        settings: RolloutSettings,
        spent: Spent,
        on_answer: Callable[[Completion], None],
    ) -> None:
        journal = directory.journal
        self._model = Journaled(model, journal, id, attempt=attempt, on_answer=on_answer)
        self._judges = {
            name: Journaled(judge, journal, f"{id}#{name}", attempt=attempt, on_answer=on_answer)
            for name, judge in judges.items()
        }
        self._rollout = TaskRollout(
            task,
            rollout_id=id,
            number=number,
            attempt=attempt,
            model=self._model,
            judges=self._judges,
            make_sandbox=make_sandbox,
            settings=settings,
            spent=spent,
            fields=fields,
        )

    async def run(self) -> None:
        """See `TaskRollout.run`."""
        await self._rollout.run()

    def trace(self) -> Trace:
        """The record of what was had so far, with the calls it adds to the bill."""
        trace = self._rollout.trace()
        journaled = (self._model, *self._judges.values())
        lost = tuple(left.call_record() for model in journaled for left in model.let_go())
        # A judge's answer from the journal that no earlier record was billed for is billed now.
        judgements = tuple(
            replace(said, call=replace(said.call, replayed=False))
            if said.call.replayed and not self._judges[said.judge].billed_before
            else said
            for said in trace.judgements
        )
        return replace(trace, billed_before=self._model.billed_before, lost_calls=lost, judgements=judgements)
