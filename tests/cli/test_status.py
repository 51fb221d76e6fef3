"""`taskmill status`: how a run stands, read from its files while anyone may be writing them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from typing import Any

from taskmill.testing.endpoint import answer, call, refusal
from tests.batch.serving import LONGEST, serving
from tests.cli.conftest import Place, Said, ended

Command = Callable[..., Said]


def script(body: dict[str, Any]) -> Any:
    prompt = body["messages"][0]["content"]
    if "fail" in prompt:
        return refusal(400, "not this one")
    if "plain" in prompt:
        return answer("no reasoning")
    return answer("fine", reasoning="hm")


def test_a_run_that_is_done(place: Place, taskmill: Command) -> None:
    place.prompts("a", "b", "plain")
    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "the/model", "--base-url", endpoint.url)
    before = place.run().content()

    said = taskmill("status", "data/p")
    found = json.loads(taskmill("status", "data/p", "--json").out)

    assert said.code == 0
    assert "3 planned: 2 completed, 1 discarded" in said.out
    assert "the/model" in said.out
    assert found["outcomes"] == {"completed": 2, "discarded": 1}
    assert (found["calls"], found["sessions"]) == (3, 1)
    assert found["usage"] == {
        "input_tokens": 30, "output_tokens": 15, "cached_tokens": 0, "reasoning_tokens": 0
    }  # fmt: skip
    assert place.run().content() == before


def test_failures_are_grouped_by_class_with_a_message_and_the_rows(place: Place, taskmill: Command) -> None:
    place.prompts("fail 0", "a", "fail 2", *[f"fail {n}" for n in range(3, 10)])
    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "--max-failures", "1")

    said = taskmill("status", "data/p")

    assert said.code == 1
    assert "9 × BadRequestError" in said.out
    assert "not this one" in said.out
    assert "rows 0, 2, 3, 4, 5 and 4 more" in said.out


def test_a_failure_that_a_later_attempt_made_good_is_shown_no_more(place: Place, taskmill: Command) -> None:
    place.prompts("fail 0", "a")
    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
    with serving(lambda body: answer("fine", reasoning="hm")) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "--resume")

    found = json.loads(taskmill("status", "data/p", "--json").out)

    assert found["failures"] == []
    assert found["outcomes"] == {"completed": 2}
    assert found["sessions"] == 2


def test_a_live_run_is_read_without_its_lock_and_a_killed_one_says_what_was_in_flight(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a", "b")
    under_way = threading.Semaphore(0)

    def slow(body: dict[str, Any]) -> Any:
        if len(body["messages"]) == 1:
            return answer("", calls=[call("todo", {})], reasoning="hm")
        under_way.release()
        return answer("late", latency=60)

    with serving(slow) as endpoint:
        process = place.start("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url, "-b", "1")
        try:
            for _ in range(2):
                assert under_way.acquire(timeout=LONGEST)
            live = taskmill("status", "data/p")
        finally:
            process.kill()
            ended(process)
    killed = taskmill("status", "data/p")

    assert live.code == killed.code == 1
    assert f"running: pid {process.pid} on " in live.out
    assert f"its last session was killed (pid {process.pid} on " in killed.out
    assert "in flight  2: rows 0 (1 call kept), 1 (1 call kept)" in killed.out
    assert "2 planned: 2 pending" in killed.out


def test_a_dataset_that_is_gone_is_said_and_nothing_is_taken_for_done(
    place: Place, taskmill: Command
) -> None:
    place.prompts("a")
    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
    (place.folder / "p.jsonl").unlink()

    said = taskmill("status", "data/p")

    assert said.code == 1
    assert "the dataset 'p.jsonl' is not there" in said.out


def test_no_run_at_that_place(place: Place, taskmill: Command) -> None:
    said = taskmill("status", "data/none")
    assert said.code == 2
    assert "there is no run in 'data/none'" in said.err


def test_a_torn_line_stops_no_reader(place: Place, taskmill: Command) -> None:
    place.prompts("a", "fail")
    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
    for name in ("batch_0.jsonl", "outcomes.jsonl", "sessions.jsonl"):
        path = place.run().path / name
        path.write_bytes(path.read_bytes() + b'{"half": "of a li')

    said = taskmill("status", "data/p")

    assert said.code == 1
    assert "2 planned: " in said.out
    assert "1 completed" in said.out


def test_a_copy_of_a_run_elsewhere_has_the_same_status(place: Place, taskmill: Command) -> None:
    place.prompts("a")
    with serving(script) as endpoint:
        taskmill("batch", "p.jsonl", "--model", "m", "--base-url", endpoint.url)
    shutil.copytree(place.run().path, place.folder / "copy")
    assert "1 planned: 1 completed" in taskmill("status", "copy").out
