from __future__ import annotations

import asyncio

import msgspec
import pytest

from taskmill.errors import AuthenticationError, BadRequestError, ContextWindowError, ModelError
from taskmill.models import Completion, Request, Sampling
from taskmill.records import Message, ToolCall, ToolSpec
from tests.models.semantics import Backend, asking, every_backend, schema

HELLO = Message("assistant", "hello", reasoning="They greet me.")
CALLS = Message(
    "assistant",
    "Both at once.",
    tool_calls=(
        ToolCall("a", "ls", '{"path": "."}'),
        ToolCall("b", "ls", '{"path": "'),
        ToolCall("c", "nothing"),
    ),
)
LS = ToolSpec("ls", "List the files of a folder.", msgspec.Raw(schema(path="string")))
SHORT = Sampling(max_tokens=32, temperature=0.0, seed=1)

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")


# -- of every model -------------------------------------------------------------------------------------------


@every_backend()
async def test_an_answer_is_an_assistant_s_turn_with_its_accounts(backend: Backend) -> None:
    async with backend.open([HELLO]) as model:
        completion = await model.complete(asking("Say hello.", sampling=SHORT))
    assert model.name
    assert completion.message.role == "assistant"
    assert completion.message.content or completion.message.reasoning
    assert completion.finish_reason in ("stop", "length")
    assert completion.attempts == 1
    assert not completion.replayed
    assert min(completion.seconds, completion.waiting) >= 0
    usage = completion.usage
    assert 0 <= usage.cached_tokens <= usage.input_tokens
    assert min(usage.output_tokens, usage.reasoning_tokens) >= 0
    assert completion.model


@every_backend()
async def test_an_answer_can_be_stored_and_read_again(backend: Backend) -> None:
    async with backend.open([CALLS]) as model:
        completion = await model.complete(asking("List the files.", tools=(LS,), sampling=SHORT))
    assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion


@every_backend()
async def test_every_call_has_an_id_and_a_name(backend: Backend) -> None:
    async with backend.open([CALLS]) as model:
        completion = await model.complete(asking("List the files.", tools=(LS,), sampling=SHORT))
    calls = completion.message.tool_calls
    assert len({c.id for c in calls}) == len(calls)
    assert all(c.id and c.name for c in calls)
    assert (completion.finish_reason == "tool_calls") == bool(calls)


@every_backend()
async def test_calls_side_by_side_are_all_answered(backend: Backend) -> None:
    async with backend.open([HELLO]) as model:
        asked = [model.complete(asking(f"Say hello, {n}.", sampling=SHORT)) for n in range(6)]
        answers = await asyncio.gather(*asked)
    assert len(answers) == 6
    assert all(a.message.role == "assistant" for a in answers)


@every_backend()
async def test_a_cancelled_call_is_over_and_the_next_one_works(backend: Backend) -> None:
    async with backend.open([HELLO]) as model:
        task = asyncio.create_task(model.complete(asking("Say hello.", sampling=SHORT)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        completion = await model.complete(asking("Say hello again.", sampling=SHORT))
    assert completion.message.role == "assistant"


@every_backend()
async def test_closing_twice_is_fine(backend: Backend) -> None:
    async with backend.open([HELLO]) as model:
        await model.complete(asking("Say hello.", sampling=SHORT))
        await model.close()
        await model.close()


@every_backend()
async def test_a_conversation_with_calls_and_observations_is_taken(backend: Backend) -> None:
    turn = Message("assistant", "", reasoning="Look.", tool_calls=(ToolCall("a", "ls", '{"path": "."}'),))
    observed = Message("tool", "a.txt \u2028 \ud83d", tool_call_id="a", name="ls", success=True)
    request = Request((Message("system", "Be brief."), Message("user", "Look."), turn, observed), tools=(LS,))
    async with backend.open([HELLO]) as model:
        completion = await model.complete(
            msgspec.structs.replace(request, tool_choice="none", sampling=SHORT)
        )
    assert completion.message.tool_calls == ()


# -- of models that follow a script ---------------------------------------------------------------------------


@every_backend(following=True)
async def test_what_was_said_arrives_as_it_was_said(backend: Backend) -> None:
    async with backend.open([HELLO, CALLS]) as model:
        assert (await model.complete(asking("1"))).message == HELLO
        second = await model.complete(asking("2"))
    assert second.message == CALLS
    assert second.finish_reason == "tool_calls"


@every_backend(following=True)
async def test_thinking_in_the_text_becomes_reasoning(backend: Backend) -> None:
    # A scripted turn is parsed already; text is what an endpoint sends.
    async with backend.open([Message("assistant", "hello", reasoning="hm")]) as model:
        completion = await model.complete(asking("1"))
    assert (completion.message.reasoning, completion.message.content) == ("hm", "hello")


@every_backend(following=True)
@pytest.mark.parametrize(
    "error", [AuthenticationError("no"), BadRequestError("no"), ContextWindowError("the prompt is too long")]
)
async def test_a_refusal_is_a_model_error_of_its_kind(backend: Backend, error: ModelError) -> None:
    async with backend.open([error, HELLO]) as model:
        with pytest.raises(type(error)) as caught:
            await model.complete(asking("1"))
        assert type(caught.value) is type(error)
        assert caught.value.attempts == 1
        assert (await model.complete(asking("1"))).message == HELLO
