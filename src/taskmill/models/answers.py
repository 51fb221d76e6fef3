"""Answers of an HTTP server, read one after another from a connection that is kept.

The parser is httptools' (llhttp). A connection has one reader as long as it lives, and one request under way at a time.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import NamedTuple

import aiohttp
import httptools
from aiohttp import hdrs
from multidict import CIMultiDict

LARGEST_HEAD = 1 << 20
"""Bytes of an answer that may come without being part of its body."""

_FORGIVEN = {
    "lenient_headers": True,
    "lenient_data_after_close": True,
    "lenient_keep_alive": True,
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,
}
"""What servers get wrong without a doubt about where an answer ends."""

_GZIP = b"\x1f\x8b"
_ENCODING = hdrs.CONTENT_ENCODING.lower().encode()


class Answer(NamedTuple):
    """What came back: the status, the names and values of its headers, and the body, decompressed."""

    status: int
    fields: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def headers(self) -> CIMultiDict[str]:
        """The headers, by names in any case."""
        return CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in self.fields)


class AnswerTooLargeError(Exception):
    """An answer has this many bytes or more: it was not read to its end."""

    def __init__(self, status: int, size: int) -> None:
        super().__init__(status, size)
        self.status = status
        self.size = size


class NotHttpError(Exception):
    """What came is no answer of an HTTP server."""


class AnswerReader(asyncio.Protocol):
    """Takes the place of `opener`, the protocol that `transport` was opened with, which is told of the end of it.

    `usable` says whether another request may be sent: nothing went wrong, and the other side keeps the connection.
    `begun` says whether anything of an answer to the last request has come.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, opener: asyncio.BaseProtocol
    ) -> None:
        self.usable = True
        self.begun = False
        self._loop = loop
        self._transport = transport
        self._opener = opener
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(**_FORGIVEN)
        self._waiter: asyncio.Future[Answer] | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._body: bytes | bytearray = b""
        self._head_size = 0
        self._in_body = False
        self._largest = 0
        transport.set_protocol(self)

    def ask(self, request: bytes, largest: int) -> asyncio.Future[Answer]:
        """Send a whole request; the future is for its answer, whose body has at most `largest` bytes.

        It raises `AnswerTooLargeError`, `NotHttpError`, and `aiohttp.ClientConnectionError` or
        `aiohttp.ClientPayloadError` for a connection that ends before the answer does.
        """
        self._waiter = waiter = self._loop.create_future()
        self.begun = False
        self._head_size = 0
        self._largest = largest
        self._transport.write(request)
        return waiter

    @property
    def written(self) -> bool:
        """Whether the whole request has left this process."""
        return not self._transport.get_write_buffer_size()

    def give_up(self, error: Exception | None = None) -> None:
        """End the connection at once, and what waits for an answer with `error`."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            if error is None:
                waiter.cancel()
            else:
                waiter.set_exception(error)
        self.usable = False
        self._transport.abort()

    # -- what the connection says -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        if self._waiter is None:  # nobody asked
            self.give_up()
            return
        self.begun = True
        body_before = len(self._body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up(NotHttpError(str(error)))
        except httptools.HttpParserUpgrade:
            self.give_up(NotHttpError("the server changes to another protocol, which nobody asked for"))
        if self._waiter is not None and len(self._body) == body_before:
            self._head_size += len(data)
            if self._head_size > LARGEST_HEAD:
                self.give_up(NotHttpError(f"the headers have more than {LARGEST_HEAD:,} bytes"))

    def eof_received(self) -> None:
        """The other side says no more."""
        self._end(None)
        self._transport.abort()  # and reads no more, so that there may be no end of writing

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._opener.connection_lost(exc)
        self._end(exc)

    def _end(self, exc: Exception | None) -> None:
        self.usable = False
        if self._waiter is None:
            return
        if self._in_body and exc is None and self._ends_with_connection():
            self._complete()
        elif self.begun:
            self.give_up(aiohttp.ClientPayloadError(f"the answer is not whole{f': {exc}' if exc else ''}"))
        elif isinstance(exc, OSError):
            self.give_up(aiohttp.ClientOSError(*exc.args))
        else:
            self.give_up(aiohttp.ServerDisconnectedError())

    # -- what the parser says ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins."""
        if self._waiter is None:
            self.usable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer after a body in chunks, which says nothing here."""
        if not self._in_body:
            self._fields.append((name.strip(), value))

    def on_headers_complete(self) -> None:
        """The body begins, if there is one."""
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._body:
            self._body = body
        else:
            # An answer may come in millions of parts of a few bytes.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body
        if len(self._body) > self._largest and self._waiter is not None:
            self.give_up(AnswerTooLargeError(self._parser.get_status_code(), len(self._body)))

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if self._waiter is None:
            return
        if 100 <= self._parser.get_status_code() < 200:  # a word in between, and not the answer
            self._begin_anew()
            return
        if not self._parser.should_keep_alive():
            self.usable = False
        self._complete()

    # -- ends -------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        waiter, self._waiter = self._waiter, None
        status, fields, body = self._parser.get_status_code(), self._fields, bytes(self._body)
        self._begin_anew()
        if waiter is None or waiter.done():
            return
        encodings = [
            value for name, value in fields if len(name) == len(_ENCODING) and name.lower() == _ENCODING
        ]
        try:
            for encoding in reversed(b",".join(encodings).split(b",") if encodings else []):
                body = _decompressed(body, encoding, status, self._largest)
        except (AnswerTooLargeError, aiohttp.ClientPayloadError) as error:
            waiter.set_exception(error)
        else:
            waiter.set_result(Answer(status, fields, body))

    def _begin_anew(self) -> None:
        self._fields = []
        self._body = b""
        self._in_body = False

    def _ends_with_connection(self) -> bool:
        """Whether the answer's headers say of no other end of its body."""
        fields = {name.lower(): value.lower() for name, value in self._fields}
        return b"content-length" not in fields and b"chunked" not in fields.get(b"transfer-encoding", b"")


def _decompressed(body: bytes, encoding: bytes, status: int, largest: int) -> bytes:
    """A body as it was before a content encoding. What is in none that was offered stays as it is."""
    match encoding.strip().lower():
        case b"gzip" | b"x-gzip":
            bits = 16 + zlib.MAX_WBITS
        case b"deflate":  # in zlib's format, by the standard; some servers leave its first bytes out
            has_header = len(body) > 1 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
            bits = zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
        case _:
            return body
    whole = b""
    while body:
        decompressor = zlib.decompressobj(bits)
        try:
            whole += decompressor.decompress(body, largest + 1 - len(whole))
        except zlib.error as error:
            raise aiohttp.ClientPayloadError(f"the answer can't be decompressed: {error}") from error
        if len(whole) > largest:
            raise AnswerTooLargeError(status, len(whole))
        body = decompressor.unused_data
        # What is packed with gzip may be of several members, one after the other.
        if not decompressor.eof or (body and not body.startswith(_GZIP)):
            raise aiohttp.ClientPayloadError("the compressed answer is not whole")
    return whole
