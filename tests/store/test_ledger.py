from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskmill.errors import StorageFullError
from taskmill.records import DONE_STATES
from taskmill.store.ledger import Ledger, PlannedRow


def h(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


class Sample(NamedTuple):
    """A row of a dataset, or what is stored of one: its prompt, its other fields, and how it ended."""

    prompt: str
    other: str = ""
    state: str = "completed"
    rollout_id: str | None = None

    @property
    def key(self) -> bytes:
        return h(self.prompt)

    @property
    def detail(self) -> bytes:
        return h(f"{self.prompt}/{self.other}")


def ledger_of(planned: list[Sample], stored: list[Sample] | None = None) -> Ledger:
    ledger = Ledger()
    ledger.plan(PlannedRow(n, n * 100, row.key, row.detail) for n, row in enumerate(planned))
    for sample in stored or []:
        ledger.store(sample.key, sample.detail, sample.rollout_id, sample.state)
    return ledger


def pending(planned: list[Sample], stored: list[Sample]) -> list[int]:
    ledger = ledger_of(planned, stored)
    ledger.settle()
    return [row.index for row in ledger.pending()]


def rows(text: str) -> list[Sample]:
    """`"A A B:x"` as rows: prompt, and other fields after a colon."""
    return [Sample(*word.split(":")) for word in text.split()]


@pytest.mark.parametrize(
    ("planned", "stored", "left"),
    [
        ("A B C", "", [0, 1, 2]),
        ("A B C", "B", [0, 2]),
        ("A A B", "A", [1, 2]),  # two rows with one text: one is left
        ("A A A", "A", [1, 2]),
        ("A A A", "A A", [2]),
        ("A A A", "A A A A", []),
        ("C B A", "A B", [0]),  # reordered
        ("A", "A B C", []),  # shortened
        ("N A B", "A B", [0]),  # a row on top moves every index
        ("A:1 A:2 A:3", "A:2", [0, 2]),  # the other fields decide
        ("A:1 A:2 A:3", "A:3 A:1", [1]),
        ("A:1 A:2 A:3", "A:9", [1, 2]),  # fields of no row: the first row with that text
        ("A:1 A:2 A:3", "A:9 A:1", [2]),  # a sample that fits exactly goes before one that doesn't
        ("A:1 A:1 A:2", "A:1 A:1 A:1", []),
        ("A:1 B", "A:2 A:3", [1]),
        ("A", "B", [0]),
        ("", "A", []),
        ("", "", []),
    ],
)
def test_stored_samples_go_with_their_text_and_equals_are_counted(
    planned: str, stored: str, left: list[int]
) -> None:
    assert pending(rows(planned), rows(stored)) == left


def test_samples_without_a_row_are_counted_as_surplus() -> None:
    assert ledger_of(rows("A B"), rows("A A C")).settle() == (1, 2)
    assert ledger_of(rows("A A"), rows("A A")).settle() == (2, 0)
    assert ledger_of(rows("A"), [Sample("A", state="failed")]).settle() == (0, 0)


@pytest.mark.parametrize("state", sorted(DONE_STATES))
def test_a_recorded_end_is_done_and_an_attempt_is_not(state: str) -> None:
    assert pending(rows("A B"), [Sample("A", state=state)]) == [1]
    assert pending(rows("A B"), [Sample("A", state="failed"), Sample("B", state="cancelled")]) == [0, 1]


def test_equal_rows_have_ids_that_differ_and_do_not_depend_on_place() -> None:
    ledger = ledger_of(rows("B A A:1 A"))
    ledger.settle()
    ids = {row.index: row.rollout_id for row in ledger.pending()}
    detail = rows("A")[0].detail.hex()
    assert ids[1] == f"{detail}-0"
    assert ids[3] == f"{detail}-1"
    assert len(set(ids.values())) == 4
    other = ledger_of(rows("A C A"))
    other.settle()
    assert [row.rollout_id for row in other.pending() if row.index != 1] == [ids[1], ids[3]]


def test_a_sample_goes_to_the_very_rollout_it_came_from() -> None:
    detail = rows("A")[0].detail.hex()
    assert pending(rows("A A A"), [Sample("A", rollout_id=f"{detail}-1")]) == [0, 2]
    assert pending(rows("A A A"), [Sample("A", rollout_id=f"{detail}-2"), Sample("A")]) == [1]
    # Two samples that claim one rollout are still two samples.
    assert pending(rows("A A A"), [Sample("A", rollout_id=f"{detail}-1")] * 2) == [2]
    # An id that is no row's (another dataset, another hash) counts by its text.
    for odd in (f"{detail}-7", f"{detail}-x", "made-elsewhere-0", "", "-"):
        assert pending(rows("A A"), [Sample("A", rollout_id=odd)]) == [1]


def attempts(*states: str) -> list[Sample]:
    detail = rows("A")[0].detail.hex()
    return [Sample("A", state=state, rollout_id=f"{detail}-0") for state in states]


@pytest.mark.parametrize(
    ("states", "last"),
    [
        (("failed",), "failed"),
        (("failed", "cancelled"), "cancelled"),
        (("cancelled", "failed", "failed"), "failed"),
        (("failed", "completed"), "completed"),
        (("completed", "failed"), "completed"),  # shards are read before outcomes: a success stays one
        (("discarded", "cancelled"), "discarded"),
    ],
)
def test_the_latest_attempt_decides_unless_one_succeeded(states: tuple[str, ...], last: str) -> None:
    ledger = ledger_of(rows("A A"), attempts(*states))
    ledger.settle()
    assert ledger.state(0) == last
    assert ledger.state(1) == "pending"  # the history of one row says nothing about its equal
    assert ledger.counts()[last] == 1
    assert [row.index for row in ledger.pending()] == ([1] if last in DONE_STATES else [0, 1])


def test_counts_add_up_to_the_plan_whatever_is_marked() -> None:
    ledger = ledger_of(rows("A A B C D"), rows("A D"))
    ledger.settle()
    assert Counter(ledger.counts()) == Counter(completed=2, pending=3)
    ledger.mark(1, "failed")
    ledger.mark(1, "partial")
    ledger.mark(2, "discarded")
    assert sum(ledger.counts().values()) == 5
    assert ledger.counts()["partial"] == ledger.counts()["discarded"] == 1
    assert [ledger.state(n) for n in range(5)] == [
        "completed",
        "partial",
        "discarded",
        "pending",
        "completed",
    ]
    assert list(ledger.done_indices()) == [0, 1, 2, 4]
    with pytest.raises(KeyError, match="invented"):
        ledger.mark(3, "invented")
    with pytest.raises(KeyError, match="row 5 is not in the plan"):
        ledger.state(5)
    assert sum(ledger.counts().values()) == 5


def test_a_row_is_found_by_its_rollout_id() -> None:
    ledger = ledger_of(rows("A A B"), rows("A"))
    ledger.settle()
    detail = rows("A")[0].detail.hex()
    assert ledger.find(f"{detail}-0") == (0, "completed")
    assert ledger.find(f"{detail}-1") == (1, "pending")
    ledger.mark(1, "failed")
    assert ledger.find(f"{detail}-1") == (1, "failed")
    assert ledger.is_pending(f"{detail}-1")
    assert not ledger.is_pending(f"{detail}-0")
    for odd in (f"{detail}-2", f"{detail}-x", "zz-0", "", "-"):
        assert ledger.find(odd) is None
        assert not ledger.is_pending(odd)


def test_batches_say_what_was_reused_and_what_was_recorded() -> None:
    ledger = ledger_of(rows("A B C D E"), [*rows("A"), Sample("D", state="discarded")])
    ledger.settle()
    ledger.mark(1, "failed")
    ledger.mark(2, "completed")
    assert list(ledger.batches(2)) == [(0, 2, 1, 0), (1, 2, 1, 1), (2, 0, 0, 0)]


def test_pending_rows_carry_what_was_planned() -> None:
    ledger = ledger_of(rows("A B C"), rows("A C"))
    ledger.settle()
    row = rows("B")[0]
    assert list(ledger.pending()) == [PlannedRow(1, 100, row.key, row.detail, f"{row.detail.hex()}-0")]


def test_rows_marked_on_the_way_are_not_given_again() -> None:
    many = 2000
    ledger = ledger_of([Sample(str(n)) for n in range(many)])
    ledger.settle()
    seen = []
    for row in ledger.pending():
        seen.append(row.index)
        ledger.mark(row.index, "completed")
    assert seen == list(range(many))
    assert list(ledger.pending()) == []
    assert list(ledger.done_indices()) == seen


def test_the_plan_is_taken_in_as_it_comes() -> None:
    ledger = Ledger()
    given = 0

    def one_by_one() -> Iterator[PlannedRow]:
        nonlocal given
        for n, row in enumerate(rows("A B")):
            given += 1
            yield PlannedRow(n, 0, row.key, row.detail)

    ledger.plan(one_by_one())
    ledger.plan([PlannedRow(2, 0, h("C"), h("C"))])
    ledger.settle()
    assert given == 2
    assert [row.index for row in ledger.pending()] == [0, 1, 2]
    ledger.close()
    ledger.close()


def test_no_room_for_the_ledger_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger = ledger_of(rows("A"))
    ledger._db.execute("PRAGMA max_page_count=20")
    with pytest.raises(StorageFullError, match=r"full.*set TMPDIR"):
        ledger.plan(PlannedRow(n, 0, h(str(n)), h(str(n))) for n in range(1, 10_000))


# -- the rules, spelled out slowly ------------------------------------------------------------------------------


def reference(planned: list[Sample], stored: list[Sample]) -> dict[int, str]:
    """Which rows are done, by the rules of matching in their plainest form."""
    ids, seen = [], Counter[bytes]()
    for row in planned:
        ids.append(f"{row.detail.hex()}-{seen[row.detail]}")
        seen[row.detail] += 1
    done: dict[int, str] = {}
    samples = [sample for sample in stored if sample.state in DONE_STATES]
    for fits in (
        lambda n, sample: ids[n] == sample.rollout_id,
        lambda n, sample: planned[n].detail == sample.detail,
        lambda n, sample: planned[n].key == sample.key,
    ):
        left = []
        for sample in samples:
            row = next((n for n in range(len(planned)) if n not in done and fits(n, sample)), None)
            if row is None:
                left.append(sample)
            else:
                done[row] = sample.state
        samples = left
    states = dict(done)
    for sample in stored:
        if sample.state not in DONE_STATES and sample.rollout_id in ids:
            row = ids.index(sample.rollout_id)
            if row not in done:
                states[row] = sample.state
    return states


plain_rows = st.builds(Sample, st.sampled_from("AB"), st.sampled_from("12"))


@st.composite
def stored_samples(draw: st.DrawFn) -> Sample:
    row = draw(plain_rows)
    state = draw(st.sampled_from(["completed", "partial", "discarded", "failed", "cancelled"]))
    copy = draw(st.none() | st.integers(0, 3))
    return row._replace(state=state, rollout_id=None if copy is None else f"{row.detail.hex()}-{copy}")


@settings(max_examples=150, deadline=None)
@given(st.lists(plain_rows, max_size=7), st.lists(stored_samples(), max_size=8))
def test_matching_follows_the_rules(planned: list[Sample], stored: list[Sample]) -> None:
    expected = reference(planned, stored)
    ledger = ledger_of(planned, stored)
    matched, surplus = ledger.settle()
    assert {n: ledger.state(n) for n in range(len(planned)) if ledger.state(n) != "pending"} == expected
    done = sum(state in DONE_STATES for state in expected.values())
    assert matched == done
    assert matched + surplus == sum(sample.state in DONE_STATES for sample in stored)
    assert [row.index for row in ledger.pending()] == [
        n for n in range(len(planned)) if expected.get(n) not in DONE_STATES
    ]
    ledger.close()
