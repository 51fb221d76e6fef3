"""What the tests of batches share: prompts in, a scripted model, and the files of a run read strictly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from taskmill import BatchRunner, tool
from taskmill.models.base import Completion, Request
from taskmill.records import Message, ToolCall, Usage
from taskmill.testing import ScriptedModel

USAGE = Usage(input_tokens=10, output_tokens=5)


@tool
def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return {"sum": a + b}


def write_prompts(path: Path, rows: Iterable[str | Mapping[str, Any] | bytes]) -> Path:
    """A file of prompts: texts become rows, objects are rows, bytes are lines as they are."""
    lines = []
    for row in rows:
        if isinstance(row, bytes):
            lines.append(row)
        else:
            lines.append(json.dumps({"prompt": row} if isinstance(row, str) else row).encode())
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def says(text: str = "done", *, reasoning: str | None = "hm", **fields: Any) -> Completion:
    """An answer, with reasoning unless told otherwise."""
    return Completion(Message("assistant", text, reasoning=reasoning), usage=USAGE, **fields)


def asks(name: str, arguments: Any = None, *, id: str = "", reasoning: str | None = "hm") -> Completion:
    """A turn with one tool call; arguments that are not text are encoded."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    message = Message("assistant", reasoning=reasoning, tool_calls=(ToolCall(id, name, text),))
    return Completion(message, usage=USAGE, finish_reason="tool_calls")


def prompt_of(request: Request) -> str:
    """What the row asked for."""
    return next(message.content for message in request.messages if message.role == "user")


def turn_of(request: Request) -> int:
    """How many turns the model has had in this conversation."""
    return sum(message.role == "assistant" for message in request.messages)


def echo(request: Request) -> Completion:
    """Answers every prompt in one turn."""
    return says(f"answer to {prompt_of(request)}")


def answering(script: Any = echo, *, name: str = "scripted") -> ScriptedModel:
    return ScriptedModel(script, name=name)


class Mill:
    """Runs batches under one folder and collects what they tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []

    def prompts(self, *rows: str | Mapping[str, Any] | bytes) -> Path:
        return write_prompts(self.folder / "prompts.jsonl", rows)

    def runner(self, model: Any = None, **settings: Any) -> BatchRunner:
        """A runner on `prompts.jsonl`, without toolsets unless told otherwise."""
        chosen = {
            "dataset_file": self.folder / "prompts.jsonl",
            "batch_size": 2,
            "run_name": "run",
            "distribution": "none",
            "model": answering() if model is None else model,
            "output_dir": self.folder / "data",
            "on_event": lambda event: self.events.append(dict(event)),
            **settings,
        }
        return BatchRunner(**chosen)

    async def run(self, model: Any = None, *, resume: bool = False, **settings: Any) -> Stored:
        self.events.clear()
        await self.runner(model, **settings).run(resume=resume)
        return self.stored

    @property
    def stored(self) -> Stored:
        return Stored(self.folder / "data" / "run")

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def warnings(self) -> list[str]:
        return [event["message"] for event in self.told("warning")]


class Stored:
    """The files of a run, read by a reader that takes nothing but JSON."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shard(self, number: int) -> list[dict[str, Any]]:
        return read_lines(self.path / f"batch_{number}.jsonl")

    @property
    def shards(self) -> dict[int, list[dict[str, Any]]]:
        names = {int(path.stem.removeprefix("batch_")): path for path in self.path.glob("batch_*.jsonl")}
        return {number: read_lines(names[number]) for number in sorted(names)}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.shards.values() for row in rows]

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "outcomes.jsonl")

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "trajectories.jsonl")

    @property
    def statistics(self) -> dict[str, Any]:
        return strict(self.path.joinpath("statistics.json").read_bytes())

    @property
    def checkpoint(self) -> dict[str, Any]:
        return strict(self.path.joinpath("checkpoint.json").read_bytes())

    @property
    def config(self) -> dict[str, Any]:
        return strict(self.path.joinpath("run.json").read_bytes())["config"]

    def outcome_counts(self) -> dict[str, int]:
        return {state: count for state, count in self.statistics["outcomes"].items() if count}

    def content(self) -> dict[str, bytes]:
        """Every file but the lock, by name."""
        files = [path for path in self.path.rglob("*") if path.is_file() and path.name != "lock"]
        return {str(path.relative_to(self.path)): path.read_bytes() for path in files}


async def until(event: asyncio.Event, run: asyncio.Future[Any]) -> None:
    """Wait for something that happens during a run; a run that ends before it is an error, and not a wait."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([waiting, run], return_when=asyncio.FIRST_COMPLETED)
    if not event.is_set():
        waiting.cancel()
        raise AssertionError(f"the run ended first: {run!r}")


async def cancelled(run: asyncio.Future[Any]) -> None:
    """Cancel a run, and see that it ends as cancelled."""
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run


def prompts_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The prompt of each row: its first human turn."""
    return [next(turn["value"] for turn in row["conversations"] if turn["from"] == "human") for row in rows]


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    data = path.read_bytes()
    assert not data or data.endswith(b"\n"), f"{path.name} does not end with a newline"
    return [strict(line) for line in data.split(b"\n")[:-1]]


def strict(text: bytes) -> Any:
    """JSON as RFC 8259 has it: no NaN, no name twice, no unpaired surrogate."""
    value = json.loads(text.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a name stands twice: {[name for name, _ in pairs]}"
    return dict(pairs)
