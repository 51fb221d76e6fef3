"""Which jobs a run has and where their rows stand, on disk: a million of them take no more memory than a thousand.

Worked out anew at every start and never the truth itself; the system removes it with the process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from taskmill.errors import StorageFullError

_CHUNK = 512

_SCHEMA = """
PRAGMA page_size=8192;
PRAGMA journal_mode=OFF;
PRAGMA synchronous=OFF;
PRAGMA temp_store=FILE;
PRAGMA locking_mode=EXCLUSIVE;
CREATE TABLE stored(key TEXT PRIMARY KEY, offset INTEGER, done INTEGER, attempt INTEGER) WITHOUT ROWID;
CREATE TABLE planned(place INTEGER PRIMARY KEY, job TEXT UNIQUE, key TEXT, reused INTEGER);
CREATE TABLE seen(content TEXT PRIMARY KEY, count INTEGER) WITHOUT ROWID;
BEGIN;
"""


class StoredRow(NamedTuple):
    """Where the row of a job stands (-1: it has none), whether it is done, and the last try at it that is recorded."""

    offset: int
    done: bool
    attempt: int


class JobIndex:
    """The jobs of a run by their ids, and their rows by what the jobs are."""

    def __init__(self) -> None:
        # Reports are read in other threads than runs are made in; one thread at a time, as everything here.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        with _full_disk():
            self._database.executescript(_SCHEMA)

    def store(self, key: str, row: StoredRow) -> None:
        """Note the row of a job; a done one is never replaced by one that is not."""
        with _full_disk():
            self._database.execute(
                "INSERT INTO stored VALUES(?,?,?,?) ON CONFLICT(key) DO UPDATE SET offset=excluded.offset, "
                "done=excluded.done, attempt=excluded.attempt WHERE excluded.done >= done",
                (key, *row),
            )

    def tried(self, key: str, attempt: int) -> None:
        """Note that a job was tried, and has no row."""
        with _full_disk():
            self._database.execute(
                "INSERT INTO stored VALUES(?,-1,0,?) ON CONFLICT(key) DO UPDATE SET "
                "attempt=max(attempt, excluded.attempt)",
                (key, attempt),
            )

    def forget_places(self) -> None:
        """The rows stand somewhere else now; which jobs were tried stays known."""
        self._database.execute("UPDATE stored SET offset=-1, done=0")

    def stored(self, key: str) -> StoredRow | None:
        """The row of a job, if it has one."""
        found = self._database.execute(
            "SELECT offset, done, attempt FROM stored WHERE key=?", (key,)
        ).fetchone()
        return None if found is None else StoredRow(found[0], bool(found[1]), found[2])

    def plan(self, job: str, key: str, *, reused: bool = False) -> bool:
        """Note a job of the plan; false where one of that id is planned already."""
        with _full_disk():
            made = self._database.execute(
                "INSERT OR IGNORE INTO planned(job, key, reused) VALUES(?,?,?)", (job, key, reused)
            )
            return made.rowcount == 1

    def occurrence(self, content: str) -> int:
        """How many equal contents were asked about before this one."""
        with _full_disk():
            row = self._database.execute(
                "INSERT INTO seen VALUES(?,0) ON CONFLICT(content) DO UPDATE SET count=count+1 RETURNING count",
                (content,),
            ).fetchone()
        return int(row[0])

    def done(self) -> int:
        """How many stored jobs are done."""
        return int(self._database.execute("SELECT COUNT(*) FROM stored WHERE done=1").fetchone()[0])

    def is_reused(self, job: str) -> bool:
        """Whether a planned job was done before."""
        found = self._database.execute("SELECT reused FROM planned WHERE job=?", (job,)).fetchone()
        return found is not None and bool(found[0])

    def key_of(self, job: str) -> str | None:
        """What a planned job is, by its id."""
        found = self._database.execute("SELECT key FROM planned WHERE job=?", (job,)).fetchone()
        return None if found is None else str(found[0])

    def jobs(self, *, reused: bool | None = None, with_rows: bool = False) -> Iterator[str]:
        """Ids in the order of the plan: all, those whose rows were there before (`reused`), or those that have rows."""
        last = 0
        wanted = "" if reused is None else f" AND reused={int(reused)}"
        having = (
            " AND EXISTS(SELECT 1 FROM stored WHERE stored.key=planned.key AND stored.offset>=0)"
            if with_rows
            else ""
        )
        while True:
            rows = self._database.execute(
                f"SELECT place, job FROM planned WHERE place>?{wanted}{having} ORDER BY place LIMIT {_CHUNK}",
                (last,),
            ).fetchall()
            if not rows:
                return
            last = rows[-1][0]
            yield from (row[1] for row in rows)

    def count(self, *, reused: bool | None = None, with_rows: bool = False) -> int:
        """How many ids `jobs` would give."""
        wanted = "1" if reused is None else f"reused={int(reused)}"
        having = (
            " AND EXISTS(SELECT 1 FROM stored WHERE stored.key=planned.key AND stored.offset>=0)"
            if with_rows
            else ""
        )
        row = self._database.execute(f"SELECT COUNT(*) FROM planned WHERE {wanted}{having}").fetchone()
        return int(row[0])

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageFullError(
            f"the index of the run can't be kept in the system's temporary folder: {error}. Make room there (TMPDIR)."
        ) from error
