"""One execution of a run: draw jobs, hold those that are not done, record each end, sum up."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from taskmill._version import __version__
from taskmill.conversations.health import Health
from taskmill.conversations.jobs import Job, Plan
from taskmill.conversations.record import Held, decode_head, decode_held, encoded, unheld
from taskmill.conversations.report import MemoryResults, RunReport, StoredResults, read_index, rebuilder
from taskmill.engine.collector import patient_collector
from taskmill.engine.gate import HOPELESS
from taskmill.engine.progress import Progress
from taskmill.engine.scheduler import run_lanes
from taskmill.engine.sessions import last_write, now
from taskmill.errors import ConfigurationError, RunAbortedError, RunChangedError
from taskmill.programs.agent import error_record
from taskmill.records import ErrorRecord
from taskmill.store.index import JobIndex, StoredRow
from taskmill.store.jsonl import canonical, encode_json, encode_row
from taskmill.store.run import RunDirectory

YIELD_EVERY = 500
"""Jobs that were done before between two looks at the event loop, so that an interrupt is answered at once."""

HOPELESS_AFTER = 8
"""Jobs after which a run is given up where all of them met an error that every later one would meet as well."""


class Hands(Protocol):
    """Who holds the jobs: this process, or workers."""

    window: int

    async def hold(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Held:
        """Hold one job to its end, however it ends. Raises only what ends the run."""
        ...

    def cut(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Held | None:
        """The record of a job whose `hold` was cancelled, as far as it came."""
        ...

    @property
    def exhausted(self) -> Exception | None:
        """Why nothing can be held any more, where that is so."""
        ...


class ConversationRun:
    """One execution, with a run's directory or without. Used once."""

    def __init__(
        self, plan: Plan, *, index: JobIndex, progress: Progress, directory: RunDirectory | None = None
    ) -> None:
        self._plan = plan
        self._index = index
        self._progress = progress
        self._directory = directory
        self._memory = MemoryResults(index)
        self._problem: BaseException | None = None
        self._finished = self._hopeless = 0
        self._first: ErrorRecord | None = None
        self._exhausted = False

    async def recall(self) -> None:
        """Read what is stored, and move what will be made anew out of the way."""
        directory = self._directory
        if directory is None:
            return
        for _, line in directory.read_attempts():
            try:
                head = decode_head(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            self._index.tried(head.id, head.attempt)
        if await asyncio.to_thread(read_index, directory, self._index):
            damaged: set[bytes] = set()
            await asyncio.to_thread(directory.set_aside, partial(_is_open, damaged), "conversations.jsonl")
            if damaged:
                told = f"{len(damaged)} rows of conversations.jsonl can't be read; their jobs run again"
                self._tell("warning", told)
            self._index.forget_places()
            await asyncio.to_thread(read_index, directory, self._index)
        await directory.journal.open(self._is_wanted)

    def _is_wanted(self, id: str) -> bool:
        row = self._index.stored(id.partition("#")[0])
        return row is None or not row.done

    async def carry_out(self, hands: Hands) -> RunReport:
        """Hold what is not done; gives the report. All that was recorded is on disk by then.

        Raises `RunAbortedError` where it was given up before all jobs were held.
        """
        reused = self._index.done()
        self._progress.begin(self._plan.total or 0, min(reused, self._plan.total or reused))
        self._session(
            "start",
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
            last_write=None if self._directory is None else last_write(self._directory.path),
            planned=self._plan.total,
        )
        outcome = "failed"
        try:
            with patient_collector():
                await run_lanes(
                    self._lanes(),
                    partial(self._run_lane, hands),
                    window=hands.window,
                    stop=lambda: self._gave_up or hands.exhausted is not None,
                )
            outcome = "finished" if self._exhausted else "gave_up"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            await self._end(outcome)
        self._raise_problem()
        if hands.exhausted is not None:
            raise RunAbortedError(f"no worker is left to hold the other conversations: {hands.exhausted}")
        if outcome == "gave_up":
            assert self._first is not None
            raise RunAbortedError(
                f"gave up: all of the first {self._finished} conversations failed alike, and the others would; "
                f"the first with {self._first.type}: {self._first.message}"
            )
        return self.report()

    def report(self) -> RunReport:
        """What the run has come to so far."""
        if self._directory is None:
            return RunReport(self._memory, [])
        results = StoredResults(self._directory, self._index, rebuilder({}, self._plan.recipes))
        return RunReport(results, SkippedJobs(self._index), self._directory.path)

    # -- jobs -------------------------------------------------------------------------------------------------

    def _lanes(self) -> Iterator[Job | None]:
        """What is not done, one job at a time; a `None` now and then lets others take their turn."""
        passed = 0
        for job in self._plan.jobs:
            stored = self._index.stored(job.key)
            done = stored is not None and stored.done
            if not self._index.plan(job.id, job.key, reused=done):
                raise ConfigurationError(
                    f"two jobs of this run are called {job.id!r}: give one of them another id"
                )
            if stored is None or not done:
                yield job
                continue
            if job.recipe is None:
                self._check_recipe(job, stored.offset)
            passed += 1
            if passed % YIELD_EVERY == 0:
                yield None
        self._exhausted = True

    def _check_recipe(self, job: Job, offset: int) -> None:
        """Raise `RunChangedError` where a stored job of that id was made by another recipe."""
        assert self._directory is not None
        held = decode_held(self._directory.conversation_at(offset))
        mine = job.conversation.recipe()
        if canonical(held.recipe) != canonical(mine):
            raise RunChangedError(
                f"job {job.id!r} is stored, and was made by another recipe; rows of both would not be one run. Use the "
                "recipe it was made by, give the job another id, or choose another out_dir"
            )

    async def _run_lane(self, hands: Hands, job: Job | None) -> None:
        if job is None:
            return
        self._raise_problem()
        stored = self._index.stored(job.key)
        attempt = 1 if stored is None else stored.attempt + 1
        keeps_recipe = job.recipe is None
        recipe = None
        if keeps_recipe and self._directory is not None:
            try:
                recipe = job.conversation.recipe()
            except ConfigurationError as error:  # of a job that was drawn while others run
                self._record(unheld(job, attempt, None, "failed", error_record(error)), job)
                return
        self._progress.in_flight += 1
        try:
            held = await hands.hold(job, attempt, recipe)
        except asyncio.CancelledError:
            cut = hands.cut(job, attempt, recipe)
            if cut is not None:
                self._record(cut, job)
            raise
        finally:
            self._progress.in_flight -= 1
        if held.state == "cancelled" and hands.exhausted is not None:
            return
        self._record(held, job)

    # -- recording --------------------------------------------------------------------------------------------

    def _record(self, held: Held, job: Job) -> None:
        """Store how a job ended. Written when this returns; acknowledged once it is on disk."""
        held, line = encoded(held)
        self._judge(held)
        if self._directory is None:
            self._memory.put(held, job.conversation)
            self._told(held)
            return
        offset = self._directory.conversations_end
        acknowledged = asyncio.ensure_future(self._directory.append_conversation(line))
        self._index.store(held.id, StoredRow(offset, held.state == "completed", held.attempt))
        acknowledged.add_done_callback(partial(self._acknowledged, held, job.conversation.names))

    def _acknowledged(self, held: Held, names: tuple[str, ...], done: asyncio.Future[None]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        assert self._directory is not None
        try:
            if held.state == "completed":
                for name in names:
                    self._directory.journal.forget(f"{held.id}#{name}")
            self._told(held)
        except Exception as problem:  # raised again where it ends the run: here, the loop would only log it
            self._problem = self._problem or problem

    def _told(self, held: Held) -> None:
        self._progress.recorded(
            held.state,
            calls=held.billed_calls,
            tool_calls=held.tool_calls,
            tokens=held.billed_usage.input_tokens + held.billed_usage.output_tokens,
            cost=held.billed_cost,
            job_id=held.job_id,
            turns=held.new_turns,
            reason=held.stop_reason,
            error=None if held.error is None else held.error.type,
        )

    def _judge(self, held: Held) -> None:
        if held.state == "cancelled":
            return
        self._finished += 1
        if held.error is None:
            return
        self._hopeless += held.error.type in HOPELESS
        self._note(f"{now()} {held.job_id} failed: {held.error.type}: {held.error.message}")
        if self._first is None:
            self._first = held.error
            self._progress.first_error = f"{held.error.type}: {held.error.message}"
            self._progress.tell(
                "first_error", job_id=held.job_id, type=held.error.type, message=held.error.message
            )

    @property
    def _gave_up(self) -> bool:
        return self._finished >= HOPELESS_AFTER and self._hopeless == self._finished

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    # -- the end ----------------------------------------------------------------------------------------------

    async def _end(self, outcome: str) -> None:
        directory = self._directory
        if directory is None or directory.commit.failed is not None:
            return
        await directory.commit.flush()
        self._session("end", outcome=outcome)
        summary = await asyncio.to_thread(summarize, directory, outcome, self._plan.total)
        directory.write_file("summary.json", encode_json(summary))
        await directory.commit.flush()

    def _session(self, event: str, **fields: Any) -> None:
        if self._directory is not None:
            self._directory.append_session(encode_row({"event": event, "at": now(), **fields}))
            told = " ".join(f"{name}={value}" for name, value in fields.items())
            self._note(f"{now()} {event} {told}")

    def _tell(self, event: str, message: str) -> None:
        self._note(f"{now()} {event}: {message}")
        self._progress.tell(event, message=message)

    def _note(self, line: str) -> None:
        if self._directory is not None:
            self._directory.note(line)


class SkippedJobs(Collection[str]):
    """Ids of the jobs that were done before, read from the index when they are asked for."""

    def __init__(self, index: JobIndex) -> None:
        self._index = index

    def __iter__(self) -> Iterator[str]:
        return self._index.jobs(reused=True)

    def __len__(self) -> int:
        return self._index.count(reused=True)

    def __contains__(self, job_id: object) -> bool:
        return isinstance(job_id, str) and self._index.is_reused(job_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | SkippedJobs) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} jobs that were done before>"


def summarize(directory: RunDirectory, outcome: str, planned: int | None) -> dict[str, Any]:
    """What the run came to, computed from what is stored and from nothing else."""
    health = Health()
    states: dict[str, int] = {}
    errors: dict[str, int] = {}
    calls = tokens = 0
    cost: float | None = 0.0
    for _, line in directory.read_conversations():
        try:
            held = decode_held(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        calls += held.billed_calls
        tokens += held.billed_usage.input_tokens + held.billed_usage.output_tokens
        cost = None if cost is None or held.billed_cost is None else cost + held.billed_cost
        states[held.state] = states.get(held.state, 0) + 1
        health.add(held.transcript)
        if held.error is not None:
            errors[held.error.type] = errors.get(held.error.type, 0) + 1
    return {
        "outcome": outcome,
        "planned": planned,
        "outcomes": states,
        "errors": errors,
        "calls": calls,
        "tokens": tokens,
        "cost": cost,
        "health": health.summary(),
    }


def _is_open(damaged: set[bytes], line: bytes) -> bool:
    try:
        return decode_head(line).state != "completed"
    except (msgspec.DecodeError, RecursionError):
        damaged.add(line)
        return True
