"""What goes over the wire for one request after another, and what is made of what comes back."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import socket
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


def zipped(body: bytes) -> bytes:
    """The same bytes in every process, as the names of tests should be."""
    return gzip.compress(body, mtime=0)


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        (b"gzip", zipped(b"small")),
        (b"X-GZip", zipped(b"small")),
        (b"deflate", zlib.compress(b"small")),
        (b"deflate", raw_deflate(b"small")),
        (b"identity", b"small"),
        (b"utf-8", b"small"),
        (b"gzip", zipped(b"sm") + zipped(b"all")),
        (b"deflate, gzip", zipped(zlib.compress(b"small"))),
        (b"deflate\r\nContent-Encoding: gzip", zipped(zlib.compress(b"small"))),
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
        (b"gzip", zipped(b"small")[:-4], "not whole"),
        (b"gzip", zipped(b"small") + b"more", "not whole"),
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
    bomb = zipped(b"x" * 10_000_000)
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


@pytest.mark.parametrize(
    "head",
    [b"Content-Length : 500\r\n\r\n", b"Transfer-Encoding : chunked\r\n\r\n14\r\n"],
)
async def test_a_blank_before_the_colon_hides_no_length(head: bytes) -> None:
    wire = Wire(b"HTTP/1.1 200 OK\r\nX: Connection: close\r\n" + head + b"half")
    async with wire.serving(), connected(wire) as connections:
        with pytest.raises(aiohttp.ClientPayloadError, match="not whole"):
            await post(connections)


@pytest.mark.parametrize("first", [b"HTTP/1.1 100 Continue\r\nConnection: close", b"HTTP/1.0 100 Continue"])
async def test_a_word_in_between_that_would_end_the_connection_does_not(first: bytes) -> None:
    async with Wire(first + b"\r\n\r\n" + OK).serving() as wire, connected(wire) as connections:
        assert (await post(connections)).body == b"hi"


async def test_a_status_that_there_is_not_is_no_word_in_between() -> None:
    odd = b"HTTP/1.1 099 C\r\nContent-Length: 2\r\n\r\nhi"
    async with Wire(odd).serving() as wire, connected(wire) as connections:
        assert (await post(connections)).status == 99


async def test_trailers_are_no_headers_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "LARGEST_HEAD", 100_000)
    start = CHUNKED + b"5\r\nhello\r\n0\r\n"
    endless = start + b"X: y\r\n" * 100_000
    wire = Wire(start + b"Content-Encoding: gzip\r\n\r\n", endless)
    async with wire.serving(), connected(wire) as connections:
        answer = await post(connections)
        assert (answer.body, dict(answer.headers)) == (b"hello", {"Transfer-Encoding": "chunked"})
        with pytest.raises(NotHttpError, match="more than 100,000 bytes"):
            await post(connections)


async def test_an_answer_of_many_small_parts_is_put_together() -> None:
    parts = CHUNKED + b"2\r\nab\r\n" * 300 + b"0\r\n\r\n"
    async with Wire(parts).serving() as wire, connected(wire) as connections:
        assert (await post(connections)).body == b"ab" * 300


class Deaf:
    """A server that says something at once, perhaps, and reads nothing of what it is sent."""

    def __init__(self, said: bytes = b"", *, half_closed: bool = False) -> None:
        self.said = said
        self.half_closed = half_closed
        self.connections = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[URL]:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener))
        try:
            yield URL(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions")
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        open_ones: list[socket.socket] = []
        try:
            while True:
                connection, _ = await loop.sock_accept(listener)
                open_ones.append(connection)
                self.connections += 1
                await loop.sock_recv(connection, 10)
                if self.said:
                    await loop.sock_sendall(connection, self.said)
                if self.half_closed:
                    connection.shutdown(socket.SHUT_WR)
        finally:
            for connection in open_ones:
                connection.close()


LARGE = b"x" * 30_000_000


def transports(connections: Connections) -> int:
    """Connections that the pool of aiohttp still knows."""
    return sum(map(len, connections._connector._acquired_per_host.values()))


async def test_a_cancelled_request_that_nobody_reads_leaves_nothing_behind() -> None:
    deaf = Deaf()
    async with deaf.serving() as url, connected(Wire(), url=url) as connections:
        asking = asyncio.create_task(post(connections, LARGE))
        while not deaf.connections:
            await asyncio.sleep(0.01)
        (kept,) = connections._under_way
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while not kept.reader.written:
            await asyncio.sleep(0.01)
        assert transports(connections) == 0


async def test_closing_ends_what_is_under_way_though_nobody_reads_it() -> None:
    deaf = Deaf(b"HTTP/1.0 200 OK\r\n\r\nhalf of th")
    async with deaf.serving() as url, connected(Wire(), url=url) as connections:
        asking = asyncio.create_task(post(connections, LARGE))
        while not (connections._under_way and next(iter(connections._under_way)).reader.begun):
            await asyncio.sleep(0.01)
        await connections.close()
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await asking


async def test_a_connection_whose_request_was_not_read_is_not_used_again() -> None:
    deaf = Deaf(OK)
    async with deaf.serving() as url, connected(Wire(), url=url) as connections:
        assert (await post(connections, LARGE)).body == b"hi"
        assert (await post(connections)).body == b"hi"
        assert deaf.connections == 2


async def test_an_answer_before_the_request_was_read_counts() -> None:
    deaf = Deaf(b"HTTP/1.0 413 Too Large\r\n\r\ntoo large", half_closed=True)
    async with deaf.serving() as url, connected(Wire(), url=url) as connections:
        answer = await post(connections, LARGE)
        assert (answer.status, answer.body) == (413, b"too large")


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


def test_on_uvloop_an_answer_that_comes_before_the_request_is_an_error_and_no_wait() -> None:
    uvloop = pytest.importorskip("uvloop")
    busy = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(busy)

    async def exchange() -> None:
        async with await asyncio.start_server(early, "127.0.0.1", 0) as server:
            url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
            async with connected(Wire(), url=url) as connections:
                try:
                    answer = await asyncio.wait_for(post(connections), 30)
                except aiohttp.ServerDisconnectedError:
                    return
                assert (answer.status, answer.body) == (503, b"busy")

    uvloop.run(exchange())
