"""One execution of a taskset's run: draw tasks, roll out what is not done, score, record each end, sum up."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from taskmill._version import __version__
from taskmill.engine.collector import patient_collector
from taskmill.engine.gate import FailureGate
from taskmill.engine.progress import Progress
from taskmill.engine.sandboxes import SandboxSource
from taskmill.engine.scheduler import run_lanes
from taskmill.engine.sessions import last_write, now
from taskmill.errors import ModelError, RunAbortedError, StoreError, TasksetError
from taskmill.evaluation.begun import Begun
from taskmill.evaluation.rollout import Rollout
from taskmill.evaluation.settings import EvalSettings
from taskmill.evaluation.stored import StoredRollouts, rollout_id
from taskmill.evaluation.summary import summarize
from taskmill.models.base import Model
from taskmill.programs.agent import error_record
from taskmill.records import DONE_STATES, ErrorRecord, Trace
from taskmill.store.jsonl import content_hash, encode_json, encode_row
from taskmill.store.run import RunDirectory
from taskmill.tasks.groups import has_group_rewards, score_group
from taskmill.tasks.limits import Spent
from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Draw, Taskset

MODEL_ERRORS = frozenset(
    {ModelError.__name__, *(kind.__name__ for kind in ModelError.__subclasses__())}
    | {kind.__name__ for parent in ModelError.__subclasses__() for kind in parent.__subclasses__()}
)
"""Errors that say something about the model or its endpoint. Many of them end the run; a task's own errors do not."""


SURPLUS = (
    "this run has rollouts of tasks that the taskset no longer gives: its tasks were changed or removed since. They "
    "stay in traces.jsonl and in the bill, and are left out of the means and counts; for the new tasks alone, start a "
    "new run, without --resume"
)

RESCORED = (
    "the taskset's code changed since this run began; rollouts that are done keep their old rewards: "
    "`taskmill replay {path}` scores all again"
)


class Lane(NamedTuple):
    """What runs together: rollouts of one task, one of them, or all where they are scored as a group."""

    task: Task[Any]
    fields: Mapping[str, Any]
    hash: str
    numbers: Sequence[int]
    is_group: bool


