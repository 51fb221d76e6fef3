"""The call journal: finished model calls of unfinished rollouts, so that a resume pays for none of them twice."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from taskmill.errors import StoreError
from taskmill.store.commit import GroupCommit
from taskmill.store.files import AppendFile, make_directory, remove
from taskmill.store.jsonl import lines

_NAME = re.compile(r"calls_(\d+)\.jsonl")


class JournalEntry(Struct, frozen=True):
    """One finished call of a rollout: its number, the digest of its request, and the completion as it was recorded.

    `attempt` says in which attempt at the rollout it was made; one that a kill ended without a record goes on under
    the same number.
    """

    number: int
    digest: str
    completion: bytes
    attempt: int = 1


class _Place(Struct, frozen=True, array_like=True):
    segment: int
    offset: int


class _Line(Struct, frozen=True):
    rollout: str
    number: int
    digest: str
    previous: _Place | None
    attempt: int
    completion: Raw


class _Track(Struct):
    """What is kept in memory for a live rollout: its last entry, its segments, and stored entries that are void."""

    number: int
    last: _Place
    segments: set[int]
    void: tuple[_Place, ...] = ()


class CallJournal:
    """Finished calls by rollout, in segments that go when no rollout needs them any more.

    Each entry names the place of the one it followed in the same rollout, so memory is the same for a rollout of
    five calls and of five hundred, and a gap (entries lost with the power) ends what is recalled instead of
    going unnoticed. A call made anew follows the one with the next smaller number: what came after that is void.
    """

    def __init__(self, directory: Path, commit: GroupCommit, *, segment_bytes: int = 8 << 20) -> None:
        self._directory = directory
        self._commit = commit
        self._segment_bytes = segment_bytes
        self._tracks: dict[str, _Track] = {}
        self._live: dict[int, int] = {}
        self._active: AppendFile | None = None
        self._retired: dict[int, AppendFile] = {}
        self._number = 0
        self._end = 0

    async def open(self, live: Callable[[str], bool]) -> None:
        """Find the calls of rollouts that `live` still wants, and drop segments that hold none.

        Lines that can't be read (a torn end) are passed over. New entries always go to a new segment.
        """
        for number in self._stored_segments():
            await asyncio.sleep(0)  # an interrupt is answered between segments
            self._live.setdefault(number, 0)
            self._number = max(self._number, number)
            for offset, line in lines(self._path(number)):
                try:
                    entry = _decoder.decode(line)
                except (msgspec.DecodeError, RecursionError):
                    continue
                if self._follows(entry) and live(entry.rollout):
                    self._void_from(entry.rollout, entry.number)
                    self._note(entry.rollout, entry.number, _Place(number, offset))
        self._sweep()

    def calls(self) -> Iterator[tuple[str, int]]:
        """`(rollout id, call number)` of every stored entry, read from the files: needs no lock and changes nothing."""
        for number in self._stored_segments():
            for _, line in lines(self._path(number)):
                try:
                    entry = _decoder.decode(line)
                except (msgspec.DecodeError, RecursionError):
                    continue
                yield entry.rollout, entry.number

    def recall(self, rollout_id: str) -> list[JournalEntry]:
        """The calls of a rollout in order of number; where some were made anew, the later ones."""
        if rollout_id not in self._tracks:
            return []
        self._commit.write_now()
        entries = [_entry(line) for _, line in self._backwards(rollout_id)]
        entries.reverse()
        return entries

    def void(self, rollout_id: str) -> list[JournalEntry]:
        """Calls of earlier processes that later ones took the place of: paid for, and part of no conversation."""
        track = self._tracks.get(rollout_id)
        return [_entry(self._read(place)) for place in track.void] if track else []

    def record(
        self, rollout_id: str, number: int, digest: str, completion: bytes, attempt: int = 1
    ) -> Awaitable[None]:
        """Write down a finished call; `completion` is one JSON value. Safe from a kill after this turn of the loop.

        The awaitable resolves when the entry is on disk; a caller need not wait for it, and shields a wait that may be
        cancelled, since entries that come together share it. Raises `StoreError`.
        """
        if b"\n" in completion:
            raise ValueError("a completion in the journal must be JSON without line breaks")
        file = self._file()
        line = _Line(rollout_id, number, digest, self._before(rollout_id, number), attempt, Raw(completion))
        encoded = _encoder.encode(line) + b"\n"
        written = self._commit.append_soon(file, encoded)
        self._note(rollout_id, number, _Place(self._number, self._end))
        self._end += len(encoded)
        return written

    def forget(self, rollout_id: str) -> None:
        """Let go of a rollout whose own record is on disk."""
        track = self._tracks.pop(rollout_id, None)
        if track is None:
            return
        emptied = False
        for segment in track.segments:
            self._live[segment] -= 1
            emptied = emptied or not self._live[segment]
        if emptied:
            self._sweep()

    def close(self) -> None:
        """Close the journal once the commit is flushed; what no live rollout needs is removed. May be called twice."""
        self._retire()
        self._sweep()

    def _backwards(self, rollout_id: str) -> Iterator[tuple[_Place, _Line]]:
        """The entries of a rollout that count, newest first."""
        track = self._tracks.get(rollout_id)
        place = track.last if track else None
        while place is not None:
            entry = self._read(place)
            yield place, entry
            place = entry.previous

    def _before(self, rollout_id: str, number: int) -> _Place | None:
        """The place of the entry that a call of that number follows."""
        track = self._tracks.get(rollout_id)
        if track is None:
            return None
        if track.number < number:
            return track.last
        self._commit.write_now()
        earlier = (place for place, entry in self._backwards(rollout_id) if entry.number < number)
        return next(earlier, None)

    def _follows(self, entry: _Line) -> bool:
        """Whether a stored entry joins on to what was found of its rollout so far."""
        if entry.previous is None:
            return True
        track = self._tracks.get(entry.rollout)
        if track is None:
            return False
        return track.last == entry.previous or any(
            place == entry.previous for place, _ in self._backwards(entry.rollout)
        )

    def _void_from(self, rollout_id: str, number: int) -> None:
        """Note that a stored call of that number was made anew."""
        track = self._tracks.get(rollout_id)
        if track is not None and track.number >= number:
            track.void += tuple(place for place, line in self._backwards(rollout_id) if line.number >= number)

    def _note(self, rollout_id: str, number: int, place: _Place) -> None:
        track = self._tracks.get(rollout_id)
        if track is None:
            track = self._tracks[rollout_id] = _Track(number, place, set())
        track.number = number
        track.last = place
        if place.segment not in track.segments:
            track.segments.add(place.segment)
            self._live[place.segment] = self._live.get(place.segment, 0) + 1

    def _file(self) -> AppendFile:
        if self._active is not None and self._end >= self._segment_bytes:
            self._retire()
            self._sweep()
        if self._active is None:
            make_directory(self._directory)
            self._number += 1
            self._active = AppendFile(self._path(self._number))
            self._end = self._active.size
            self._live[self._number] = 0
        return self._active

    def _retire(self) -> None:
        if self._active is not None:
            self._retired[self._number] = self._active
            self._commit.close_file(self._active)
            self._active = None

    def _sweep(self) -> None:
        """Remove segments without a live rollout. One that still waits for its sync is left for the next time."""
        for segment in [number for number, count in self._live.items() if not count]:
            if self._active is not None and segment == self._number:
                continue
            file = self._retired.get(segment)
            if file is not None and not file.closed:
                continue
            with suppress(OSError):  # it harms nobody, and the next start drops it
                remove(self._path(segment))
            del self._live[segment]
            self._retired.pop(segment, None)

    def _read(self, place: _Place) -> _Line:
        path = self._path(place.segment)
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                return _decoder.decode(file.readline())
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(
                f"{str(path)!r}: the journal entry at byte {place.offset} can't be read any more ({error}). "
                f"Remove {str(self._directory / 'calls_*.jsonl')!r} to go on without them; unfinished rollouts then "
                "start over."
            ) from error

    def _path(self, number: int) -> Path:
        return self._directory / f"calls_{number:06}.jsonl"

    def _stored_segments(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir() if path.is_file())
        return sorted(int(match[1]) for match in found if match)


def _entry(line: _Line) -> JournalEntry:
    return JournalEntry(line.number, line.digest, bytes(line.completion), line.attempt)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Line)
