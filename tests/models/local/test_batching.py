"""The running batch: who is in it changes nothing, who fails takes nobody along, and nobody waits for the longest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from taskmill.errors import ContextWindowError, ModelError, ModelMemoryError
from taskmill.models import Completion, Request
from taskmill.models.local import LocalModel
from taskmill.models.local.batcher import Batcher
from taskmill.records import Message
from tests.models.local.tiny import WORDS, asking, tiny_folder


def mixed(count: int = 32, *, longest: int = 12) -> list[Request]:
    """Prompts, limits and ways of sampling of many kinds."""
    chance = random.Random(5)
    words = WORDS.split()
    asked = []
    for number in range(count):
        text = " ".join(chance.choices(words, k=chance.choice((1, 3, 8, 20, 60))))
        sampling: dict[str, Any] = {"max_tokens": chance.randint(1, longest), "seed": number}
        sampling |= chance.choice(
            (
                {"temperature": 0.0},
                {"temperature": 1.0},
                {"temperature": 0.7, "top_p": 0.8},
                {"temperature": 1.3, "stop": ("e", "sea")},
            )
        )
        asked.append(asking(text, logprobs=True, **sampling))
    return asked


async def all_at_once(model: LocalModel, requests: Sequence[Request]) -> list[Completion]:
    return await asyncio.gather(*(model.complete(request) for request in requests))


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...] | None]:
    return [completion.token_ids for completion in completions]


async def counted(model: LocalModel) -> Batcher:
    """The batcher, looked at between two steps."""
    engine = model._used.engine
    return await asyncio.wrap_future(engine.run(lambda batcher: batcher))


# -- what a row gives -----------------------------------------------------------------------------------------


async def test_a_row_gives_the_same_tokens_alone_and_in_any_company(model: LocalModel) -> None:
    requests = mixed()
    alone = [await model.complete(request) for request in requests]
    together = await all_at_once(model, requests)
    model.module().register_forward_pre_hook(lambda *_: None)  # what was kept is forgotten
    shuffled = list(range(len(requests)))
    random.Random(1).shuffle(shuffled)
    few = LocalModel(model.path, max_batch_size=5)
    in_fives = await all_at_once(few, [requests[number] for number in shuffled])
    await few.close()
    trickling: list[asyncio.Task[Completion]] = []
    async with asyncio.TaskGroup() as group:
        for request in reversed(requests):
            trickling.append(group.create_task(model.complete(request)))
            await model.complete(asking("tea", max_tokens=2, temperature=0.0))
    assert tokens(together) == tokens(alone)
    assert tokens(in_fives) == [alone[number].token_ids for number in shuffled]
    assert tokens([task.result() for task in reversed(trickling)]) == tokens(alone)


async def test_a_row_gives_what_plain_generate_gives(model: LocalModel) -> None:
    requests = mixed()
    together = await all_at_once(model, requests)
    plainly = [await model.reference(request) for request in requests]
    assert [(c.message, c.finish_reason, c.token_ids) for c in together] == [
        (c.message, c.finish_reason, c.token_ids) for c in plainly
    ]
    for mine, reference in zip(together, plainly, strict=True):
        assert mine.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


async def test_a_sliding_window_is_kept_to(tmp_path: Path) -> None:
    model = LocalModel(tiny_folder(tmp_path, sliding=16))
    requests = mixed(12)
    # Alone, together, and with what the first two kept.
    first = [await model.complete(request) for request in requests]
    together = await all_at_once(model, requests)
    plainly = [await model.reference(request) for request in requests]
    await model.close()
    assert tokens(first) == tokens(together) == tokens(plainly)


async def test_seeds_make_copies_different_and_each_the_same_again(model: LocalModel) -> None:
    copies = [asking("Tell me a story", seed=seed, temperature=1.0) for seed in range(16)]
    first, second = await all_at_once(model, copies), await all_at_once(model, copies)
    texts = [completion.message.content for completion in first]
    assert len(set(texts)) == 16
    assert [completion.message.content for completion in second] == texts


async def test_without_a_seed_no_two_answers_are_the_same(model: LocalModel) -> None:
    answers = await all_at_once(model, [asking("Tell me a story", max_tokens=20)] * 4)
    assert len({answer.message.content for answer in answers}) == 4


async def test_close_calls_are_computed_alone(model: LocalModel) -> None:
    await model.complete(asking("tea"))
    batcher = await counted(model)
    batcher._margin = 1e9  # nothing is sure now
    requests = mixed(8)
    unsure = await all_at_once(model, requests)
    assert batcher.rechecked >= sum(completion.usage.output_tokens for completion in unsure)
    batcher._margin = 0.0
    before = batcher.rechecked
    assert tokens(await all_at_once(model, requests)) == tokens(unsure)
    assert batcher.rechecked == before


async def test_ids_and_log_probabilities_belong_to_the_tokens(model: LocalModel) -> None:
    completion = await model.complete(asking("What is", temperature=0.0, logprobs=True, max_tokens=6))
    assert completion.token_ids is not None
    assert completion.logprobs is not None
    assert len(completion.token_ids) == len(completion.logprobs) == completion.usage.output_tokens == 6
    tokenizer, module = model.tokenizer(), model.module()
    text = "<|im_start|>user\nWhat is<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(prompt) == completion.usage.input_tokens
    with torch.no_grad():
        logits = module(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
        1, torch.tensor(completion.token_ids)[:, None]
    )
    assert completion.logprobs == pytest.approx(expected[:, 0].tolist(), abs=1e-4)
    assert (await model.complete(asking("What is", temperature=0.0))).token_ids is None


# -- joining and leaving --------------------------------------------------------------------------------------


class Watched:
    """Rows and new tokens of each pass of a model's module."""

    def __init__(self, model: LocalModel) -> None:
        self.passes: list[tuple[int, int]] = []
        self._hook = model.module().register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        self.passes.append(tuple(kwargs["input_ids"].shape))

    def stop(self) -> None:
        self._hook.remove()


