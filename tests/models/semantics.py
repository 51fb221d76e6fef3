"""What every model must do, whoever answers: one suite, run against each backend in `BACKENDS`.

A backend opens a model that plays a list of turns, one after another and then the last one again; an exception
in the list is raised instead. A model that says what it likes (a real one) is a backend with `follows=False`
and takes no part in the tests of the script.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import AuthenticationError, BadRequestError, ContextWindowError, ModelError
from taskmill.models import Model, Request, ScriptedModel, open_model
from taskmill.models.catalog import installed_models
from taskmill.models.endpoint import EndpointModel
from taskmill.models.journaled import Journaled
from taskmill.models.retry import Retrying
from taskmill.records import Message
from taskmill.store.commit import GroupCommit
from taskmill.store.journal import CallJournal
from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import Step, answer, call, refusal

Turn = Message | ModelError
Open = Callable[[Sequence[Turn]], AbstractAsyncContextManager[Model]]


@dataclass(frozen=True)
class Backend:
    """One kind of model. `marks` are for backends not every machine has."""

    name: str
    open: Open
    follows: bool = True
    marks: tuple[Any, ...] = ()


def _repeating(turns: Sequence[Turn]) -> Iterator[Turn]:
    yield from turns
    while True:
        yield turns[-1]


@asynccontextmanager
async def scripted(turns: Sequence[Turn]) -> AsyncIterator[Model]:
    # A moment's latency, so that a call can be cancelled while it is under way.
    model = ScriptedModel(_repeating(turns), latency=0.005)
    yield model
    await model.close()


_STATUS: dict[type[ModelError], int] = {
    AuthenticationError: 401,
    BadRequestError: 400,
    ContextWindowError: 400,
}


def _step(turn: Turn) -> Step:
    if isinstance(turn, ModelError):
        return refusal(_STATUS[type(turn)], str(turn))
    calls = [call(c.name, c.arguments, id=c.id) for c in turn.tool_calls]
    return answer(turn.content, calls=calls, reasoning=turn.reasoning)


@asynccontextmanager
async def endpoint(turns: Sequence[Turn]) -> AsyncIterator[Model]:
    async with FakeEndpoint([_step(turn) for turn in turns]) as server:
        model = EndpointModel("m", base_url=server.url)
        yield model
        await model.close()


@asynccontextmanager
async def retrying(turns: Sequence[Turn]) -> AsyncIterator[Model]:
    async with endpoint(turns) as model:
        yield Retrying(model)


@asynccontextmanager
async def journaled(turns: Sequence[Turn]) -> AsyncIterator[Model]:
    with tempfile.TemporaryDirectory() as folder:
        async with GroupCommit("none") as commit:
            journal = CallJournal(Path(folder), commit)
            await journal.open(lambda rollout: True)
            async with scripted(turns) as model:
                yield Journaled(model, journal, "r")
            await commit.flush()
            journal.close()


@asynccontextmanager
async def embedded(turns: Sequence[Turn]) -> AsyncIterator[Model]:
    model = open_model("embedded")
    yield model
    await model.close()


@cache
def _tiny_model() -> Path:
    from tests.models.local.tiny import tiny_folder

    folder = tempfile.mkdtemp(prefix="taskmill-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_folder(Path(folder))


@asynccontextmanager
async def local(turns: Sequence[Turn]) -> AsyncIterator[Model]:
    model = open_model(f"local:{_tiny_model()}")
    yield model
    await model.close()


def _torch_is_here() -> bool:
    return find_spec("torch") is not None and find_spec("transformers") is not None


def _embedded_is_here() -> bool:
    return all(installed.ready for installed in installed_models())


BACKENDS: list[Backend] = [
    Backend("scripted", scripted),
    Backend("endpoint", endpoint),
    Backend("retrying endpoint", retrying),
    Backend("journaled", journaled),
    Backend(
        "local",
        local,
        follows=False,
        marks=(pytest.mark.skipif(not _torch_is_here(), reason="the local model is not installed"),),
    ),
    Backend(
        "embedded",
        embedded,
        follows=False,
        marks=(
            pytest.mark.real_model,
            pytest.mark.skipif(not _embedded_is_here(), reason="the embedded model is not installed"),
        ),
    ),
]


def every_backend(*, following: bool = False) -> pytest.MarkDecorator:
    """Run a test with each backend, or with those that follow a script."""
    chosen = [b for b in BACKENDS if b.follows or not following]
    return pytest.mark.parametrize("backend", [pytest.param(b, id=b.name, marks=b.marks) for b in chosen])


def asking(text: str, **fields: Any) -> Request:
    return Request((Message("user", text),), **fields)


def schema(**properties: str) -> bytes:
    """The JSON Schema of a tool whose arguments are of simple types."""
    fields = {name: {"type": kind} for name, kind in properties.items()}
    return json.dumps({"type": "object", "properties": fields, "required": list(fields)}).encode()
