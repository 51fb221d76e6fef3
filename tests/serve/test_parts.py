"""Small parts of the server, without processes."""

from __future__ import annotations

import asyncio
import io
import json
import threading

import pytest

from taskmill.engine.environment import EndpointChoice
from taskmill.engine.frames import Answer, Ask, Channel, error_of, to_supervisor, to_worker
from taskmill.errors import ConfigurationError, TaskIndexError, WorkerDied, WorkerError
from taskmill.serve import pool as pool_module
from taskmill.serve.address import Address, is_allowed, names_this_machine, parse_address
from taskmill.serve.logs import HELD, LineWriter
from taskmill.serve.pool import ModelPool


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:80", Address("localhost", 80)),
        (":0", Address("127.0.0.1", 0)),
        ("[::1]:8400", Address("::1", 8400)),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("localhost:8400", True),
        ("127.0.0.1:8400", True),
        ("127.3.2.1", True),
        ("[::1]:8400", True),
        ("example.org", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("192.168.0.1", False),
        ("", False),
        (None, False),
    ],
)
def test_host_headers(host: str | None, is_own: bool) -> None:
    assert names_this_machine(host) is is_own


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("Bearer secret-token", True),
        ("secret-token", True),
        ("Bearer secret-toke", False),
        (None, False),
        ("Bearer ü", False),
    ],
)
def test_tokens(header: str | None, allowed: bool) -> None:
    assert is_allowed(header, "secret-token") is allowed


class Slow(io.StringIO):
    """A stream that nobody reads until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.let_go.wait(60)
        return super().write(text)


def test_lines_that_nobody_reads_are_dropped_and_counted() -> None:
    stream = Slow()
    log = LineWriter(stream)
    for number in range(HELD + 500):
        log("request", number=number)
    stream.let_go.set()
    while log._lines:
        pass
    log("last")
    log.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    dropped = next(line["count"] for line in lines if line["event"] == "log_lines_dropped")
    numbers = [line["number"] for line in lines if line["event"] == "request"]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) + dropped == HELD + 500
    assert lines[-1]["event"] == "last"


def choice(**fields: object) -> EndpointChoice:
    return EndpointChoice.model_validate({"name": "m", "base_url": "http://localhost:1/v1", **fields})


async def test_models_are_kept_by_endpoint_and_key() -> None:
    models = ModelPool()
    async with models.lease(choice(api_key="a")) as one, models.lease(choice(api_key="a")) as same:
        assert one is same
        async with models.lease(choice(api_key="b")) as other:
            assert other is not one
    async with models.lease(choice(api_key="a")) as again:
        assert again is one
    assert "'a'" not in repr(models._kept)
    await models.close()


async def test_no_more_idle_models_are_kept_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "KEPT", 3)
    models = ModelPool()
    for number in range(10):
        async with models.lease(choice(api_key=str(number))):
            pass
    assert len(models._kept) == 3
    monkeypatch.setattr(pool_module, "IDLE", -1.0)
    await models._close_some()
    assert not models._kept


async def test_a_model_in_use_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "IDLE", -1.0)
    models = ModelPool()
    async with models.lease(choice()) as one:
        async with models.lease(choice()) as same:
            pass
        assert same is one
        assert len(models._kept) == 1
    assert not models._kept


def test_a_key_shows_nowhere_but_in_the_request_itself() -> None:
    made = choice(api_key="sk-secret")
    assert "sk-secret" not in repr(made) + str(made) + repr(made.model_dump())
    assert "sk-secret" in made.model_dump_json()


def test_errors_come_back_by_their_class() -> None:
    assert isinstance(error_of("WorkerDied", "x"), WorkerDied)
    assert isinstance(error_of("TaskIndexError", "x"), IndexError)
    assert isinstance(error_of("ConfigurationError", "x"), ConfigurationError)
    unknown = error_of("SystemExit", "x")
    assert type(unknown) is WorkerError
    assert str(unknown) == "SystemExit: x"
    assert issubclass(TaskIndexError, IndexError)


async def test_messages_arrive_whole_however_they_are_cut() -> None:
    heard: list[bytes] = []
    sent: list[bytes] = []
    far = Channel(heard.append, lambda: None)

    class Wire(asyncio.Transport):
        def write(self, data: object) -> None:
            sent.append(bytes(data))  # type: ignore[call-overload]

        def is_closing(self) -> bool:
            return False

    near = Channel(lambda message: None, lambda: None)
    near.connection_made(Wire())
    asked = [Ask(number, "kind", bytes(number * 7)) for number in range(30)]
    for message in asked:
        near.send(message)
    stream = b"".join(sent)
    for start in range(0, len(stream), 13):
        far.data_received(stream[start : start + 13])
    assert [to_worker(message) for message in heard] == asked
    near.send(Answer(1, b"x"))
    assert to_supervisor(sent[-1][4:]) == Answer(1, b"x")
