"""What the display says of a run, with a clock that the test moves."""

from __future__ import annotations

from taskmill.cli.display import final_line, harmless, money, pace, progress_line
from taskmill.engine.progress import Progress
from taskmill.models.base import Completion
from taskmill.records import Message, Usage


class Run:
    """A run of which the test says what happens when."""

    def __init__(self, total: int, *, reused: int = 0) -> None:
        self.now = 1000.0
        self.progress = Progress(clock=lambda: self.now)
        self.progress.begin(total, reused)

    def finish(self, count: int = 1, *, state: str = "completed", each: float = 0.0, calls: int = 0) -> None:
        for _ in range(count):
            self.now += each
            self.progress.recorded(state, calls=calls, tool_calls=0, tokens=10 * calls, cost=0.0)

    def answer(self, *, cost: float | None = 0.5) -> None:
        usage = Usage(input_tokens=900, output_tokens=100)
        self.progress.answered(Completion(Message("assistant", "hm"), usage, cost=cost))

    @property
    def live(self) -> list[str]:
        return progress_line(self.progress).split("  ")

    def final(self, *, interrupted: bool = False) -> list[str]:
        return final_line(self.progress, interrupted=interrupted).split(", ")


def test_the_last_line_has_the_rate_of_the_whole_session() -> None:
    run = Run(4)
    run.now += 7.0
    run.finish(4, calls=3)

    assert run.final() == [
        "4/4 done",
        "4 completed",
        "12 calls",
        "120 tokens",
        "$0.0000",
        "34.3/min",
        "in 7s",
    ]


def test_what_was_cancelled_or_failed_is_not_done() -> None:
    run = Run(6)
    run.now += 3.0
    run.finish(2, state="cancelled")
    run.finish(1, state="failed")

    assert run.final(interrupted=True) == ["0/6 done", "2 cancelled", "1 failed", "6 left", "in 3s"]
    assert run.live[0] == "0/6 done"


def test_before_anything_is_finished_no_time_left_is_guessed_and_work_is_seen_all_the_same() -> None:
    run = Run(6)
    run.progress.in_flight = 2
    run.now += 5.0
    run.answer()

    assert run.live == ["0/6 done", "5s, ? left", "2 under way", "1 call", "1,000 tokens", "$0.5000"]


def test_a_call_is_not_counted_twice_when_its_rollout_ends() -> None:
    run = Run(2)
    run.answer()
    run.finish(calls=1)

    assert "1 call" in run.live


def test_before_it_has_begun_a_run_says_that_it_starts() -> None:
    now = 0.0
    progress = Progress(clock=lambda: now)
    now = 4.0
    assert progress_line(progress) == "starting  4s"


def test_a_burst_at_the_end_changes_neither_rate_nor_time_left_by_much() -> None:
    run = Run(1000)
    run.finish(100, each=1.0)
    before = run.progress.seconds_left
    run.finish(5, each=0.01)
    after = run.progress.seconds_left

    assert before is not None
    assert after is not None
    assert 0.75 * before < after <= before


def test_a_rate_follows_a_run_that_has_become_slower() -> None:
    run = Run(1000)
    run.finish(300, each=0.1)
    run.finish(20, each=10.0)

    assert 0.09 < run.progress.rate < 0.12


def test_time_left_is_never_negative_and_falls_while_work_goes_on() -> None:
    run = Run(60, reused=10)
    told = []
    for _ in range(60):
        run.finish(each=2.0)
        told.append(run.progress.seconds_left)

    known = [seconds for seconds in told if seconds is not None]
    assert len(known) == 60
    assert known == sorted(known, reverse=True)
    assert known[-1] == 0


def test_between_two_ends_time_left_counts_down_and_grows_once_the_next_is_overdue() -> None:
    run = Run(12)
    run.finish(2, each=10.0)
    told = []
    for _ in range(5):
        told.append(run.progress.seconds_left)
        run.now += 5.0
    assert told == [100.0, 95.0, 90.0, 115.0, 140.0]


def test_where_no_model_is_asked_nothing_is_said_of_tokens_and_an_unknown_total_has_no_time_left() -> None:
    run = Run(0)
    run.now += 2.0
    run.finish(5, state="valid")

    assert run.live == ["5 done", "2s", "0 under way", "5 valid", "2.5/s"]
    assert run.final() == ["5 done", "5 valid", "2.5/s", "in 2s"]


def test_rows_of_running_batches_are_told_while_they_run_and_added_up_over_workers() -> None:
    run = Run(4)
    run.progress.heard(5, rows=None)
    assert not any("in the batch" in part for part in run.live)
    for worker, rows in ((1, 7), (2, 5), (1, 6)):
        run.progress.heard(5, rows=rows, worker=worker)
    assert "11 in the batch" in run.live
    assert "4 turns" in run.live
    assert not any("in the batch" in part for part in run.final())


def test_a_slow_pace_is_told_by_the_minute_or_the_hour() -> None:
    assert [pace(12.54), pace(3.2 / 60), pace(0.5 / 60)] == ["12.5/s", "3.2/min", "30.0/h"]


def test_a_cost_that_is_not_known_is_told_in_words() -> None:
    run = Run(1)
    run.answer(cost=None)
    assert "cost unknown" in run.live
    assert [money(None), money(0.5), money(1234.5)] == ["cost unknown", "$0.5000", "$1,234.50"]


def test_what_would_steer_a_terminal_is_written_out() -> None:
    assert harmless("a\x1b[31mb\rc\u202ed\u2066e\n\té") == "a\\x1b[31mb\\rc\\u202ed\\u2066e\n\té"
