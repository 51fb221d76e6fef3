"""Every planned row ends in exactly one recorded state."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from taskmill.errors import RunAbortedError
from taskmill.models.base import Completion, Request
from taskmill.records import Message, ToolCall
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer, call, rate_limited, refusal, silence
from tests.batch.mill import USAGE, Mill, add, answering, asks, echo, prompt_of, prompts_of, says, turn_of


def roles(row: Any) -> list[str]:
    return [turn["from"] for turn in row["conversations"]]


async def test_each_row_has_one_state_and_the_states_add_up_to_the_plan(mill: Mill) -> None:
    mill.prompts("completes", "never stops", "invents", "does not think", "is refused", "completes too")

    def script(request: Request) -> Any:
        match prompt_of(request):
            case "never stops":
                return asks("add", {"a": 1, "b": 2})
            case "invents":
                return asks("imagine")
            case "does not think":
                return says(reasoning=None)
            case "is refused":
                return RuntimeError("no")
        return says()

    stored = await mill.run(answering(script), tools=[add], max_iterations=5, max_failures=1.0)

    assert stored.statistics["outcomes"] == {
        "completed": 2,
        "partial": 2,
        "discarded": 1,
        "failed": 1,
        "cancelled": 0,
        "pending": 0,
    }
    recorded = [row["prompt_index"] for row in (*stored.rows, *stored.outcomes)]
    assert sorted(recorded) == list(range(6))
    partial = {row["prompt_index"]: row["stop_reason"] for row in stored.rows if row["partial"]}
    assert partial == {1: "max_iterations", 2: "unusable_tool_calls"}
    assert all(row["completed"] is not row["partial"] for row in stored.rows)


# -- discarded ------------------------------------------------------------------------------------------------


async def test_a_sample_without_reasoning_is_discarded_once_and_for_all(mill: Mill) -> None:
    """Three calls in total over two resumes: what the filter takes out is marked, not forgotten."""
    mill.prompts("a", "b", "c")
    model = answering(lambda _: says(reasoning=None))

    await mill.run(model)
    await mill.run(model, resume=True)
    stored = await mill.run(model, resume=True)

    assert model.calls == 3
    assert [(row["state"], row["reason"]) for row in stored.outcomes] == [("discarded", "no_reasoning")] * 3
    assert stored.rows == []
    assert stored.trajectories == []
    assert stored.checkpoint["completed_prompts"] == [0, 1, 2]
    assert stored.outcome_counts() == {"discarded": 3}
    assert stored.statistics["discarded"] == {"no_reasoning": 3}
    assert sum(b["discarded_no_reasoning"] for b in stored.checkpoint["batch_stats"].values()) == 3


@pytest.mark.parametrize("thought", ["", "  \n"])
async def test_blank_reasoning_is_none(mill: Mill, thought: str) -> None:
    mill.prompts("a")
    stored = await mill.run(answering(lambda _: says(reasoning=thought)))
    assert stored.outcome_counts() == {"discarded": 1}


async def test_one_turn_with_reasoning_keeps_a_sample(mill: Mill) -> None:
    mill.prompts("a")

    def script(request: Request) -> Any:
        return asks("add", {"a": 1, "b": 2}) if turn_of(request) == 0 else says(reasoning=None)

    stored = await mill.run(answering(script), tools=[add])

    assert stored.outcome_counts() == {"completed": 1}
    assert stored.statistics["reasoning_statistics"] == {
        "total_assistant_turns": 2,
        "turns_with_reasoning": 1,
        "turns_without_reasoning": 1,
    }


async def test_the_filter_has_a_switch(mill: Mill) -> None:
    mill.prompts("a")
    stored = await mill.run(answering(lambda _: says(reasoning=None)), discard_without_reasoning=False)
    assert stored.outcome_counts() == {"completed": 1}
    assert len(stored.trajectories) == 1


async def test_the_switch_may_be_turned_on_at_a_resume(mill: Mill) -> None:
    mill.prompts("a", "b")
    await mill.run(answering(lambda _: says(reasoning=None)), max_samples=1)
    stored = await mill.run(
        answering(lambda _: says(reasoning=None)), resume=True, discard_without_reasoning=False
    )
    assert stored.outcome_counts() == {"completed": 1, "discarded": 1}


# -- failed ---------------------------------------------------------------------------------------------------


async def test_a_sample_that_the_endpoint_failed_at_the_first_call_is_failed_and_runs_again(
    mill: Mill,
) -> None:
    mill.prompts("a")
    async with FakeEndpoint([refusal(400, "not today"), answer("yes", reasoning="hm")]) as endpoint:
        settings: dict[str, Any] = {"base_url": endpoint.url}
        failed = await mill.run("m", **settings)
        assert failed.outcome_counts() == {"failed": 1}
        (outcome,) = failed.outcomes
        assert (failed.rows, failed.trajectories) == ([], [])
        assert failed.checkpoint["completed_prompts"] == []

        stored = await mill.run("m", resume=True, **settings)

    assert outcome["error"]["type"] == "BadRequestError"
    assert "not today" in outcome["error"]["message"]
    assert outcome["attempt"] == 1
    assert stored.outcome_counts() == {"completed": 1}
    assert len(stored.trajectories) == 1


async def test_a_sample_that_the_endpoint_failed_at_the_second_call_is_failed_and_the_first_is_not_paid_for_again(
    mill: Mill,
) -> None:
    mill.prompts("a")
    seen: list[int] = []

    def script(body: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        seen.append(turn)
        if turn == 0:
            return answer("", calls=[call("add", {"a": 1, "b": 2})], reasoning="hm")
        return refusal(400, "not today") if len(seen) == 2 else answer("3", reasoning="yes")

    async with FakeEndpoint(script) as endpoint:
        settings: dict[str, Any] = {
            "base_url": endpoint.url,
            "tools": [add],
            "prices": {"m": {"input": 1.0, "output": 2.0}},
        }
        failed = await mill.run("m", **settings)
        (outcome,) = failed.outcomes
        assert failed.outcome_counts() == {"failed": 1}
        assert failed.trajectories == []
        assert failed.statistics["api_calls"] == 1

        stored = await mill.run("m", resume=True, **settings)

    assert roles(outcome) == ["system", "human", "gpt", "tool"]
    assert seen == [0, 1, 1]
    assert stored.outcome_counts() == {"completed": 1}
    assert roles(stored.trajectories[0]) == ["system", "human", "gpt", "tool", "gpt"]
    assert stored.rows[0]["api_calls"] == 2
    assert stored.rows[0]["billed"]["calls"] == 1
    assert stored.statistics["api_calls"] == 2
    assert stored.statistics["tokens"]["input_tokens"] == 20
    assert stored.statistics["tokens"]["output_tokens"] == 10
    assert stored.statistics["cost"] == pytest.approx((20 * 1.0 + 10 * 2.0) / 1e6)
    assert mill.told("recorded")[0]["tokens"] == 15
    assert stored.statistics["errors"] == {"BadRequestError": 1}


async def test_a_failure_without_reasoning_is_failed_and_never_discarded(mill: Mill) -> None:
    mill.prompts("a")
    stored = await mill.run(
        answering([asks("add", {"a": 1, "b": 2}, reasoning=None), RuntimeError("no")]), tools=[add]
    )
    assert stored.outcome_counts() == {"failed": 1}


async def test_the_attempts_of_a_row_are_numbered_and_the_latest_decides(mill: Mill) -> None:
    mill.prompts("a", "b")
    await mill.run(answering([]), max_failures=1.0)
    await mill.run(answering([]), resume=True, max_failures=1.0)
    stored = await mill.run(answering([says(), RuntimeError("third")]), resume=True)

    b = [row for row in stored.outcomes if row["prompt_index"] == 1]
    assert [row["attempt"] for row in b] == [1, 2, 3]
    assert b[-1]["error"]["message"] == "third"
    assert stored.outcome_counts() == {"completed": 1, "failed": 1}
    assert stored.statistics["errors"] == {"BadRequestError": 4, "RuntimeError": 1}


async def test_a_failure_says_how_often_the_endpoint_was_tried(mill: Mill) -> None:
    mill.prompts("a")
    async with FakeEndpoint(refusal(500)) as endpoint:
        stored = await mill.run("m", base_url=endpoint.url, max_attempts=2)
    assert endpoint.calls == 2
    assert stored.outcomes[0]["error"]["attempts"] == 2


async def test_with_a_wrong_key_every_row_is_failed_and_the_right_key_runs_them_all(
    mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    mill.prompts("a", "b", "c", "d")
    async with FakeEndpoint(answer("fine", reasoning="hm"), key="right") as endpoint:
        with pytest.raises(RunAbortedError, match=r"4 of 4 .*AuthenticationError.*401"):
            await mill.run("m", base_url=endpoint.url, api_key="wrong")
        first = mill.told("first_error")
        kinds = [event["event"] for event in mill.events]
        assert mill.stored.outcome_counts() == {"failed": 4}

        stored = await mill.run("m", base_url=endpoint.url, api_key="right", resume=True)

    assert len(first) == 1
    assert first[0]["type"] == "AuthenticationError"
    assert kinds.index("first_error") < kinds.index("recorded"), "not shown at once"
    assert endpoint.answered == 4
    assert stored.outcome_counts() == {"completed": 4}


async def test_a_run_without_a_listener_logs_warnings_and_the_first_failure(
    mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    mill.prompts("a", b"123", "b")
    caplog.set_level(logging.WARNING)

    await mill.run(answering([]), on_event=None, max_failures=1.0)

    lines = [record.getMessage() for record in caplog.records if record.name == "taskmill.batch"]
    assert len(lines) == 2
    assert "line 2 is skipped" in lines[0]
    assert "the first: BadRequestError" in lines[1]


async def test_verbose_logs_a_line_for_each_row_with_as_much_of_the_prompt_as_was_asked_for(
    mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    mill.prompts("abcdefghij", "klmnopqrst")
    caplog.set_level(logging.INFO)

    await mill.run(on_event=None, verbose=True, log_prefix_chars=4)

    lines = [record.getMessage() for record in caplog.records if "completed" in record.getMessage()]
    assert len(lines) == 2
    assert "'abcd'" in lines[0]
    assert "abcde" not in lines[0]


async def test_a_wrong_key_stops_a_long_run_early(mill: Mill) -> None:
    mill.prompts(*[str(number) for number in range(500)])
    async with FakeEndpoint(answer("fine", reasoning="hm"), key="right") as endpoint:
        with pytest.raises(RunAbortedError):
            await mill.run("m", base_url=endpoint.url, api_key="wrong", batch_size=1, num_workers=8)
    assert endpoint.calls <= 16
    counts = mill.stored.outcome_counts()
    assert counts["failed"] + counts["pending"] == 500


@pytest.mark.parametrize(("allowed", "stops"), [(0.2, True), (0.3, False), (1.0, False)])
async def test_the_fraction_of_failures_that_ends_a_run_can_be_set(
    mill: Mill, allowed: float, stops: bool
) -> None:
    """A quarter of the rows fail."""
    mill.prompts(*[str(number) for number in range(100)])

    def script(request: Request) -> Any:
        return RuntimeError("no") if int(prompt_of(request)) % 4 == 0 else says()

    settings: dict[str, Any] = {"batch_size": 100, "max_failures": allowed}
    if stops:
        with pytest.raises(RunAbortedError, match=r"gave up after \d+ of \d+ rollouts failed; the first was"):
            await mill.run(answering(script), **settings)
        assert mill.stored.outcome_counts()["pending"] > 70
        assert mill.stored.trajectories, "what was done is merged all the same"
    else:
        stored = await mill.run(answering(script), **settings)
        assert stored.outcome_counts() == {"completed": 75, "failed": 25}


async def test_what_a_failed_row_had_is_kept_beside_the_shards_for_people(mill: Mill) -> None:
    mill.prompts("a")
    stored = await mill.run(
        answering([asks("add", {"a": 1, "b": 2}, reasoning="I add"), RuntimeError("no")]), tools=[add]
    )
    (outcome,) = stored.outcomes
    assert "I add" in outcome["conversations"][2]["value"]
    assert '"sum":3' in outcome["conversations"][3]["value"].replace(" ", "")
    assert outcome["usage"]["input_tokens"] == 10
    assert not list(stored.path.glob("batch_*.jsonl"))


# -- partial --------------------------------------------------------------------------------------------------


async def test_at_the_iteration_limit_a_sample_is_partial_and_nobody_unasked_is_made_a_human(
    mill: Mill,
) -> None:
    mill.prompts("a")
    model = answering(
        lambda request: says("so far: 3") if request.tool_choice == "none" else asks("add", {"a": 1, "b": 2})
    )

    stored = await mill.run(model, tools=[add], max_iterations=1)

    (row,) = stored.trajectories
    assert stored.outcome_counts() == {"partial": 1}
    assert roles(row) == ["system", "human", "gpt", "tool", "gpt"]
    assert [turn["value"] for turn in row["conversations"] if turn["from"] == "human"] == ["a"]
    assert model.calls == 2
    assert model.requests[-1].tools == model.requests[0].tools
    await mill.run(model, tools=[add], max_iterations=1, resume=True)
    assert model.calls == 2


async def test_a_model_that_calls_tools_at_the_limit_to_the_last_is_partial_too(mill: Mill) -> None:
    mill.prompts("a")
    model = answering(lambda _: asks("add", {"a": 1, "b": 2}))

    stored = await mill.run(model, tools=[add], max_iterations=1)

    (row,) = stored.rows
    assert (row["partial"], row["stop_reason"], row["api_calls"]) == (True, "max_iterations", 2)
    assert roles(row) == ["system", "human", "gpt", "tool"]


async def test_retries_of_a_bad_turn_put_no_words_into_a_humans_mouth(mill: Mill) -> None:
    mill.prompts("a")
    bad = ['{"a": 1', "[1]", "{}"]

    def script(request: Request) -> Any:
        return asks("add", bad[turn_of(request)])

    stored = await mill.run(answering(script), tools=[add])

    (row,) = stored.rows
    assert row["stop_reason"] == "unusable_tool_calls"
    assert roles(row) == ["system", "human", *["gpt", "tool"] * 3]
    assert row["tool_stats"]["add"] == {"count": 3, "success": 0, "failure": 3}


async def test_an_answer_cut_at_its_length_is_partial(mill: Mill) -> None:
    mill.prompts("a")
    cut = Completion(Message("assistant", "half an ans", reasoning="hm"), USAGE, finish_reason="length")
    stored = await mill.run(answering(lambda _: cut))
    (row,) = stored.rows
    assert (row["partial"], row["stop_reason"], row["truncated"]) == (True, "length", True)


async def test_a_turn_with_a_good_and_an_invented_tool_runs_the_good_one_and_counts_both(mill: Mill) -> None:
    mill.prompts("a")

    def script(request: Request) -> Any:
        if turn_of(request):
            return says("done")
        calls = (ToolCall("1", "add", '{"a": 1, "b": 2}'), ToolCall("2", "imagine"))
        return Completion(Message("assistant", reasoning="hm", tool_calls=calls), USAGE, "tool_calls")

    stored = await mill.run(answering(script), tools=[add])

    (row,) = stored.rows
    observations = row["conversations"][3]["value"]
    assert '"sum"' in observations
    assert "There is no tool 'imagine'" in observations
    assert "add" in observations
    assert row["tool_stats"]["add"] == {"count": 1, "success": 1, "failure": 0}
    assert json.loads(row["unknown_tools"]) == ["imagine"]
    assert prompts_of(stored.trajectories) == []


async def test_on_event_that_raises_ends_the_run_instead_of_being_swallowed(mill: Mill) -> None:
    mill.prompts(*[str(number) for number in range(200)])
    model = answering(echo)

    def listen(event: Any) -> None:
        if event["event"] == "recorded":
            raise LookupError("a bug of the listener")

    with pytest.raises(LookupError, match="a bug of the listener"):
        await mill.run(model, on_event=listen, batch_size=1, num_workers=1, sync="none")
    assert model.calls < 20
    stored = await mill.run(model, resume=True)
    assert stored.outcome_counts() == {"completed": 200}
    assert model.calls == 200


# -- endpoints in trouble -------------------------------------------------------------------------------------


async def test_a_storm_of_refusals_drops_no_row(mill: Mill) -> None:
    mill.prompts(*[str(number) for number in range(20)])
    left = 12

    def script(body: dict[str, Any]) -> Any:
        nonlocal left
        left -= 1
        return rate_limited(retry_after=0) if left >= 0 else answer("fine", reasoning="hm")

    async with FakeEndpoint(script) as endpoint:
        stored = await mill.run("m", base_url=endpoint.url, batch_size=2, num_workers=10)

    assert stored.outcome_counts() == {"completed": 20}
    (endpoint,) = stored.statistics["endpoint"]
    assert (endpoint["outcome"], endpoint["refusals"]) == ("finished", 12)


async def test_the_statistics_tell_of_the_endpoint_in_every_session(mill: Mill) -> None:
    mill.prompts("a", "b")

    def script(body: dict[str, Any]) -> Any:
        return rate_limited(retry_after=0) if endpoint.calls <= 2 else answer("fine", reasoning="hm")

    async with FakeEndpoint(script) as endpoint:
        await mill.run("m", base_url=endpoint.url, max_samples=1)
        stored = await mill.run("m", base_url=endpoint.url, resume=True)

    told = stored.statistics["endpoint"]
    assert [session["refusals"] for session in told] == [2, 0]
    assert told[0]["started"] < told[1]["started"]


async def test_one_call_that_is_never_answered_fails_its_row_and_the_run_ends(mill: Mill) -> None:
    mill.prompts(*[str(number) for number in range(10)])

    def script(body: dict[str, Any]) -> Any:
        return silence() if body["messages"][-1]["content"] == "9" else answer("fine", reasoning="hm")

    async with FakeEndpoint(script) as endpoint:
        stored = await mill.run("m", base_url=endpoint.url, call_timeout=0.5, max_attempts=1)

    assert stored.outcome_counts() == {"completed": 9, "failed": 1}
    assert stored.outcomes[0]["error"]["type"] == "ModelTimeoutError"


async def test_a_long_wait_that_the_endpoint_asks_for_is_said_and_the_time_for_a_call_can_be_set(
    mill: Mill,
) -> None:
    mill.prompts("a")
    async with FakeEndpoint(lambda body: rate_limited(retry_after=7200)) as endpoint:
        stored = await mill.run("m", base_url=endpoint.url, total_timeout=5)

    assert stored.outcome_counts() == {"failed": 1}
    assert stored.outcomes[0]["error"]["type"] == "RateLimitedError"
    (told,) = mill.warnings()
    assert told.startswith("the endpoint of model 'm' asks to wait 7,200 s")
    assert "after 5 s in all" in told


async def test_each_row_samples_with_a_seed_of_its_own_made_of_the_runs(mill: Mill) -> None:
    mill.prompts("a", "a", "b")

    def script(request: Request) -> Any:
        return asks("add", {"a": 1, "b": 1}) if turn_of(request) == 0 else says()

    async def seeds(**settings: Any) -> list[int | None]:
        model = answering(script)
        await mill.run(model, tools=[add], num_workers=1, **settings)
        return [request.sampling.seed for request in model.requests]

    first = await seeds(run_name="first", sampling_seed=7)
    assert first[::2] == first[1::2], "all requests of a row have the same"
    assert len(set(first)) == 3
    assert all(seed is not None and 0 <= seed < 2**31 for seed in first)
    assert await seeds(run_name="again", sampling_seed=7) == first
    assert not set(await seeds(run_name="other", sampling_seed=8)) & set(first)
    assert await seeds(run_name="none") == [None] * 6


async def test_a_workspace_that_cannot_be_removed_costs_no_sample(
    mill: Mill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mill.prompts("a")

    def remove_tree(path: Any) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("taskmill.store.files.remove_tree", remove_tree)

    def script(request: Request) -> Any:
        return asks("terminal", {"command": "true"}) if turn_of(request) == 0 else says()

    stored = await mill.run(answering(script), distribution="minimal")

    assert stored.outcome_counts() == {"completed": 1}
    assert "Operation not permitted" in caplog.text


async def test_a_row_whose_sandbox_cannot_be_had_is_failed(mill: Mill, docker: Any) -> None:
    mill.prompts({"prompt": "a", "image": "none:9"}, "b")

    def script(request: Request) -> Any:
        return asks("terminal", {"command": "true"}) if turn_of(request) == 0 else says()

    stored = await mill.run(answering(script), distribution="minimal")

    assert stored.outcome_counts() == {"completed": 1, "failed": 1}
    (outcome,) = stored.outcomes
    assert outcome["error"]["type"] == "SandboxError"
    assert "none:9" in outcome["error"]["message"]


async def test_a_runner_may_run_again_and_counts_anew(mill: Mill) -> None:
    mill.prompts("a", "b")
    script = [RuntimeError("no"), says(), says()]
    runner = mill.runner(answering(script), max_failures=1.0)
    await runner.run()
    await runner.run(resume=True)

    progress = runner.progress
    assert (progress.total, progress.reused, dict(progress.states)) == (2, 1, {"completed": 1})
    assert (progress.calls, progress.tokens, progress.first_error) == (1, 15, None)
    assert mill.stored.outcome_counts() == {"completed": 2}
