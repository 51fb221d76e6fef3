"""The local model's running batch, against the plain `generate` of transformers: same weights, rows and process.

The real small model, float32, on the CPU. Run it alone: threads that compute together wait for each other beside any
other busy process. What is short is measured some times, and the least of each side counts: a disturbance only adds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from taskmill.models import Request, Sampling, open_model
from taskmill.models.catalog import fetch_local
from taskmill.models.local import LocalModel
from taskmill.models.sleeping import import_sleeping
from taskmill.records import Message, ToolSpec

PAIRS = 4
EQUAL_ROWS, EQUAL_TOKENS = 32, 64
CONVERSATIONS, TURNS, LIMITS = 64, 4, (8, 128)
CHATS, EXCHANGES, QUESTION_WORDS, ANSWER_TOKENS = 8, 4, 160, 16
TOOL_ROWS, TOOL_TOKENS = 32, 64

WORDS = "sea ship storm light house keeper wind sail rope star night wave shore rock bell tide gull sand"

torch = import_sleeping("torch")

Row = tuple[str, float, float | None]

LS = ToolSpec(
    "list_files",
    "List the files of a folder.",
    msgspec.Raw(b'{"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}'),
)


def run() -> Iterator[Row]:
    """Rows of the benchmark table, each as soon as it is measured."""
    fetch_local()
    model = open_model("local")
    assert isinstance(model, LocalModel)
    with asyncio.Runner() as runner:
        runner.run(_load(model))
        try:
            yield (
                "rows of equal length: tokens/s over generate's (at least)",
                runner.run(_equal_rows(model)),
                1.1,
            )
            yield "rows with a tool: tokens/s over those without (at least)", runner.run(_tools(model)), 0.8
            yield "four exchanges: time over that from scratch", runner.run(_reuse(model)), 0.6
            yield (
                "64 conversations of uneven turns: over lockstep (at least)",
                runner.run(_uneven(model)),
                1.5,
            )
        finally:
            runner.run(model.close())


async def _load(model: LocalModel) -> None:
    await model.complete(_asking([Message("user", "Hello.")], 4, 0))
    # Rows end at their limits and nowhere else, so that both sides make the same number of tokens.
    model._used.engine.loaded.result().ends = frozenset()


def _asking(messages: Sequence[Message], limit: int, seed: int, **fields: Any) -> Request:
    sampling = Sampling(temperature=0.0, max_tokens=limit, seed=seed)
    return Request(tuple(messages), sampling=sampling, **fields)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS.split(), k=count))


def _forget(model: LocalModel) -> None:
    model._used.engine.run(lambda batcher: batcher.kept.clear()).result()


def _generate(model: LocalModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """One bare `generate` over these prompts, padded on the left."""
    width = max(map(len, prompts))
    padded = torch.tensor([[2] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    with torch.no_grad():
        made = model.module().generate(
            padded,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=2,
        )
    return [row[width:].tolist() for row in made]


def _tokens(model: LocalModel, messages: Sequence[Message]) -> list[int]:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    tokenizer = model.tokenizer()
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


async def _equal_rows(model: LocalModel) -> float:
    chance = random.Random(1)
    asked: list[list[Message]] = []
    prompts: list[list[int]] = []
    while len(asked) < EQUAL_ROWS:
        messages = [Message("user", _words(chance, 30))]
        prompt = _tokens(model, messages)
        if not prompts or len(prompt) == len(prompts[0]):
            asked.append(messages)
            prompts.append(prompt)
    plain, batched = [], []
    for _ in range(PAIRS):
        _forget(model)
        started = time.perf_counter()
        _generate(model, prompts, EQUAL_TOKENS)
        plain.append(time.perf_counter() - started)
        started = time.perf_counter()
        await asyncio.gather(*(model.complete(_asking(messages, EQUAL_TOKENS, 0)) for messages in asked))
        batched.append(time.perf_counter() - started)
    return min(plain) / min(batched)


async def _uneven(model: LocalModel) -> float:
    chance = random.Random(2)
    topics = [_words(chance, 12) for _ in range(CONVERSATIONS)]
    limits = [[chance.randint(*LIMITS) for _ in range(TURNS)] for _ in range(CONVERSATIONS)]

    def view(topic: str, said: Sequence[str]) -> list[Message]:
        """The conversation from the side of who speaks next."""
        speaker = len(said) % 2
        turns = [Message("assistant" if n % 2 == speaker else "user", text) for n, text in enumerate(said)]
        return [Message("system", f"You talk about {topic}. You are {'AB'[speaker]}."), *turns]

    async def converse(number: int) -> None:
        said: list[str] = []
        for limit in limits[number]:
            answer = await model.complete(_asking(view(topics[number], said), limit, number))
            said.append(answer.message.content)

    _forget(model)
    started = time.perf_counter()
    await asyncio.gather(*map(converse, range(CONVERSATIONS)))
    batched = time.perf_counter() - started

    started = time.perf_counter()
    tokenizer = model.tokenizer()
    said: list[list[str]] = [[] for _ in range(CONVERSATIONS)]
    for turn in range(TURNS):
        prompts = [_tokens(model, view(topics[n], said[n])) for n in range(CONVERSATIONS)]
        made = _generate(model, prompts, max(limit[turn] for limit in limits))
        for number, row in enumerate(made):
            said[number].append(tokenizer.decode(row[: limits[number][turn]]))
    return (time.perf_counter() - started) / batched


async def _reuse(model: LocalModel) -> float:
    async def chat(number: int) -> None:
        chance = random.Random(number)
        said: list[Message] = []
        for _ in range(EXCHANGES):
            said.append(Message("user", _words(chance, QUESTION_WORDS)))
            said.append((await model.complete(_asking(said, ANSWER_TOKENS, number))).message)

    batcher = await asyncio.wrap_future(model._used.engine.run(lambda batcher: batcher))
    limit = batcher.kept.limit
    times: dict[bool, list[float]] = {False: [], True: []}
    for forgetting in (False, True, True, False):
        _forget(model)
        batcher.kept.limit = 0 if forgetting else limit
        started = time.perf_counter()
        await asyncio.gather(*(chat(number) for number in range(CHATS)))
        times[forgetting].append(time.perf_counter() - started)
        batcher.kept.limit = limit
    return min(times[False]) / min(times[True])


async def _tools(model: LocalModel) -> float:
    chance = random.Random(4)
    asked = [[Message("user", _words(chance, 30))] for _ in range(TOOL_ROWS)]
    without: list[float] = []
    having: list[float] = []
    for _ in range(PAIRS):
        for tools, seconds in (((), without), ((LS,), having)):
            _forget(model)
            started = time.perf_counter()
            await asyncio.gather(*(model.complete(_asking(it, TOOL_TOKENS, 0, tools=tools)) for it in asked))
            seconds.append(time.perf_counter() - started)
    return min(without) / min(having)