async def test_requests_that_come_together_share_passes(model: LocalModel) -> None:
    await asyncio.to_thread(model.module)
    watched = Watched(model)
    await all_at_once(model, [asking(f"Question {n}", temperature=0.0, max_tokens=10) for n in range(20)])
    assert max(rows for rows, _ in watched.passes) == 20
    assert len(watched.passes) < 40


async def test_a_short_answer_waits_for_no_long_one(model: LocalModel) -> None:
    ended: list[str] = []

    async def answer(name: str, limit: int) -> None:
        await model.complete(asking("story", max_tokens=limit, stop=(), temperature=1.0, seed=3))
        ended.append(name)

    ends = (await asyncio.to_thread(model.tokenizer)).eos_token_id
    bias = model.module().lm_head.register_forward_hook(
        lambda module, given, logits: logits.index_fill(-1, torch.tensor([ends]), -1e4)
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(answer("long", 300))
        await model.complete(asking("tea", max_tokens=1))
        group.create_task(answer("short", 3))
    bias.remove()
    assert ended == ["short", "long"]


async def test_rows_in_a_pass_are_bounded_and_models_share_the_smallest_bound(tiny: Path) -> None:
    wide, narrow = LocalModel(tiny), LocalModel(tiny, max_batch_size=3)
    assert wide.module() is narrow.module()
    watched = Watched(wide)
    await all_at_once(wide, [asking(f"Question {n}") for n in range(9)])
    assert max(rows for rows, _ in watched.passes) == 3
    watched.stop()
    await narrow.close()
    watched = Watched(wide)
    await all_at_once(wide, [asking(f"Question {n}") for n in range(9)])
    assert max(rows for rows, _ in watched.passes) == 9
    watched.stop()
    await wide.close()


async def test_the_event_loop_is_free_while_a_batch_runs(model: LocalModel) -> None:
    await model.complete(asking("tea"))
    running = asyncio.ensure_future(all_at_once(model, mixed()))
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    assert len(await running) == 32


async def test_a_cancelled_row_leaves_and_the_others_stay(model: LocalModel) -> None:
    requests = mixed(6)
    expected = await all_at_once(model, requests)
    running = [asyncio.ensure_future(model.complete(request)) for request in requests]
    long = asyncio.ensure_future(model.complete(asking("story", max_tokens=400)))
    await model.complete(asking("tea", max_tokens=1))
    long.cancel()
    assert tokens(await asyncio.gather(*running)) == tokens(expected)
    with pytest.raises(asyncio.CancelledError):
        await long
    await model.complete(asking("tea", max_tokens=3))
    assert (await counted(model)).idle


# -- what was computed before ---------------------------------------------------------------------------------


async def test_the_next_turn_computes_only_what_is_new(model: LocalModel) -> None:
    opening = Message("user", "Tell me a story about a ship, a storm and a lighthouse keeper. " * 4)
    await asyncio.to_thread(model.module)
    watched = Watched(model)
    first = await model.complete(Request((opening,), sampling=asking("", temperature=0.0).sampling))
    watched.passes.clear()
    following = asking("And then?", opening, first.message, temperature=0.0, logprobs=True)
    second = await model.complete(following)
    assert second.usage.cached_tokens >= first.usage.input_tokens
    assert watched.passes[0][1] <= second.usage.input_tokens - second.usage.cached_tokens
    watched.stop()
    fresh = await model.complete(following)  # hooks have changed: nothing is kept
    assert fresh.usage.cached_tokens == 0
    assert fresh.token_ids == second.token_ids


async def test_equal_prompts_are_computed_once(model: LocalModel) -> None:
    await asyncio.to_thread(model.module)
    watched = Watched(model)
    # The first occupies the batch, so that the others are all there when they join.
    first = asyncio.ensure_future(model.complete(asking("tea", max_tokens=30)))
    await all_at_once(model, [asking("Tell me a story", seed=seed) for seed in range(12)])
    await first
    assert all(rows < 12 for rows, fresh in watched.passes if fresh > 1)


async def test_memory_for_keys_and_values_is_bounded(tiny: Path) -> None:
    model = LocalModel(tiny, memory=300_000)
    answers = await all_at_once(model, mixed(40))
    batcher = await counted(model)
    assert batcher.kept.size <= 100_000
    assert len(answers) == 40
    await model.close()


# -- failures -------------------------------------------------------------------------------------------------


async def test_a_conversation_over_the_window_is_refused_with_its_numbers(model: LocalModel) -> None:
    fits, too_long = asking("tea", temperature=0.0), asking("tea " * 600)
    answers = await asyncio.gather(
        *(model.complete(r) for r in (fits, too_long, fits)), return_exceptions=True
    )
    assert isinstance(answers[1], ContextWindowError)
    count = await model.count_tokens(too_long)
    assert f"{count} tokens" in str(answers[1])
    assert "512" in str(answers[1])
    assert answers[0].message == answers[2].message
    assert await model.window() == 512


async def test_an_answer_ends_where_the_window_ends(tiny: Path) -> None:
    model = LocalModel(tiny, context=40)
    completion = await model.complete(asking("tea", max_tokens=500, temperature=1.5, seed=4))
    assert completion.usage.input_tokens + completion.usage.output_tokens <= 40
    assert await model.window() == 40
    await model.close()


def without_memory_for(model: LocalModel, problem: Exception, **most: int) -> None:
    """Make the module fail as a device does that has no memory for more `rows`, or more `columns`, in a pass."""

    def pre(module: Any, args: Any, kwargs: Any) -> None:
        rows, columns = kwargs["input_ids"].shape
        if rows > most.get("rows", 10**9) or columns > most.get("columns", 10**9):
            raise problem

    model.module().register_forward_pre_hook(pre, with_kwargs=True)


@pytest.mark.parametrize(
    "problem",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
async def test_out_of_memory_a_batch_is_halved_until_it_fits(model: LocalModel, problem: Exception) -> None:
    requests = mixed(24)
    expected = await all_at_once(model, requests)
    without_memory_for(model, problem, rows=3)
    assert tokens(await all_at_once(model, requests)) == tokens(expected)


async def test_a_row_that_does_not_fit_fails_alone(model: LocalModel) -> None:
    requests = mixed(8)
    expected = await all_at_once(model, requests)
    without_memory_for(model, torch.OutOfMemoryError("no"), columns=200)
    huge = asking("tea " * 300)
    answers = await asyncio.gather(
        *(model.complete(request) for request in [*requests[:4], huge, *requests[4:]]), return_exceptions=True
    )
    failed = answers.pop(4)
    assert isinstance(failed, ModelMemoryError)
    assert "even alone" in str(failed)
    assert tokens(answers) == tokens(expected)


async def test_memory_that_runs_out_in_the_middle_costs_no_token(model: LocalModel) -> None:
    requests = mixed(16)
    expected = await all_at_once(model, requests)
    steps = 0

    def sometimes(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps
        rows, columns = kwargs["input_ids"].shape
        steps += columns == 1
        if columns == 1 and rows > 1 and steps % 3 == 0:
            raise torch.OutOfMemoryError("no")

    model.module().register_forward_pre_hook(sometimes, with_kwargs=True)
    assert tokens(await all_at_once(model, requests)) == tokens(expected)


async def test_a_pass_that_raises_is_a_model_error_and_not_the_end(model: LocalModel) -> None:
    await asyncio.to_thread(model.module)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a hook of yours")

    hook = model.module().register_forward_pre_hook(broken)
    with pytest.raises(ModelError, match="ZeroDivisionError: a hook of yours"):
        await model.complete(asking("tea"))
    hook.remove()
    assert (await model.complete(asking("tea"))).message.role == "assistant"
