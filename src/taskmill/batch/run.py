"""One execution of a batch: recall what is stored, run what is pending, record each end, sum up."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from taskmill._version import __version__
from taskmill.batch.finish import (
    Merge,
    checkpoint,
    endpoint_history,
    merge,
    statistics,
)
from taskmill.batch.rows import Rolled, RowMill
from taskmill.batch.settings import BatchSettings
from taskmill.batch.toolkit import Toolkit
from taskmill.engine.collector import patient_collector
from taskmill.engine.dataset import DatasetReader, Indexed, PromptRow
from taskmill.engine.gate import FailureGate
from taskmill.engine.progress import Progress
from taskmill.engine.recall import PriorAttempts, recall
from taskmill.engine.scheduler import run_lanes
from taskmill.engine.sessions import endpoint_by_session, now, read_sessions, session_seconds
from taskmill.errors import RunAbortedError, StoreError
from taskmill.models.base import Model
from taskmill.programs.agent import error_record
from taskmill.records import DONE_STATES, ErrorRecord, State
from taskmill.sandbox.base import SandboxFactory
from taskmill.store.jsonl import encode_row
from taskmill.store.ledger import Ledger, PlannedRow, Settlement
from taskmill.store.run import RunDirectory

CHECKPOINT_EVERY = 64
"""Rows that at least are done between two checkpoints."""

CHECKPOINT_SHARE = 0.01
"""The part of a run's time that goes into checkpoints at most: each waits until the last one is that small a part."""