class EvalRun:
    """One execution, on a run's directory. What is stored there is taken up. Used once.

    `begun` is the draw of the tasks. `rescored` says that the scoring is another one than the run began with.
    """

    def __init__(
        self,
        taskset: Taskset[Any],
        settings: EvalSettings,
        *,
        directory: RunDirectory,
        progress: Progress,
        model: Model,
        judges: Mapping[str, Model],
        begun: Begun,
        rescored: bool = False,
    ) -> None:
        self._taskset = taskset
        self._begun = begun
        self._rescored = rescored
        self._settings = settings
        self._directory = directory
        self._progress = progress
        self._model = model
        self._judges = judges
        self._told = settings.rollout()
        self._stored = StoredRollouts()
        self._spent = Spent(settings.run_limits, "run_")
        self._gate = FailureGate(settings.max_failures)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._sandboxes = SandboxSource(settings.sandbox, directory.path / "workspaces", self._tell)
        self._drawn = self._planned = self._reused = 0
        self._exhausted = self._told_of_surplus = False
        self.summary: dict[str, Any] = {}
        self._problem: BaseException | None = None
        self._spoilt: TasksetError | None = None

    async def carry_out(self) -> dict[str, Any]:
        """Run what is not done; gives the summary, which is on disk by then.

        Raises `RunAbortedError` when the model failed too often, after everything was written.
        """
        directory, settings = self._directory, self._settings
        await self._stored.read(directory, num_rollouts=settings.num_rollouts, spent=self._spent)
        await directory.journal.open(lambda id: not self._stored.has(id.partition("#")[0]))
        tasks = self._draw()
        if self._rescored and self._stored.count:
            self._tell("warning", RESCORED.format(path=shlex.quote(str(directory.path))))
        self._planned = tasks.total or settings.num_tasks or 0
        self._progress.begin(self._planned * settings.num_rollouts, self._stored.count)
        self._session(
            "start",
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
            last_write=last_write(directory.path),
            planned=self._progress.total or None,
        )
        outcome = "failed"
        try:
            with patient_collector():
                await self._run(tasks)
            if self._spoilt is not None:
                raise self._spoilt
            outcome = (
                "gave_up"
                if self._gate.closed
                else "finished"
                if self._exhausted
                else self._spent.reached() or "finished"
            )
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            await self._end(outcome)
        self._raise_problem()
        if outcome == "gave_up":
            raise RunAbortedError(self._gate.reason())
        return self.summary

    def _draw(self) -> Draw[Any]:
        for message in self._begun.warnings:
            self._tell("warning", message)
        return self._begun.tasks

    async def _run(self, tasks: Draw[Any]) -> None:
        self._spent.begin()
        await self._sandboxes.sweep()
        try:
            await run_lanes(
                self._lanes(tasks),
                self._run_lane,
                window=self._settings.concurrency,
                stop=lambda: self._gate.closed or self._spent.reached() is not None,
            )
        finally:
            self._sandboxes.close()

    def _lanes(self, tasks: Iterator[Task[Any]]) -> Iterator[Lane]:
        """What is not done, task by task, as there is a place for it."""
        rollouts = self._settings.num_rollouts
        while True:
            try:
                task = next(tasks)
            except StopIteration:
                self._all_drawn()
                self._progress.total = self._drawn * rollouts
                return
            except TasksetError as problem:  # raised when what is under way has ended: it was paid for
                self._spoilt = problem
                return
            try:
                fields = task.data.fields()
                hash = content_hash(fields).hex()
            except Exception as problem:
                idx, told = task.data.idx, f"{type(problem).__name__}: {problem}"
                self._spoilt = TasksetError(f"the data of task {idx} can't be stored: {told}")
                return
            missing = self._missing(hash)
            if not missing:
                continue
            if has_group_rewards(task):
                yield Lane(task, fields, hash, range(rollouts), True)
                continue
            for number in missing:
                yield Lane(task, fields, hash, (number,), False)

    def _missing(self, task: str) -> list[int]:
        """Which rollouts of a task that was drawn are not done. The others are counted as reused."""
        self._drawn += 1
        missing = self._stored.missing(task, self._settings.num_rollouts)
        self._reused += self._stored.done(task)
        if (
            self._told_of_surplus
        ):  # until then what is stored is as good as drawn, and the time left is told better
            self._progress.reused = self._reused
        elif self._planned and self._stored.has_surplus(self._planned - self._drawn):
            self._tell_surplus()
        return missing

    def _all_drawn(self) -> None:
        self._exhausted = True
        if self._stored.has_surplus(0):
            self._tell_surplus()

    def _tell_surplus(self) -> None:
        if not self._told_of_surplus:
            self._told_of_surplus = True
            self._progress.reused = self._reused
            self._tell("warning", SURPLUS)

    async def _run_lane(self, lane: Lane) -> None:
        self._raise_problem()
        if not lane.is_group:
            async with self._places:
                rollout = self._start(lane, lane.numbers[0])
                try:
                    trace = await self._carry_through(rollout)
                except asyncio.CancelledError:
                    self._record(rollout.trace())
                    raise
                self._record(trace)
            return
        started = [self._start(lane, number) for number in lane.numbers]
        async with asyncio.TaskGroup() as group:
            done = [group.create_task(self._in_place(rollout)) for rollout in started]
        for trace in await score_group(lane.task, [task.result() for task in done]):
            self._record(trace)

    async def _in_place(self, rollout: Rollout) -> Trace:
        async with self._places:
            return await self._carry_through(rollout)

    def _start(self, lane: Lane, number: int) -> Rollout:
        return Rollout(
            lane.task,
            fields=lane.fields,
            id=rollout_id(lane.hash, number),
            number=number,
            attempt=self._stored.attempt(rollout_id(lane.hash, number)),
            model=self._model,
            judges=self._judges,
            directory=self._directory,
            make_sandbox=self._sandboxes.make,
            settings=self._told,
            spent=self._spent,
            on_answer=self._progress.answered,
        )

    async def _carry_through(self, rollout: Rollout) -> Trace:
        self._progress.in_flight += 1
        try:
            await rollout.run()
            return rollout.trace()
        except (StoreError, RunAbortedError):
            raise
        except Exception as error:
            trace = rollout.trace()
            errors = (*trace.errors, error_record(error))
            return replace(trace, state="failed", stop_reason="error", reward=None, errors=errors)
        finally:
            self._progress.in_flight -= 1

    # -- recording --------------------------------------------------------------------------------------------

    def _record(self, trace: Trace) -> None:
        """Store how a rollout ended. Written when this returns; acknowledged once it is on disk."""
        acknowledged = asyncio.ensure_future(self._directory.append_trace(encode_row(trace)))
        self._judge(trace)
        acknowledged.add_done_callback(partial(self._acknowledged, trace))

    def _judge(self, trace: Trace) -> None:
        if trace.state == "cancelled":
            return
        error = trace.errors[-1] if trace.errors else ErrorRecord("Unknown", "no error was recorded")
        if trace.state == "failed":
            idx = trace.task.get("idx")
            self._directory.note(
                f"{now()} task {idx} rollout {trace.number} failed: {error.type}: {error.message}"
            )
        if trace.state != "failed" or error.type not in MODEL_ERRORS:
            self._gate.succeeded()
        elif self._gate.fail(error):
            self._progress.first_error = f"{error.type}: {error.message}"
            self._progress.tell(
                "first_error", idx=trace.task.get("idx"), type=error.type, message=error.message
            )

    def _acknowledged(self, trace: Trace, done: asyncio.Future[None]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        try:
            if trace.state in DONE_STATES:
                self._directory.journal.forget(trace.id)
                for name in self._judges:
                    self._directory.journal.forget(f"{trace.id}#{name}")
            billed = trace.billed
            self._progress.recorded(
                trace.state,
                calls=len(billed),
                tool_calls=len(trace.tool_events),
                tokens=sum(call.usage.input_tokens + call.usage.output_tokens for call in billed),
                cost=_sum_of_costs(billed),
                rollout_id=trace.id,
                idx=trace.task.get("idx"),
                number=trace.number,
                reward=trace.reward,
                reason=trace.stop_reason,
                error=trace.errors[-1].type if trace.errors and trace.state == "failed" else None,
            )
        except Exception as problem:  # raised again where it ends the run: here, the loop would only log it
            self._problem = self._problem or problem

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    # -- the end ----------------------------------------------------------------------------------------------

    async def _end(self, outcome: str) -> None:
        directory = self._directory
        if directory.commit.failed is not None:
            return
        await directory.commit.flush()
        self._session("end", outcome=outcome)
        planned = self._drawn if self._exhausted else max(self._planned, self._drawn)
        self.summary = await asyncio.to_thread(
            summarize,
            directory,
            planned=planned * self._settings.num_rollouts,
            num_rollouts=self._settings.num_rollouts,
            pass_reward=self._settings.pass_reward,
            surplus=self._stored.surplus() if self._exhausted else (),
            outcome=outcome,
        )
        directory.write_file("summary.json", encode_json(self.summary))
        await directory.commit.flush()

    def _session(self, event: str, **fields: Any) -> None:
        self._directory.append_session(encode_row({"event": event, "at": now(), **fields}))
        self._directory.note(
            f"{now()} {event} {' '.join(f'{name}={value}' for name, value in fields.items())}"
        )

    def _tell(self, event: str, message: str) -> None:
        self._directory.note(f"{now()} {event}: {message}")
        self._progress.tell(event, message=message)


def _sum_of_costs(calls: Sequence[Any]) -> float | None:
    priced = [call.cost for call in calls]
    return None if None in priced else float(sum(priced))
