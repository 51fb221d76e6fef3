"""What goes over the wire for one request after another, and what is made of what comes back."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import ssl
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme
from yarl import URL

from taskmill.models import answers, transport
from taskmill.models.answers import Answer, AnswerTooLargeError, NotHttpError
from taskmill.models.transport import Connections

BODY = b'{"ask": 1}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbye"


class Wire:
    """A server that notes each request and gives these answers in turn; an answer of no bytes closes the connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.url = URL()
        self.all_open = asyncio.Event()
        self._open_for: int | None = None

    def wait_for(self, connections: int) -> None:
        """Answer nobody before so many connections are open."""
        self._open_for = connections

    @asynccontextmanager
    async def serving(self, secured: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
        async with await asyncio.start_server(self._talk, "127.0.0.1", 0, ssl=secured) as server:
            port = server.sockets[0].getsockname()[1]
            scheme, host = ("https", "localhost") if secured else ("http", "127.0.0.1")
            self.url = URL(f"{scheme}://{host}:{port}/v1/chat/completions")
            yield self

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.connections == self._open_for:
            self.all_open.set()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(length))
                if self._open_for is not None:
                    await self.all_open.wait()
                answer = self.answers.pop(0)
                writer.write(answer)
                if not answer or b"Connection: close" in answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def fields(self, number: int = -1) -> dict[str, str]:
        lines = self.heads[number].strip().split("\r\n")[1:]
        return dict(line.lower().split(": ", 1) for line in lines)


@asynccontextmanager
async def connected(
    wire: Wire, *, url: URL | None = None, proxy: URL | None = None, keep_alive: bool = True
) -> AsyncIterator[Connections]:
    connections = Connections(
        asyncio.get_running_loop(),
        url or wire.url,
        {"X-Mine": "yes"},
        proxy=proxy,
        patience=10.0,
        keep_alive=keep_alive,
    )
    try:
        yield connections
    finally:
        await connections.close()


async def post(connections: Connections, body: bytes = BODY) -> Answer:
    return await connections.post(body, largest=1000)


async def test_one_connection_carries_one_request_after_another() -> None:
    async with Wire(OK, OK, OK).serving() as wire, connected(wire) as connections:
        came = [await post(connections, body) for body in (b"", b"a", b"b" * 300_000)]
    assert [(answer.status, answer.body) for answer in came] == [(200, b"hi")] * 3
    assert wire.connections == 1
    assert [len(body) for body in wire.bodies] == [0, 1, 300_000]
    assert wire.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    fields = wire.fields()
    assert (fields["host"], fields["x-mine"]) == (f"127.0.0.1:{wire.url.port}", "yes")
    assert not {"connection", "transfer-encoding", "cookie"} & set(fields)


async def test_a_connection_that_the_other_side_ends_is_not_used_again() -> None:
    async with Wire(LAST, OK).serving() as wire, connected(wire) as connections:
        assert (await post(connections)).body == b"bye"
        assert (await post(connections)).body == b"hi"
        assert wire.connections == 2


async def test_without_keeping_each_request_has_its_own_and_says_so() -> None:
    async with Wire(OK, OK).serving() as wire, connected(wire, keep_alive=False) as connections:
        await post(connections)
        await post(connections)
        assert (wire.connections, wire.fields()["connection"]) == (2, "close")


async def test_however_many_kept_connections_went_stale_one_call_needs_one_fresh_one() -> None:
    wire = Wire(OK, OK, b"", OK)
    wire.wait_for(2)
    async with wire.serving(), connected(wire) as connections:
        await asyncio.gather(post(connections), post(connections))
        assert (await post(connections)).body == b"hi"
        assert wire.connections == 3


async def test_a_fresh_connection_that_is_dropped_is_said_at_once() -> None:
    async with Wire(b"", OK).serving() as wire, connected(wire) as connections:
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await post(connections)
        assert len(wire.heads) == 1


async def test_what_began_to_be_answered_is_not_asked_again() -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nX: Connection: close\r\n\r\nhalf"
    async with Wire(OK, half, OK).serving() as wire, connected(wire) as connections:
        await post(connections)
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(connections)
        assert (len(wire.heads), wire.connections) == (2, 1)


async def test_a_connection_unused_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Wire(OK, OK).serving() as wire, connected(wire) as connections:
        await post(connections)
        monkeypatch.setattr(transport, "KEPT_SECONDS", -1.0)
        await post(connections)
        assert wire.connections == 2


