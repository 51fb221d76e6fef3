"""Several devices: worker processes that die, can't start, or can't be given what they are to hold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from taskmill.conversations import Conversation, RunReport, available_devices, dataset_field
from taskmill.errors import ConfigurationError, WorkerStartError
from taskmill.models.base import Request
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import answer
from tests.conversations.cast import (
    deadly,
    echo,
    note_start,
    pair,
    picky,
    refuse_to_start,
    rows,
    seat,
    slow,
    texts,
)

TWO = ["cpu", "cpu"]


def children() -> set[int]:
    return {
        process.pid for process in psutil.Process().children(recursive=True) if process.status() != "zombie"
    }


async def test_workers_hold_the_same_conversations_and_keep_failures_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKMILL_TEST_STARTS", str(tmp_path / "starts"))
    data = [*rows(5), {"text": "x", "kind": "unanalysable"}]
    talk = pair(analyzer=picky).data(data)
    before = children()

    report = await talk.arollout(2, devices=TWO, initializer=note_start)

    here = await talk.arollout(2)
    assert texts(report) == texts(here)
    assert report.failed == here.failed == ["row_00005/0000", "row_00005/0001"]
    assert dict(report.analyses()) == dict(here.analyses())
    assert len((tmp_path / "starts").read_text().split()) == 2
    assert children() <= before


async def test_a_job_that_kills_every_worker_fails_and_the_others_are_done(tmp_path: Path) -> None:
    data = [*rows(6), {"text": "POISON"}, *rows(4)]

    report = await pair(deadly, echo).data(data).arollout(devices=TWO, out_dir=tmp_path / "run")

    assert report.failed == ["row_00006"]
    error = report.results["row_00006"].record.error
    assert error is not None
    assert (error.type, error.attempts) == ("WorkerDied", 3)
    assert len(report.transcripts()) == 10


async def test_what_a_killed_worker_had_in_hand_is_done_all_the_same(tmp_path: Path) -> None:
    data = [*rows(3), {"text": f"ONCE:{tmp_path / 'mark'}"}, *rows(3)]

    report = await pair(deadly, echo).data(data).arollout(devices=TWO)

    assert (tmp_path / "mark").exists()
    assert report.failed == []
    assert texts(report)["row_00000"] == texts(await pair(deadly, echo).data(rows(1)).arollout())["row_00000"]


def fatal(request: Request) -> str:
    """Ends its process the first time it speaks for a second time."""
    mark = Path(os.environ["TASKMILL_TEST_MARK"])
    if len(request.messages) > 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "near"


async def test_calls_of_a_killed_worker_are_not_paid_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKMILL_TEST_MARK", str(tmp_path / "mark"))
    async with FakeEndpoint(answer("far", usage={"prompt_tokens": 1, "completion_tokens": 1})) as endpoint:
        talk = Conversation([seat("far", "m", base_url=endpoint.url), seat("near", fatal)], "Go.", turns=6)
        report = await talk.arollout(devices=TWO, out_dir=tmp_path / "run")

    assert (tmp_path / "mark").exists()
    assert report.failed == []
    assert endpoint.calls == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initializer": refuse_to_start}, "refuse_to_start.*no licence on this machine"),
        ({"initializer": "tests.conversations.nowhere:f"}, "No module named 'tests.conversations.nowhere'"),
    ],
)
async def test_a_worker_that_can_not_start_ends_the_run_with_the_reason(
    options: dict[str, Any], message: str
) -> None:
    before = children()

    with pytest.raises(WorkerStartError, match=message):
        await pair().data(rows(2)).arollout(devices=TWO, **options)
    assert children() <= before


async def test_a_module_that_breaks_when_a_worker_imports_it_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "breaks_elsewhere.py"
    module.write_text(
        "import os\nif os.environ.get('BREAK'): raise RuntimeError('not here')\ndef f(request): return 'x'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import breaks_elsewhere  # type: ignore[import-not-found]

    monkeypatch.setenv("BREAK", "1")
    with pytest.raises(WorkerStartError, match=r"breaks_elsewhere.*RuntimeError: not here"):
        await pair(breaks_elsewhere.f).data(rows(2)).arollout(devices=TWO)


@pytest.mark.parametrize(
    ("talk", "what"),
    [
        (lambda: pair(lambda request: "x"), "participants.0..model"),
        (lambda: pair(analyzer=lambda conversation: 1), "analyzer"),
        (lambda: pair(shared_context=lambda row: "x"), "shared_context"),
    ],
)
async def test_a_closure_is_refused_before_a_process_starts(talk: Any, what: str) -> None:
    before = children()

    with pytest.raises(ConfigurationError, match=f"{what}.*Define it at the top of a module"):
        await talk().data(rows(2)).arollout(devices=TWO)
    assert children() == before


async def test_a_registered_analyzer_crosses_by_its_name() -> None:
    report = await pair(analyzer="tests-count-words").data(rows(2)).arollout(devices=TWO)

    assert all(count > 4 for count in report.analyses().values())


async def test_cancelling_ends_the_workers_and_keeps_what_is_recorded(tmp_path: Path) -> None:
    before = children()
    recorded = asyncio.Event()

    def heard(event: Any) -> None:
        if event["event"] == "recorded":
            recorded.set()

    talk = Conversation([seat("ann", slow), seat("bob", echo)], dataset_field("text"), turns=4)
    work = asyncio.ensure_future(
        talk.data(rows(200)).arollout(devices=TWO, max_batch_size=1, out_dir=tmp_path / "run", on_event=heard)
    )
    await recorded.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work

    assert children() <= before
    report = await talk.data(rows(3)).arollout(out_dir=tmp_path / "run", resume=True)
    assert len(report.results) == 3


def test_one_device_may_be_given_as_a_text() -> None:
    report = pair().data(rows(1)).rollout(devices="cpu")

    assert report.results["row_00000"].device == "cpu"
    assert available_devices()


PROGRAM = """
import sys
from tests.conversations.cast import echo, rows, seat, slow
from taskmill.conversations import Conversation, dataset_field
talk = Conversation([seat("ann", slow), seat("bob", echo)], dataset_field("text"), turns=4)
def heard(event):
    if event["event"] == "recorded":
        print("recorded", flush=True)
try:
    talk.data(rows(2000)).rollout(devices=sys.argv[2:], out_dir=sys.argv[1], max_batch_size=1, on_event=heard)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=["here", "two workers"])
def test_ctrl_c_in_a_program_ends_its_workers_and_keeps_what_is_recorded(
    devices: list[str], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), *devices],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "recorded\n"
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)

    assert out.endswith("interrupted\n")
    psutil.wait_procs(below, timeout=30)
    assert not [child for child in below if child.is_running() and child.status() != "zombie"]
    assert RunReport.read(tmp_path / "run").analyses().keys()