class BatchRun:
    """One execution, on an opened run directory. Made for `BatchRunner.run`, used once."""

    def __init__(
        self,
        settings: BatchSettings,
        *,
        ledger: Ledger,
        directory: RunDirectory,
        progress: Progress,
        toolkit: Toolkit,
        model: Model,
        sandboxes: SandboxFactory,
        confinement: str,
        indexed: Indexed,
        last_write: str | None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._directory = directory
        self._progress = progress
        self._toolkit = toolkit
        self._model = model
        self._sandboxes = sandboxes
        self._confinement = confinement
        self._indexed = indexed
        self._last_write = last_write
        self._gate = FailureGate(settings.max_failures)
        self._prior = PriorAttempts()
        self._settlement = Settlement(0, 0)
        self._next_checkpoint = 0
        self._checkpoint_after = 0.0
        self._checkpoint: asyncio.Future[None] | None = None
        self._problem: BaseException | None = None

    async def carry_out(self) -> None:
        """Run what is pending and bring checkpoint, merged file and statistics up to date.

        Raises `RunAbortedError` when too many rows failed, after everything was written.
        """
        ledger, directory = self._ledger, self._directory
        self._prior, self._settlement = await recall(directory, ledger)
        self._prior.keep(ledger.is_pending)
        await directory.journal.open(ledger.is_pending)
        reused = ledger.done_count
        self._next_checkpoint = reused + CHECKPOINT_EVERY
        self._progress.begin(ledger.total, reused)
        self._note_session(
            "start",
            pid=os.getpid(),
            host=socket.gethostname(),
            version=__version__,
            last_write=self._last_write,
        )
        outcome = "failed"
        try:
            with patient_collector():
                await self._run_pending()
            outcome = "gave_up" if self._gate.closed else "finished"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            await self._end(outcome)
        self._raise_problem()
        if outcome == "gave_up":
            raise RunAbortedError(self._gate.reason())

    async def _end(self, outcome: str) -> None:
        directory = self._directory
        if directory.commit.failed is not None:
            return
        await directory.commit.flush()
        self._note_session("end", outcome=outcome, endpoint=endpoint_history(self._model))
        if self._checkpoint is not None:
            await asyncio.wait([self._checkpoint])
        await self._write_checkpoint()
        if outcome != "cancelled":
            await self._write_results()
        await directory.commit.flush()

    # -- running --------------------------------------------------------------------------------------------

    async def _run_pending(self) -> None:
        dataset = DatasetReader(self._settings.dataset_file, self._indexed.stamp)
        mill = RowMill(
            self._settings,
            model=self._model,
            journal=self._directory.journal,
            sandboxes=self._sandboxes,
            toolkit=self._toolkit,
            on_answer=self._progress.answered,
        )
        try:
            await run_lanes(
                self._batches(),
                partial(self._run_batch, mill, dataset),
                window=self._settings.num_workers,
                stop=lambda: self._gate.closed,
            )
        finally:
            dataset.close()

    def _batches(self) -> Iterator[tuple[int, list[PlannedRow]]]:
        """The batches that have rows to run, with those rows."""
        size = self._settings.batch_size
        for batch, rows in itertools.groupby(self._ledger.pending(), lambda row: row.index // size):
            yield batch, list(rows)

    async def _run_batch(
        self, mill: RowMill, dataset: DatasetReader, batch: tuple[int, list[PlannedRow]]
    ) -> None:
        number, rows = batch
        self._directory.open_shard_soon(number)
        try:
            for planned in rows:
                self._raise_problem()
                if self._gate.closed:
                    return
                await self._run_row(mill, planned, dataset.read(planned), number)
        finally:
            self._directory.close_shard(number)

    async def _run_row(self, mill: RowMill, planned: PlannedRow, row: PromptRow, batch: int) -> None:
        attempt = self._prior.of(planned.rollout_id) + 1
        run = mill.start(planned, row, attempt)
        record = partial(self._record, mill, planned, row, batch, attempt)
        self._progress.in_flight += 1
        try:
            await run.drive()
        except asyncio.CancelledError:
            record(run.result()._replace(state="cancelled", reason=""))
            raise
        except (StoreError, RunAbortedError):
            raise
        except Exception as error:
            rolled = run.result()
            trace = replace(rolled.trace, errors=(*rolled.trace.errors, error_record(error)))
            record(rolled._replace(trace=trace, state="failed", reason=""))
        else:
            record(run.result())
        finally:
            self._progress.in_flight -= 1

    def _record(
        self, mill: RowMill, planned: PlannedRow, row: PromptRow, batch: int, attempt: int, rolled: Rolled
    ) -> None:
        """Store how a row ended. One write, done when this returns; acknowledged once it is on disk."""
        trace, state, reason, billed = rolled
        fields = mill.record(rolled, planned, row, batch=batch, timestamp=now())
        if state in ("completed", "partial"):
            acknowledged = self._directory.append_row(batch, encode_row(fields, finite=True))
        else:
            error = trace.errors[-1] if trace.errors else None
            outcome = {"state": state, "reason": reason, "attempt": attempt, "error": error, **fields}
            acknowledged = self._directory.append_outcome(encode_row(msgspec.to_builtins(outcome)))
        self._judge(planned, state, trace.errors[-1] if trace.errors else None)
        told = {
            "prompt_index": planned.index,
            "rollout_id": planned.rollout_id,
            "batch": batch,
            "prompt": row.prompt[: self._settings.log_prefix_chars],
            "reason": reason or trace.stop_reason,
            "calls": billed["calls"],
            "tool_calls": len(trace.tool_events),
            "tokens": billed["usage"]["input_tokens"] + billed["usage"]["output_tokens"],
            "cost": billed["cost"],
        }
        acknowledged.add_done_callback(partial(self._acknowledged, state, told))

    def _judge(self, planned: PlannedRow, state: State, error: ErrorRecord | None) -> None:
        if state == "failed":
            error = error or ErrorRecord("Unknown", "no error was recorded")
            if self._gate.fail(error):
                self._progress.first_error = f"{error.type}: {error.message}"
                self._progress.tell(
                    "first_error", prompt_index=planned.index, type=error.type, message=error.message
                )
        elif state != "cancelled":
            self._gate.succeeded()

    def _acknowledged(self, state: State, told: Mapping[str, Any], done: asyncio.Future[None]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        try:
            self._count(state, told)
        except Exception as problem:  # raised again where it ends the run: here, the loop would only log it
            self._problem = self._problem or problem

    def _count(self, state: State, told: Mapping[str, Any]) -> None:
        """Take a row whose record is on disk into ledger, counts and checkpoint."""
        self._ledger.mark(told["prompt_index"], state)
        if state in DONE_STATES:
            self._directory.journal.forget(told["rollout_id"])
        self._progress.recorded(state, **told)
        if (
            self._checkpoint is None
            and self._done >= self._next_checkpoint
            and asyncio.get_running_loop().time() >= self._checkpoint_after
        ):
            self._checkpoint = asyncio.ensure_future(self._write_checkpoint())
            self._checkpoint.add_done_callback(self._checkpointed)

    def _checkpointed(self, done: asyncio.Future[None]) -> None:
        self._checkpoint = None
        if not done.cancelled() and isinstance(done.exception(), Exception):
            self._problem = self._problem or done.exception()

    @property
    def _done(self) -> int:
        return self._progress.reused + self._progress.finished

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    # -- summing up -----------------------------------------------------------------------------------------

    async def _write_checkpoint(self) -> None:
        """Write the checkpoint, giving way between its pieces: a long one must hold up no rollout and no signal."""
        clock = asyncio.get_running_loop().time
        began = clock()
        self._next_checkpoint = self._done + CHECKPOINT_EVERY
        pieces = []
        for piece in checkpoint(self._settings.run_name, self._ledger, self._settings.batch_size):
            pieces.append(piece)
            await asyncio.sleep(0)
        await asyncio.to_thread(self._directory.write_checkpoint, pieces)
        self._checkpoint_after = clock() + (clock() - began) / CHECKPOINT_SHARE

    async def _write_results(self) -> None:
        found = await self._merged()
        sessions = read_sessions(self._directory)
        self._directory.write_statistics(
            statistics(
                found,
                settings=self._settings,
                model=self._model.name,
                counts=self._ledger.counts(),
                surplus=self._settlement.surplus,
                skipped_lines=self._indexed.skipped,
                known_tools=self._toolkit.known_tools,
                seconds=session_seconds(sessions),
                endpoint=endpoint_by_session(sessions),
                sandbox=self._confinement,
            )
        )

    async def _merged(self) -> Merge:
        """Merge and count in a thread: the pass over the files must not hold up an interrupt, nor outlive one."""
        given_up = threading.Event()
        work = asyncio.ensure_future(
            asyncio.to_thread(merge, self._directory, self._toolkit.known_tools, given_up.is_set)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.gather(work, return_exceptions=True)
            raise

    def _note_session(self, event: str, **fields: Any) -> None:
        self._directory.append_session(encode_row({"event": event, "at": now(), **fields}))