async def test_a_word_in_between_is_not_taken_for_the_answer() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    wire = Wire(b"HTTP/1.1 100 Continue\r\n\r\n" + early + OK)
    async with wire.serving(), connected(wire) as connections:
        answer = await post(connections)
        assert (answer.status, dict(answer.headers), answer.body) == (200, {"Content-Length": "2"}, b"hi")


async def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    wire = Wire(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end")
    async with wire.serving(), connected(wire) as connections:
        assert (await post(connections)).body == b"to the end"


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_is_one(status: bytes) -> None:
    async with Wire(b"HTTP/1.1 %b\r\n\r\n" % status, OK).serving() as wire, connected(wire) as connections:
        assert (await post(connections)).body == b""
        assert (await post(connections)).body == b"hi"


async def test_what_is_no_http_is_said_and_costs_the_connection() -> None:
    async with Wire(b"220 mail.example ready\r\n\r\n", OK).serving() as wire, connected(wire) as connections:
        with pytest.raises(NotHttpError):
            await post(connections)
        assert (await post(connections)).body == b"hi"
        assert wire.connections == 2


def answer(body: bytes, *fields: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *fields, b"", body])


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (b"gzip", gzip.compress(b"small")),
        (b"X-GZip", gzip.compress(b"small")),
        (b"deflate", zlib.compress(b"small")),
        (b"deflate", raw_deflate(b"small")),
        (b"identity", b"small"),
    ],
)
async def test_a_compressed_answer_is_unpacked(encoding: bytes, packed: bytes) -> None:
    wire = Wire(answer(packed, b"content-encoding: " + encoding), OK)
    async with wire.serving(), connected(wire) as connections:
        assert (await post(connections)).body == b"small"
        assert (await post(connections)).body == b"hi"
        assert wire.connections == 1
        assert wire.fields()["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("encoding", "packed", "said"),
    [
        (b"gzip", b"no gzip", "can't be decompressed"),
        (b"gzip", gzip.compress(b"small")[:-4], "not whole"),
        (b"gzip", gzip.compress(b"small") + b"more", "not whole"),
        (b"br", b"small", "'br', which nobody asked for"),
    ],
)
async def test_an_answer_that_cannot_be_unpacked_is_an_error(
    encoding: bytes, packed: bytes, said: str
) -> None:
    wire = Wire(answer(packed, b"Content-Encoding: " + encoding), OK)
    async with wire.serving(), connected(wire) as connections:
        with pytest.raises(aiohttp.ClientPayloadError, match=said):
            await post(connections)
        assert (await post(connections)).body == b"hi"


async def test_what_unpacks_to_more_than_is_wanted_is_not_unpacked_to_its_end() -> None:
    bomb = gzip.compress(b"x" * 10_000_000)
    wire = Wire(answer(bomb, b"Content-Encoding: gzip"))
    async with wire.serving(), connected(wire) as connections:
        with pytest.raises(AnswerTooLargeError) as caught:
            await connections.post(BODY, largest=len(bomb))
        assert caught.value.size == len(bomb) + 1


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_an_answer_in_chunks_ends_with_the_last_one_and_not_with_the_connection() -> None:
    chunks = b"2;of=two\r\nhi\r\n3\r\n, I\r\n"
    wire = Wire(CHUNKED + chunks + b"0\r\nTrailer: 1\r\n\r\n", CHUNKED + chunks + b"14\r\nConnection: close")
    async with wire.serving(), connected(wire) as connections:
        assert (await post(connections)).body == b"hi, I"
        with pytest.raises(aiohttp.ClientPayloadError, match="not whole"):
            await post(connections)
        assert wire.connections == 1


