"""The directory of one run: which files stand in it, and who may write them.

run.json              configuration and format version
lock                  who writes
batch_<k>.jsonl       completed and partial rows of batch k: the row is the record of success
outcomes.jsonl        a line for every discarded, failed or cancelled attempt
sessions.jsonl        start and end of each process that worked on the run
traces.jsonl          in the run of a taskset: one row a rollout, whatever became of it
validation.jsonl      in the validation of a taskset: one row a task, whatever was found
conversations.jsonl   in a run of conversations: one row each, however it ended
attempts.jsonl        in these three: rows of these files that were made anew since
journal/              finished calls of unfinished rollouts; copies of rows whose batch is not synced yet
trajectories.jsonl, checkpoint.json, statistics.json      worked out from the above, replaced as a whole
*.torn                ends of lines that a crash left unfinished
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from taskmill.errors import RunChangedError, RunExistsError, RunNotFoundError, StoreError
from taskmill.store.ahead import Restored, WriteAhead
from taskmill.store.commit import GroupCommit, Sync
from taskmill.store.files import (
    AppendFile,
    Repair,
    is_temporary,
    make_directory,
    read_whole,
    remove,
    repair_end,
    replace,
    storage_error,
)
from taskmill.store.journal import CallJournal
from taskmill.store.jsonl import canonical, encode_json, lines
from taskmill.store.lock import Holder, RunLock
from taskmill.store.shards import Shards

FORMAT = 1
_SHARD = re.compile(r"batch_(0|[1-9]\d*)\.jsonl")
_OWN = frozenset(
    {
        "run.json",
        "lock",
        "outcomes.jsonl",
        "sessions.jsonl",
        "traces.jsonl",
        "validation.jsonl",
        "conversations.jsonl",
        "attempts.jsonl",
        "config.toml",
        "summary.json",
        "run.log",
        "journal",
        "workspaces",
        "trajectories.jsonl",
        "checkpoint.json",
        "statistics.json",
    }
)


class _Head(Struct):
    """What `run.json` holds."""

    format: int
    config: dict[str, Any]


_decode_head = msgspec.json.Decoder(_Head).decode


class OpenResult(NamedTuple):
    """`fresh`: nothing was recorded here before. `repairs`: what had to be put in order, for people to see."""

    fresh: bool
    repairs: list[Repair | Restored]


class RunDirectory:
    """The files of one run. Constructing it touches nothing; reading needs no lock.

    Writing starts with `open_for_writing` and ends with `close`. Rows are acknowledged through the awaitables of the
    `append_*` methods. All of them raise `StorageFullError` when no more can be written.
    """

    def __init__(self, path: Path | str, *, sync: Sync = "group") -> None:
        self.path = Path(path)
        self.commit = GroupCommit(sync)
        self.journal = CallJournal(self.path / "journal", self.commit)
        self._lock = RunLock(self.path / "lock")
        self._ahead = WriteAhead(self.path / "journal", self.commit)
        self._shards = Shards(self._shard_path, self.commit, self._ahead)
        self._logs: dict[str, AppendFile] = {}

    # -- opening and closing ----------------------------------------------------------------------------------

    def open_for_writing(
        self, config: Mapping[str, Any], *, resume: bool, policy_fields: frozenset[str] = frozenset()
    ) -> OpenResult:
        """Take the lock, check that this run may be written, put torn ends in order, and store `config`.

        `policy_fields` are the settings that change no result and so may differ on resume. `config` is stored as it is:
        no secret belongs in it. Raises `RunLockedError`, `RunExistsError` (something is recorded and `resume` is
        false), `RunChangedError` (naming each setting that differs). Refusing leaves all files as they were.
        """
        make_directory(self.path)
        self._lock.acquire()
        try:
            recorded, stored = self.check_start(config, resume=resume, policy_fields=policy_fields)
            repairs = self._repair()
            head = {"format": FORMAT, "config": dict(config)}
            if stored is None or canonical(stored) != canonical(head["config"]):
                replace(self.path / "run.json", encode_json(head))
        except BaseException:
            self._lock.release()
            raise
        return OpenResult(not recorded, repairs)

    def check_start(
        self, config: Mapping[str, Any], *, resume: bool, policy_fields: frozenset[str] = frozenset()
    ) -> tuple[bool, dict[str, Any] | None]:
        """Raise what `open_for_writing` raises for the files there are; needs no lock and changes nothing.

        Gives whether something is recorded, and the stored configuration.
        """
        recorded = self._has_records()
        if recorded and not resume:
            raise RunExistsError(
                f"the run in {str(self.path)!r} already has rows, and a fresh start would mix two runs. "
                "Resume it (--resume, or run(resume=True)), or choose another run name."
            )
        stored = self.read_config()
        if recorded and stored is not None:
            self._refuse_changes(stored, config, policy_fields)
        elif recorded and self._is_ours():
            raise RunChangedError(
                f"the run in {str(self.path)!r} has rows, but its 'run.json' is gone, so nobody knows which model and "
                "settings they were made with, and others would not be one run with them. Put 'run.json' back, or "
                "choose another run name."
            )
        return recorded, stored

    def check_lock(self) -> None:
        """Raise `RunLockedError` if a living process writes this run. Changes nothing."""
        self._lock.check()

    async def close(self) -> None:
        """Sync and close all files and let go of the lock. May be called twice. Raises if the last sync fails."""
        try:
            self._ahead.retire()
            await self.commit.close()
        finally:
            self._ahead.close()
            with suppress(StoreError, OSError):
                self.journal.close()
            self._shards.close_all()
            for file in self._logs.values():
                self.commit.close_file(file)
            self._logs.clear()
            self._lock.release()

    def _has_records(self) -> bool:
        logs = ("outcomes.jsonl", "traces.jsonl", "validation.jsonl", "conversations.jsonl", "attempts.jsonl")
        candidates = [*(self.path / name for name in logs), *map(self._shard_path, self.shard_numbers())]
        return any(path.exists() and path.stat().st_size > 0 for path in candidates) or self._ahead.lacking()

    def _is_ours(self) -> bool:
        """Whether a run of ours was stored here. Shards alone, of rows without an id, come from another runner."""
        logs = (self.path / name for name in ("sessions.jsonl", "outcomes.jsonl"))
        if any(path.exists() and path.stat().st_size > 0 for path in logs):
            return True
        firsts = (next(self.read_shard(number), (0, b"")) for number in self.shard_numbers())
        return any(b'"rollout_id":' in line for _, line in firsts)

    def _refuse_changes(
        self, stored: Mapping[str, Any], config: Mapping[str, Any], policy_fields: frozenset[str]
    ) -> None:
        now = msgspec.json.decode(canonical(config))
        changes = [
            change
            for name in sorted({*stored, *now} - policy_fields)
            for change in _differences(name, stored.get(name), now.get(name))
        ]
        if changes:
            raise RunChangedError(
                f"the run in {str(self.path)!r} was started with other settings, and rows made with both would not "
                "be one run:\n  "
                + "\n  ".join(changes)
                + "\nUse the stored settings, or choose another run name."
            )

    def _repair(self) -> list[Repair | Restored]:
        names = ("outcomes", "sessions", "traces", "validation", "conversations", "attempts")
        logs = [self.path / f"{name}.jsonl" for name in names]
        repairs: list[Repair | Restored] = [*self._ahead.restore(self._shard_path)]
        for path in [*map(self._shard_path, self.shard_numbers()), *logs]:
            try:
                repair = repair_end(path)
            except OSError as error:
                raise storage_error(path, error, "put in order") from error
            if repair is not None:
                repairs.append(repair)
        for path in self.path.iterdir():
            if is_temporary(path.name):
                remove(path)
        return repairs

    # -- writing ----------------------------------------------------------------------------------------------

    def open_shard_soon(self, number: int) -> None:
        """Begin to open the log of batch `number`, whose first row is about to run."""
        self._shards.open_soon(number)

    def close_shard(self, number: int) -> None:
        """Close a batch's log as soon as its rows are synced."""
        self._shards.close(number)

    def append_row(self, number: int, row: bytes) -> asyncio.Future[None]:
        """Append an encoded row to the log of batch `number`."""
        return self._shards.append(number, row)

    def append_outcome(self, line: bytes) -> asyncio.Future[None]:
        """Append an encoded line about an attempt that gave no row."""
        return self.commit.append(self._log("outcomes.jsonl"), line)

    def append_trace(self, line: bytes) -> Awaitable[None]:
        """Append an encoded trace: how a rollout of a taskset ended."""
        return self.commit.append(self._log("traces.jsonl"), line)

    def append_validation(self, line: bytes) -> Awaitable[None]:
        """Append an encoded row about a task that was validated."""
        return self.commit.append(self._log("validation.jsonl"), line)

    def append_conversation(self, line: bytes) -> Awaitable[None]:
        """Append an encoded conversation, however it ended. The row begins at the byte `conversations_end` says."""
        return self.commit.append(self._log("conversations.jsonl"), line)

    @property
    def conversations_end(self) -> int:
        """The byte of `conversations.jsonl` at which the next row will begin."""
        return self._log("conversations.jsonl").size

    def set_aside(self, superseded: Callable[[bytes], bool], name: str = "traces.jsonl") -> int:
        """Move the rows that will be made anew from the file `name` to `attempts.jsonl`, and say how many there were.

        To be called before the first row is appended. A crash in between leaves rows in both files, which the next
        call puts right, so that file never has two rows of a rollout (of a task, in a validation).
        """
        path = self.path / name
        if path.is_symlink():
            raise StoreError(
                f"{str(path)!r} is a link, and a run writes only to files of its own. "
                "Put the file itself there, then resume."
            )
        moved = {blake2b(line).digest() for _, line in self._read(path) if superseded(line)}
        if not moved:
            return 0
        there = {blake2b(line).digest() for _, line in self.read_attempts()}
        log = self._log("attempts.jsonl")
        for _, line in self._read(path):
            if superseded(line) and blake2b(line).digest() not in there:
                log.write(line + b"\n")
        log.datasync()
        replace(path, (line + b"\n" for _, line in self._read(path) if not superseded(line)))
        return len(moved)

    def note(self, line: str) -> None:
        """Add a line for people to `run.log`."""
        self.commit.append(
            self._log("run.log", repair=False), line.encode("utf-8", "backslashreplace") + b"\n"
        )

    def write_file(self, name: str, data: bytes) -> None:
        """Replace one of the run's small files (`summary.json`, `config.toml`)."""
        replace(self.path / name, data)

    def append_session(self, line: bytes) -> Awaitable[None]:
        """Append an encoded line about a process that works on the run."""
        return self.commit.append(self._log("sessions.jsonl"), line)

    def write_checkpoint(self, pieces: Iterable[bytes]) -> None:
        """Replace `checkpoint.json` by a JSON text in pieces, so that a long list of rows is never held whole."""
        replace(self.path / "checkpoint.json", pieces)

    def write_statistics(self, value: Mapping[str, Any]) -> None:
        """Replace `statistics.json`."""
        replace(self.path / "statistics.json", encode_json(value))

    def write_trajectories(self, rows: Iterable[bytes]) -> None:
        """Replace `trajectories.jsonl` by `rows`, encoded lines with their newlines."""
        replace(self.path / "trajectories.jsonl", rows)

    def _log(self, name: str, *, repair: bool = True) -> AppendFile:
        file = self._logs.get(name)
        if file is None:
            file = self._logs[name] = AppendFile(self.path / name, repair=repair)
        return file

    # -- reading ----------------------------------------------------------------------------------------------

    def read_config(self) -> dict[str, Any] | None:
        """The stored configuration, or `None` where there is none yet. Raises `StoreError` for one we can't read."""
        path = self.path / "run.json"
        try:
            head = _decode_head(read_whole(path))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StoreError(
                f"{str(path)!r} is not the configuration of a run ({reason}). Restore it, or choose another run name."
            ) from error
        if head.format > FORMAT:
            raise StoreError(
                f"{str(path)!r} has format {head.format!r}, and this version reads formats up to {FORMAT}. "
                "Update taskmill to use this run."
            )
        return head.config

    def shard_numbers(self) -> list[int]:
        """Numbers of the stored batches, in the order of numbers (2 before 10)."""
        if not self.path.is_dir():
            return []
        found = (_SHARD.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def read_shard(self, number: int) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each row of a batch. The half-written end of a live run's log is left out."""
        return self._read(self._shard_path(number))

    def read_outcomes(self) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each recorded attempt that gave no row."""
        return self._read(self.path / "outcomes.jsonl")

    def read_traces(self) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each trace of a taskset's run."""
        return self._read(self.path / "traces.jsonl")

    def trace_at(self, offset: int) -> bytes:
        """The trace that begins at that byte of `traces.jsonl`."""
        with open(self.path / "traces.jsonl", "rb") as file:
            file.seek(offset)
            return file.readline().removesuffix(b"\n")

    def read_validation(self) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each row about a validated task."""
        return self._read(self.path / "validation.jsonl")

    def read_conversations(self) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each stored conversation."""
        return self._read(self.path / "conversations.jsonl")

    def conversation_at(self, offset: int) -> bytes:
        """The row that begins at that byte of `conversations.jsonl`."""
        with open(self.path / "conversations.jsonl", "rb") as file:
            file.seek(offset)
            return file.readline().removesuffix(b"\n")

    def read_attempts(self) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each row that was made anew since."""
        return self._read(self.path / "attempts.jsonl")

    def read_sessions(self) -> Iterator[tuple[int, bytes]]:
        """`(offset, line)` of each start and end of a process."""
        return self._read(self.path / "sessions.jsonl")

    def holder(self) -> Holder | None:
        """The living process that writes this run, if one does."""
        return self._lock.holder()

    def require(self) -> None:
        """Raise `RunNotFoundError` unless this is the directory of a run."""
        if not (self.path / "run.json").exists() and not self.shard_numbers():
            raise RunNotFoundError(
                f"there is no run in {str(self.path)!r}. Give the name or the folder of a run that was started."
            )

    def owns(self, path: Path) -> bool:
        """Whether `path`, links followed, is one of the run's own files, there already or not, or the run itself."""
        target, folder = path.resolve(), self.path.resolve()
        if not target.is_relative_to(folder):
            return False
        # Some file systems take upper and lower case for the same.
        name = "/".join(target.relative_to(folder).parts[:1]).casefold()
        return name == "" or name in _OWN or name.endswith(".torn") or _SHARD.fullmatch(name) is not None

    def _read(self, path: Path) -> Iterator[tuple[int, bytes]]:
        return lines(path, whole=True) if path.is_file() else iter(())

    def _shard_path(self, number: int) -> Path:
        return self.path / f"batch_{number}.jsonl"


def _differences(name: str, stored: Any, now: Any) -> list[str]:
    """What differs in a setting, one line for each leaf. A setting that is missing counts as null."""
    if isinstance(stored, dict) and isinstance(now, dict):
        return [
            change
            for part in sorted({*stored, *now})
            for change in _differences(f"{name}.{part}", stored.get(part), now.get(part))
        ]
    if canonical(stored) == canonical(now):
        return []
    return [f"{name}: stored {stored!r}, now {now!r}"]
