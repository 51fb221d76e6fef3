"""Conversations of local models: the same text alone, in any company, on several devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the local model is not installed: pip install 'taskmill[local]'")

from taskmill.conversations import Conversation, Participant, arun, dataset_field  # noqa: E402
from taskmill.engine.progress import Progress  # noqa: E402
from tests.conversations.cast import texts  # noqa: E402
from tests.models.local.tiny import tiny_folder  # noqa: E402

# Beside other busy processes, threads that compute together wait for each other most of the time.
torch.set_num_threads(1)

DATA = [{"text": "word " * length} for length in (1, 9, 2, 30, 4, 17)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_folder(tmp_path_factory.mktemp("tiny")))


def talk(tiny: str, **fields: Any) -> Conversation:
    return Conversation(
        [
            Participant("ann", tiny, max_tokens=4, temperature=0.9),
            Participant("bob", tiny, max_tokens=11, temperature=0.0),
        ],
        dataset_field("text"),
        turns=4,
        **fields,
    )


async def test_a_row_has_the_same_tokens_alone_and_in_any_batch_and_each_its_own_limit(tiny: str) -> None:
    one_by_one = await talk(tiny).data(DATA).arollout(devices="cpu", batched=False)
    together = await talk(tiny).data(DATA).arollout(devices="cpu")
    by_threes = await talk(tiny).data(DATA[::-1]).arollout(2, devices="cpu", max_batch_size=3)

    assert texts(one_by_one) == texts(together)
    for number, said in enumerate(texts(together).values()):
        assert texts(by_threes)[f"row_{len(DATA) - 1 - number:05d}/0000"] == said
    tokens = {
        (said.author, said.n_tokens) for all_said in together.transcripts().values() for said in all_said
    }
    assert max(count for author, count in tokens if author == "ann") == 4
    assert max(count for author, count in tokens if author == "bob") == 11


async def test_copies_with_other_seeds_say_other_things(tiny: str) -> None:
    report = await talk(tiny).data(DATA[:1]).arollout(16, devices="cpu")

    assert len({tuple(said) for said in texts(report).values()}) == 16


async def test_workers_give_the_same_tokens(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    here = await talk(tiny).data(DATA).arollout(devices="cpu")
    there = await talk(tiny).data(DATA).arollout(devices=["cpu", "cpu"])

    assert texts(here) == texts(there)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
async def test_the_display_hears_how_many_rows_run_together(
    tiny: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told: dict[int, set[int | None]] = {}
    heard = Progress.heard

    def noted(self: Progress, tokens: int, *, rows: int | None = None, worker: int = 0) -> None:
        told.setdefault(worker, set()).add(rows)
        heard(self, tokens, rows=rows, worker=worker)

    monkeypatch.setattr(Progress, "heard", noted)
    await talk(tiny).data(DATA * 3).arollout(devices=devices)

    assert len(told) == len(devices)
    for rows in told.values():
        assert None not in rows
        assert max(count or 0 for count in rows) > 1


async def test_a_row_over_the_window_fails_alone_and_policies_hold(tiny: str) -> None:
    data = [*DATA, {"text": "word " * 2000}]

    report = await talk(tiny).data(data).arollout(devices="cpu")

    assert report.failed == ["row_00006"]
    assert "participant 'ann'" in (report.results["row_00006"].error or "")


def test_the_torch_module_is_reachable_for_hooks(tiny: str) -> None:
    seen = []
    conversation = talk(tiny).about(DATA[0])
    module: Any = conversation.model("ann").module()  # type: ignore[attr-defined]
    handle = module.register_forward_hook(lambda *arguments: seen.append(1))
    try:
        conversation.run(2)
    finally:
        handle.remove()
    assert seen


async def test_lineups_of_different_shape_share_a_model(tiny: str, tmp_path: Path) -> None:
    trio = Conversation(
        [Participant(name, tiny, max_tokens=3) for name in ("a", "b", "c")], "Go.", turns=5, name="trio"
    )

    both = await arun([trio, talk(tiny).data(DATA[:2])], devices="cpu", out_dir=tmp_path / "run")
    alone = await trio.arollout(devices="cpu")

    assert texts(both)["trio/rollout_0000"] == texts(alone)["rollout_0000"]
    assert both.results["trio/rollout_0000"].record.versions.keys() >= {"torch", "transformers"}