async def test_line_ends_without_a_carriage_return_are_forgiven() -> None:
    async with (
        Wire(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi").serving() as wire,
        connected(wire) as connections,
    ):
        assert (await post(connections)).body == b"hi"


@pytest.mark.parametrize("more", [b"more", OK], ids=["rubbish", "an answer"])
async def test_more_than_was_asked_for_reaches_nobody(more: bytes) -> None:
    async with Wire(OK + more, LAST).serving() as wire, connected(wire) as connections:
        assert (await post(connections)).body == b"hi"
        assert (await post(connections)).body == b"bye"
        assert wire.connections == 2


async def test_what_comes_before_anything_is_asked_costs_the_connection() -> None:
    writers: list[asyncio.StreamWriter] = []
    wire = Wire(OK, LAST)
    talk = wire._talk

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await talk(reader, writer)

    wire._talk = noted  # type: ignore[method-assign]
    async with wire.serving(), connected(wire) as connections:
        assert (await post(connections)).body == b"hi"
        writers[0].write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await writers[0].drain()
        await asyncio.sleep(0.05)
        assert (await post(connections)).body == b"bye"
        assert wire.connections == 2


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "another protocol",
        ),
        (b"HTTP/1.1 200 OK\r\n" + b"X: %s\r\n" % (b"y" * 1000) * 20, "headers have more than 10,000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "Content-Length"),
    ],
)
async def test_heads_without_a_meaning_are_no_answer(
    head: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "LARGEST_HEAD", 10_000)
    async with Wire(head, LAST).serving() as wire, connected(wire) as connections:
        with pytest.raises(NotHttpError, match=said):
            await post(connections)
        assert (await post(connections)).body == b"bye"


async def test_an_endless_answer_is_given_up_as_soon_as_it_is_too_large() -> None:
    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 5000
    async with Wire(endless, OK).serving() as wire, connected(wire) as connections:
        with pytest.raises(AnswerTooLargeError):
            await post(connections)
        assert (await post(connections)).body == b"hi"
        assert wire.connections == 2


async def test_a_cancelled_request_s_answer_reaches_nobody_else() -> None:
    wire = Wire(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nold", OK)
    wire.wait_for(2)
    async with wire.serving(), connected(wire) as connections:
        first = asyncio.create_task(post(connections))
        while not wire.heads:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await post(connections)).body == b"hi"


async def test_through_a_proxy_the_whole_address_and_the_proxy_s_name_and_password_are_sent() -> None:
    async with Wire(OK).serving() as proxy:
        through = proxy.url.with_user("me").with_password("pass").with_path("/")
        url = URL("http://you:word@endpoint.invalid/v1/chat/completions?a=b")
        async with connected(proxy, url=url, proxy=through) as connections:
            await post(connections)
    assert proxy.heads[0].startswith("POST http://endpoint.invalid/v1/chat/completions?a=b HTTP/1.1\r\n")
    spelled = [base64.b64encode(pair).decode().lower() for pair in (b"me:pass", b"you:word")]
    fields = proxy.fields()
    assert fields["proxy-authorization"] == f"basic {spelled[0]}"
    assert fields["authorization"] == f"basic {spelled[1]}"
    assert fields["host"] == "endpoint.invalid"


async def test_a_header_of_two_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="line break"):
        Connections(
            asyncio.get_running_loop(),
            URL("http://endpoint.invalid/"),
            {"X-Mine": "a\r\nX-Other: b"},
            proxy=None,
            patience=10.0,
            keep_alive=True,
        )


TRUSTING = """
import asyncio, sys
from yarl import URL
from taskmill.models.transport import Connections

async def main():
    options = {"proxy": None, "patience": 10.0, "keep_alive": True}
    connections = Connections(asyncio.get_running_loop(), URL(sys.argv[1]), {}, **options)
    for _ in range(2):
        print((await connections.post(b"{}", largest=1000)).body.decode())
    await connections.close()

asyncio.run(main())
"""


async def test_a_secured_endpoint_is_believed_only_with_a_trusted_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    secured = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(secured)
    trusted = tmp_path / "trusted.pem"
    authority.cert_pem.write_to_path(str(trusted))
    async with Wire(OK, OK).serving(secured) as wire:
        async with connected(wire) as connections:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await post(connections)
        child = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", TRUSTING, str(wire.url)],
            env={**os.environ, "SSL_CERT_FILE": str(trusted)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (child.stdout.split(), child.stderr) == (["hi", "hi"], "")
    assert wire.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")


def test_it_goes_the_same_way_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    authority = trustme.CA()
    secured = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(secured)

    async def exchanges() -> list[bytes]:
        async with Wire(OK, b"", OK, LAST).serving() as wire, connected(wire) as connections:
            bodies = [(await post(connections)).body for _ in range(3)]
        async with Wire(OK).serving(secured) as wire, connected(wire) as connections:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await post(connections)
        return bodies

    assert uvloop.run(exchanges()) == [b"hi", b"hi", b"bye"]
