"""What was planned and how it ended: every planned row, its rollout id, and its one recorded state.

The ledger is worked out anew from the dataset and the logs at every start and is never the truth itself. It
lives in a private temporary database that the system removes with the process, so that a million rows take no
more memory than a thousand.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from taskmill.errors import StorageFullError
from taskmill.records import DONE_STATES

_STATES = ("pending", "failed", "cancelled", *sorted(DONE_STATES))
_CODES = {state: code for code, state in enumerate(_STATES)}
_FIRST_DONE = 3
_CHUNK = 512

_SCHEMA = """
PRAGMA page_size=8192;
PRAGMA journal_mode=OFF;
PRAGMA synchronous=OFF;
PRAGMA temp_store=FILE;
PRAGMA locking_mode=EXCLUSIVE;
CREATE TABLE planned(
    row INTEGER PRIMARY KEY, offset INTEGER, key BLOB, detail BLOB, copy INTEGER, state INTEGER, source INTEGER
);
CREATE TABLE stored(
    seq INTEGER PRIMARY KEY, key BLOB, detail BLOB, copy INTEGER, state INTEGER, matched INTEGER
);
CREATE TABLE pairs(row INTEGER PRIMARY KEY, seq INTEGER, state INTEGER);
BEGIN;
"""


class PlannedRow(Struct, frozen=True, gc=False):
    """One row of the plan.

    `index` is its number in the dataset and `offset` the byte where its line starts. `key` is the hash of what makes
    a stored sample a sample of this row (prompt, image, working directory), `detail` the hash of the whole row.
    `rollout_id` is the ledger's to give: `detail` in hex, and a counter among equal rows.
    """

    index: int
    offset: int
    key: bytes
    detail: bytes
    rollout_id: str = ""


class Settlement(NamedTuple):
    """`matched` stored samples belong to a planned row; `surplus` ones belong to none of this plan."""

    matched: int
    surplus: int


class Found(NamedTuple):
    """A planned row by its rollout id: its index, and how it stands."""

    row: int
    state: str


class BatchCount(NamedTuple):
    """Rows of one batch by how they stand now.

    `recorded` have an end of whatever state, failed and cancelled ones that will run again among them. Of these,
    `reused` were done before this start, and `discarded` are discarded, before this start or since.
    """

    batch: int
    recorded: int
    reused: int
    discarded: int


class Ledger:
    """The plan and its state. Call `plan`, then `store` for each stored record, then `settle`; then ask and `mark`.

    Raises `StorageFullError` when the folder for temporary files is full.
    """

    def __init__(self) -> None:
        with _told():
            self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
            self._db.executescript(_SCHEMA)
        self._records: list[tuple[bytes, bytes, int | None, int]] = []
        self._has_stored = False
        self._marks: list[tuple[int, int]] = []

    # -- filling ----------------------------------------------------------------------------------------------

    def plan(self, rows: Iterable[PlannedRow]) -> None:
        """Take in the planned rows, in order, as they come: none of them is kept in memory."""
        fields = attrgetter("index", "offset", "key", "detail")
        with _told():
            self._db.executemany("INSERT INTO planned VALUES (?, ?, ?, ?, 0, 0, NULL)", map(fields, rows))

    def store(self, key: bytes, detail: bytes, rollout_id: str | None, state: str) -> None:
        """Take in one stored record, in the order of storing.

        A record of a done state is a sample. Any other is an attempt: it tells how the row of its rollout id
        stands unless a sample does, and the latest attempt counts.
        """
        copy = None
        if rollout_id is not None:
            head, _, tail = rollout_id.rpartition("-")
            if head == detail.hex() and tail.isdecimal():
                copy = int(tail)
        self._records.append((key, detail, copy, _CODES[state]))
        if len(self._records) >= _CHUNK:
            self._write_records()

    def _write_records(self) -> None:
        if self._records:
            self._has_stored = True
            with _told():
                self._db.executemany("INSERT INTO stored VALUES (NULL, ?, ?, ?, ?, 0)", self._records)
            self._records.clear()

    # -- matching ---------------------------------------------------------------------------------------------

    def settle(self) -> Settlement:
        """Give equal rows their counters, and each stored sample the row it belongs to.

        A sample goes to the row with its rollout id; else to the first free row that is equal in all fields; else
        to the first free row with the same key. Each row takes one sample and each sample one row, so three equal
        rows and one sample leave two rows pending.
        """
        self._write_records()
        with _told():
            self._number_equal_rows()
            return self._pair() if self._has_stored else Settlement(0, 0)

    def _number_equal_rows(self) -> None:
        run = self._db.execute
        run("CREATE INDEX planned_copy ON planned(detail, copy)")
        run("CREATE TABLE repeated(detail BLOB PRIMARY KEY) WITHOUT ROWID")
        run("INSERT INTO repeated SELECT detail FROM planned GROUP BY detail HAVING COUNT(*) > 1")
        if run("SELECT 1 FROM repeated LIMIT 1").fetchone() is None:
            return
        run("CREATE TABLE copies(row INTEGER PRIMARY KEY, copy INTEGER)")
        run(
            "INSERT INTO copies SELECT row, ROW_NUMBER() OVER (PARTITION BY detail ORDER BY row) - 1 "
            "FROM planned WHERE detail IN repeated"
        )
        run(
            "UPDATE planned SET copy = (SELECT copy FROM copies WHERE copies.row = planned.row) "
            "WHERE row IN (SELECT row FROM copies)"
        )
        run("DROP TABLE copies")

    def _pair(self) -> Settlement:
        run = self._db.execute
        samples = int(run(f"SELECT COUNT(*) FROM stored WHERE state >= {_FIRST_DONE}").fetchone()[0])
        same_rollout = (
            "INTO pairs SELECT planned.row, record.seq, record.state FROM "
            "(SELECT seq, detail, copy, state FROM stored WHERE copy IS NOT NULL ORDER BY seq) AS record "
            "CROSS JOIN planned ON planned.detail = record.detail AND planned.copy = record.copy "
        )
        run(f"INSERT OR IGNORE {same_rollout} WHERE record.state >= {_FIRST_DONE}")
        matched = self._take_pairs()
        for column in ("detail", "key"):
            if matched < samples:
                matched += self._pair_by(column)
        run(f"INSERT OR REPLACE {same_rollout} WHERE record.state < {_FIRST_DONE} AND planned.state = 0")
        self._take_pairs()
        return Settlement(matched, samples - matched)

    def _pair_by(self, column: str) -> int:
        """Pair free rows and unmatched samples that agree in `column`: the first with the first, and so on."""
        run = self._db.execute
        run(
            "CREATE TABLE waiting(hash BLOB, place INTEGER, seq INTEGER, state INTEGER, PRIMARY KEY(hash, place)) "
            "WITHOUT ROWID"
        )
        run(
            "UPDATE stored SET matched = 1 WHERE seq IN (SELECT source FROM planned WHERE source IS NOT NULL)"
        )
        run(
            f"INSERT INTO waiting SELECT {column}, ROW_NUMBER() OVER (PARTITION BY {column} ORDER BY seq), seq, state "
            f"FROM stored WHERE state >= {_FIRST_DONE} AND NOT matched"
        )
        run(
            "INSERT INTO pairs SELECT free.row, waiting.seq, waiting.state FROM ("
            f"SELECT {column} AS hash, ROW_NUMBER() OVER (PARTITION BY {column} ORDER BY row) AS place, row "
            f"FROM planned WHERE state = 0 AND {column} IN (SELECT hash FROM waiting)"
            ") AS free CROSS JOIN waiting ON waiting.hash = free.hash AND waiting.place = free.place"
        )
        run("DROP TABLE waiting")
        return self._take_pairs()

    def _take_pairs(self) -> int:
        """Enter the pairs found in the plan, and say how many they were."""
        run = self._db.execute
        taken = run(
            "UPDATE planned SET (state, source) = (SELECT state, seq FROM pairs WHERE pairs.row = planned.row) "
            "WHERE row IN (SELECT row FROM pairs)"
        ).rowcount
        run("DELETE FROM pairs")
        return taken

    # -- asking -----------------------------------------------------------------------------------------------

    def pending(self) -> Iterator[PlannedRow]:
        """The rows that are not done, in order, with their rollout ids.

        Rows may be marked meanwhile; a row is looked at when its turn comes, a few hundred at a time.
        """
        start = 0
        while True:
            with self._asked() as db:
                rows = db.execute(
                    "SELECT row, offset, key, detail, copy FROM planned "
                    f"WHERE row >= ? AND state < {_FIRST_DONE} ORDER BY row LIMIT {_CHUNK}",
                    (start,),
                ).fetchall()
            for index, offset, key, detail, copy in rows:
                yield PlannedRow(index, offset, key, detail, f"{detail.hex()}-{copy}")
            if len(rows) < _CHUNK:
                return
            start = rows[-1][0] + 1

    def done_indices(self) -> Iterator[int]:
        """Indices of the rows that are done, ascending."""
        start = -(1 << 62)
        while True:
            with self._asked() as db:
                rows = db.execute(
                    f"SELECT row FROM planned WHERE row >= ? AND state >= {_FIRST_DONE} ORDER BY row LIMIT {_CHUNK}",
                    (start,),
                ).fetchall()
            for (index,) in rows:
                yield index
            if len(rows) < _CHUNK:
                return
            start = rows[-1][0] + 1

    def state(self, index: int) -> str:
        """How a row stands: `pending` or one of the recorded states. `KeyError` for an index outside the plan."""
        with self._asked() as db:
            found = db.execute("SELECT state FROM planned WHERE row = ?", (index,)).fetchone()
        if found is None:
            raise KeyError(f"row {index} is not in the plan")
        return str(_STATES[found[0]])

    def mark(self, index: int, state: str) -> None:
        """Note that a row was recorded as `state`. `KeyError` for a state there is not."""
        self._marks.append((_CODES[state], index))
        if len(self._marks) >= _CHUNK:
            self._write_marks()

    def _write_marks(self) -> None:
        if self._marks:
            with _told():
                self._db.executemany("UPDATE planned SET state = ?, source = NULL WHERE row = ?", self._marks)
            self._marks.clear()

    def counts(self) -> dict[str, int]:
        """Rows in each state, `pending` included; they add up to the plan."""
        counts = dict.fromkeys(_STATES, 0)
        with self._asked() as db:
            for code, count in db.execute("SELECT state, COUNT(*) FROM planned GROUP BY state"):
                counts[_STATES[code]] = count
        return counts

    @property
    def total(self) -> int:
        """Rows planned so far."""
        with self._asked() as db:
            return int(db.execute("SELECT COUNT(*) FROM planned").fetchone()[0])

    @property
    def done_count(self) -> int:
        """Rows that are done."""
        counts = self.counts()
        return sum(counts[state] for state in DONE_STATES)

    def find(self, rollout_id: str) -> Found | None:
        """The planned row with that rollout id; `None` when the plan has none. Ask after `settle`."""
        detail, _, copy = rollout_id.rpartition("-")
        try:
            wanted = (bytes.fromhex(detail), int(copy))
        except ValueError:
            return None
        with self._asked() as db:
            found = db.execute(
                "SELECT row, state FROM planned WHERE detail = ? AND copy = ?", wanted
            ).fetchone()
        return None if found is None else Found(found[0], _STATES[found[1]])

    def is_pending(self, rollout_id: str) -> bool:
        """Whether a row of this plan has that rollout id and is not done."""
        found = self.find(rollout_id)
        return found is not None and found.state not in DONE_STATES

    def batches(self, size: int) -> Iterator[BatchCount]:
        """How the rows of each batch of `size` stand, in order of the batches."""
        discarded = _CODES["discarded"]
        with self._asked() as db:
            yield from map(
                BatchCount._make,
                db.execute(
                    f"SELECT row / {size:d}, SUM(state > 0), SUM(state >= {_FIRST_DONE} AND source IS NOT NULL), "
                    f"SUM(state = {discarded}) FROM planned GROUP BY row / {size:d}"
                ),
            )

    @contextmanager
    def _asked(self) -> Iterator[sqlite3.Connection]:
        """The database with every mark in it."""
        self._write_marks()
        with _told():
            yield self._db

    def close(self) -> None:
        """Drop the ledger. May be called twice."""
        self._db.close()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageFullError(
            f"the ledger could not be kept in the folder for temporary files: {error}. "
            "Make room there, or set TMPDIR to another folder; then resume."
        ) from error
