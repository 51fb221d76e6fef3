"""The small real model: converted from its wheel, it knows the capital of France, alone and in company."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from taskmill.errors import ConfigurationError
from taskmill.models import Completion, Request, open_model
from taskmill.models.catalog import embedded_weights, fetch_local, local_models
from taskmill.models.local import LocalModel, linear
from taskmill.models.local.batcher import Batcher, _Joining
from taskmill.models.local.convert import convert
from taskmill.models.local.loading import load, settle
from taskmill.models.local.sampling import MARGIN
from taskmill.records import Message
from tests.models.local.tiny import WORDS, asking

torch = pytest.importorskip("torch", reason="the local model is not installed: pip install 'taskmill[local]'")
pytest.importorskip("gguf", reason="the local model is not installed: pip install 'taskmill[local]'")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        embedded_weights() is None, reason="its weights are not installed: taskmill models fetch"
    ),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A user's cache with the small model in it, made as `taskmill models fetch local` makes it."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        assert not local_models()[0].ready
        told: list[str] = []
        made = fetch_local(tell=told.append)
        assert made is not None
        assert str(made) in told[-1]
        yield made


async def test_it_is_what_local_means_and_knows_the_capital_of_france(cache: Path) -> None:
    (listed,) = local_models()
    assert listed.ready
    assert listed.path == str(cache)
    assert fetch_local() is None  # nothing to do
    model = open_model("local")
    question = asking("What is the capital of France?", temperature=0.0, max_tokens=20, logprobs=True)
    answer = await model.complete(question)
    assert answer.message.content == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert answer.usage.output_tokens == len(answer.token_ids or ()) == 8
    assert (await model.reference(question)).token_ids == answer.token_ids
    follow_up = asking("And of Italy?", question.messages[0], answer.message, temperature=0.0, max_tokens=6)
    following = await model.complete(follow_up)
    assert following.usage.cached_tokens > answer.usage.input_tokens
    await model.close()


def test_rounding_in_a_batch_is_far_below_the_lead_that_counts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_is_faster", lambda part: True)
    loaded = load(settle(str(cache), "cpu", "float32", ()))
    chance = random.Random(5)
    rows = [chance.sample(range(5, 40_000), length) for length in (3, 20, 41, 42, 70, 90)]
    batcher: Any = Batcher(loaded, memory=1 << 30, max_rows=len(rows))
    joining = [_Joining(cast(Any, SimpleNamespace(tokens=row)), None, 0) for row in rows]
    slots, logits = batcher._read(rows, joining)
    for step in range(3):
        if step:
            slots.make_room(1)
            last = torch.tensor([[row[-1]] for row in rows])
            logits = batcher._forward(last, [length + 1 for length in slots.lengths], slots)
            slots.advance(1)
        for row, together in zip(rows, logits, strict=True):
            alone = loaded.forward(torch.tensor([row]), None, None, None)[0]
            # Two logits are compared, so a lead can change by twice as much.
            assert 2 * (alone - together).abs().max().item() < MARGIN / 2
            row.append(int(together.argmax()))


async def test_32_rows_are_the_same_alone_and_in_three_mixes(cache: Path) -> None:
    chance, words = random.Random(3), WORDS.split()
    requests: list[Request] = []
    for seed in range(32):
        text = " ".join(chance.choices(words, k=chance.choice((1, 3, 6, 12))))
        kind = chance.choice(({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}))
        limit = chance.randint(1, 4)
        requests.append(
            Request(
                (Message("system", "Be brief."), Message("user", text)),
                sampling=asking("", seed=seed, max_tokens=limit, logprobs=True, **kind).sampling,
            )
        )

    async def mix(order: Sequence[int], rows: int) -> list[Completion]:
        model = LocalModel(cache, max_batch_size=rows)
        made = await asyncio.gather(*(model.complete(requests[number]) for number in order))
        await model.close()
        return [made[order.index(number)] for number in range(len(order))]

    straight = list(range(32))
    shuffled = chance.sample(straight, 32)
    held = LocalModel(cache)
    held.module()  # so that the mixes share one copy, and what it keeps
    alone = await mix(straight, 1)
    mixes = [await mix(straight, 32), await mix(shuffled, 7), await mix(straight[::-1], 19)]
    await held.close()
    ids = [completion.token_ids for completion in alone]
    for mixed in mixes:
        assert [completion.token_ids for completion in mixed] == ids


def test_a_file_of_another_family_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    fields = {
        "general.architecture": "mamba",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    reader = SimpleNamespace(
        fields={key: SimpleNamespace(contents=lambda value=value: value) for key, value in fields.items()}
    )
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: reader)
    with pytest.raises(ConfigurationError, match="'mamba' model"):
        convert(tmp_path / "x.gguf", tmp_path / "out")
    del reader.fields["tokenizer.ggml.pre"]
    with pytest.raises(ConfigurationError, match=r"says nothing of 'tokenizer\.ggml\.pre'"):
        convert(tmp_path / "x.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
