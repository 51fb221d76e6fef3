"""The directory of one run: which files stand in it, and who may write them.

run.json              configuration and format version
lock                  who writes
batch_<k>.jsonl       completed and partial rows of batch k: the row is the record of success
outcomes.jsonl        a line for every discarded, failed or cancelled attempt
sessions.jsonl        start and end of each process that worked on the run
journal/              finished calls of unfinished rollouts
trajectories.jsonl, checkpoint.json, statistics.json      worked out from the above, replaced as a whole
*.torn                ends of lines that a crash left unfinished
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from taskmill.errors import RunChangedError, RunExistsError, RunNotFoundError, StoreError
from taskmill.store.commit import GroupCommit, Sync
from taskmill.store.files import (
    AppendFile,
    Repair,
    is_temporary,
    make_directory,
    remove,
    repair_end,
    replace,
    storage_error,
)
from taskmill.store.journal import CallJournal
from taskmill.store.jsonl import canonical, encode_json, lines
from taskmill.store.lock import Holder, RunLock

FORMAT = 1
_SHARD = re.compile(r"batch_(0|[1-9]\d*)\.jsonl")
_OWN = frozenset(
    {
        "run.json",
        "lock",
        "outcomes.jsonl",
        "sessions.jsonl",
        "journal",
        "workspaces",
        "trajectories.jsonl",
        "checkpoint.json",
        "statistics.json",
    }
)


class OpenResult(NamedTuple):
    """`fresh`: nothing was recorded here before. `repairs`: what had to be put in order, for people to see."""

    fresh: bool
    repairs: list[Repair]


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
        self._shards: dict[int, AppendFile] = {}
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
            recorded = self._has_records()
            if recorded and not resume:
                raise RunExistsError(
                    f"the run in {str(self.path)!r} already has rows, and a fresh start would mix two runs. "
                    "Resume it (--resume, or run(resume=True)), or choose another run name."
                )
            stored = self.read_config()
            if recorded and stored is not None:
                self._refuse_changes(stored, config, policy_fields)
            repairs = self._repair()
            head = {"format": FORMAT, "config": dict(config)}
            if stored is None or canonical(stored) != canonical(head["config"]):
                replace(self.path / "run.json", encode_json(head))
        except BaseException:
            self._lock.release()
            raise
        return OpenResult(not recorded, repairs)

    async def close(self) -> None:
        """Sync and close all files and let go of the lock. May be called twice. Raises if the last sync fails."""
        try:
            await self.commit.close()
        finally:
            with suppress(StoreError, OSError):
                self.journal.close()
            for file in (*self._shards.values(), *self._logs.values()):
                self.commit.close_file(file)
            self._shards.clear()
            self._logs.clear()
            self._lock.release()

    def _has_records(self) -> bool:
        candidates = [self.path / "outcomes.jsonl", *map(self._shard_path, self.shard_numbers())]
        return any(path.exists() and path.stat().st_size > 0 for path in candidates)

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

    def _repair(self) -> list[Repair]:
        logs = [self.path / "outcomes.jsonl", self.path / "sessions.jsonl"]
        repairs = []
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

    def shard(self, number: int) -> AppendFile:
        """The log of a batch, opened when it is first asked for."""
        file = self._shards.get(number)
        if file is None:
            file = self._shards[number] = AppendFile(self._shard_path(number))
        return file

    def close_shard(self, number: int) -> None:
        """Close a batch's log as soon as its rows are synced."""
        file = self._shards.pop(number, None)
        if file is not None:
            self.commit.close_file(file)

    def append_row(self, number: int, row: bytes) -> Awaitable[None]:
        """Append an encoded row to the log of batch `number`."""
        return self.commit.append(self.shard(number), row)

    def append_outcome(self, line: bytes) -> Awaitable[None]:
        """Append an encoded line about an attempt that gave no row."""
        return self.commit.append(self._log("outcomes.jsonl"), line)

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

    def _log(self, name: str) -> AppendFile:
        file = self._logs.get(name)
        if file is None:
            file = self._logs[name] = AppendFile(self.path / name)
        return file

    # -- reading ----------------------------------------------------------------------------------------------

    def read_config(self) -> dict[str, Any] | None:
        """The stored configuration, or `None` where there is none yet. Raises `StoreError` for one we can't read."""
        path = self.path / "run.json"
        try:
            head = msgspec.json.decode(path.read_bytes())
            if head["format"] > FORMAT:
                raise StoreError(
                    f"{str(path)!r} has format {head['format']!r}, and this version reads formats up to {FORMAT}. "
                    "Update taskmill to use this run."
                )
            config: dict[str, Any] = head["config"]
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise StoreError(
                f"{str(path)!r} is not the configuration of a run ({error}). Restore it, or choose another run name."
            ) from error
        return config

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
