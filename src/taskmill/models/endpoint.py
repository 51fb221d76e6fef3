"""A model behind an HTTP endpoint that speaks chat completions.

One attempt per call, plus at most one more where a kept connection turned out to be closed: everything else
about trying again is `taskmill.models.retry`'s. Streaming is not used: an answer is of use when it is whole.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp import hdrs
from aiohttp.http import HttpProcessingError
from msgspec import Struct
from yarl import URL

from taskmill._version import __version__
from taskmill.errors import (
    BadRequestError,
    ConfigurationError,
    MalformedAnswerError,
    ModelError,
    ModelTimeoutError,
    TransientModelError,
)
from taskmill.models.answers import Answer, AnswerTooLargeError, NotHttpError
from taskmill.models.base import Completion, Request
from taskmill.models.families import Family, family_of, public_url
from taskmill.models.redaction import redactor
from taskmill.models.refusals import BODY_KEPT, refused, retry_after_seconds
from taskmill.models.transport import Connections, Deadlines
from taskmill.models.wire import REASONING_ECHO, TOKEN_IDS, decode_answer, encode_request, read_error

_log = logging.getLogger(__name__)

LARGEST_ANSWER = 64 * 1024 * 1024
"""Bytes of an answer, uncompressed; more is no turn of a conversation, and would be held in memory."""

LARGEST_ERROR = 256 * 1024
"""Bytes of an error that are looked at."""

_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
_UNKNOWN_FIELD = re.compile(
    r"unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|not permitted|not allowed|extra|invalid field",
    re.IGNORECASE,
)


class Timeouts(Struct, frozen=True):
    """Seconds a model call may take, all of them finite: every wait has an end.

    `connect` is for a connection, `attempt` for one request and its answer, `total` for all attempts with the
    waiting between them.
    """

    attempt: float = 600.0
    connect: float = 30.0
    total: float = 3600.0

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
                or value <= 0
            ):
                raise ConfigurationError(
                    f"timeout {field}={value!r} can't be: give a finite number of seconds above 0"
                )


class EndpointModel:
    """The model `name` at the OpenAI-style endpoint `base_url` (the part before `/chat/completions`).

    Connections are kept, unless `keep_alive` is false, and unlimited in number: how many calls are under way is
    the callers' matter and `AdaptiveLimit`'s. Proxies of the environment are used, except towards this machine.
    Redirects are not followed, so the key goes nowhere it was not meant for. Raises `ConfigurationError` for
    what can't be meant.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        api_key: str | None = None,
        timeout: Timeouts | None = None,
        keep_alive: bool = True,
    ) -> None:
        self._name = name
        self._keep_alive = keep_alive
        self._timeouts = timeout or Timeouts()
        self._key = (api_key or "").strip()
        if not self._key.isascii() or not self._key.isprintable() or " " in self._key:
            raise ConfigurationError("api_key holds characters no key has (blanks, line ends, non-ASCII)")
        self._url = _completions_url(base_url)
        if self._key and self._url.user:
            raise ConfigurationError("base_url names a user and there is an api_key too: give one of them")
        self._proxy = _proxy_for(self._url)
        self._redacted = redactor([self._key, *_secrets_of(self._url), *_secrets_of(self._proxy)])
        self._place = str(self._url.with_user(None).with_query(None))
        self._family = family_of(base_url)
        self._without: frozenset[str] = frozenset()
        self._connections: Connections | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: Deadlines | None = None
        self._patience = min(self._timeouts.attempt, self._timeouts.total)

    @property
    def name(self) -> str:
        """The model's name, as the endpoint knows it."""
        return self._name

    @property
    def family(self) -> Family:
        """What kind of endpoint this was taken for."""
        return self._family

    async def complete(
        self,
        request: Request,
        *,
        extra_body: Mapping[str, Any] | None = None,
        unpack: Callable[[bytes], bytes] | None = None,
    ) -> Completion:
        """Send one request and read its answer; the errors are those of `taskmill.errors.ModelError`.

        `extra_body` holds fields only this server knows (the embedded model's grammar), `unpack` makes the usual
        body of what such fields have it answer.
        """
        without = self._without
        while True:
            body = encode_request(request, self._name, self._family, without, extra_body)
            started = time.perf_counter()
            try:
                raw = await self._post(body)
                seconds = time.perf_counter() - started
                completion = self._decode(raw if unpack is None else unpack(raw), seconds)
            except BadRequestError as error:
                field = self._refused_field(error, request, without)
                if field is None:
                    raise
                without |= {field}
            else:
                if not without <= self._without:
                    self._remember(without)
                return completion

    async def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        connections, self._connections = self._connections, None
        deadlines, self._deadlines = self._deadlines, None
        if deadlines is not None:
            deadlines.close()
        if connections is not None:
            await connections.close()

    # -- one exchange -----------------------------------------------------------------------------------------

    async def _post(self, body: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            await self._leave_loop()
        connections, deadlines = self._open(loop)
        try:
            with deadlines.attempt():
                answer = await connections.post(body, largest=LARGEST_ANSWER)
        except TimeoutError as error:
            raise self._late(error) from error
        except (aiohttp.ClientError, OSError, HttpProcessingError, NotHttpError) as error:
            # What is printed with an error would hold the secret that was taken out of its own words.
            said = str(error)
            raise self._broken(error) from (error if self._redacted(said) == said else None)
        except AnswerTooLargeError as error:
            raise MalformedAnswerError(
                f"{self._place} answered with {error.size:,} bytes or more; at most {LARGEST_ANSWER:,} are read",
                status=error.status,
            ) from None
        if answer.status != 200:
            raise self._refusal(answer)
        return answer.body

    async def _leave_loop(self) -> None:
        """Let go of connections of a loop that is over. In a loop that is not, its calls go on to their end."""
        if self._connections is not None and self._loop is not None and self._loop.is_closed():
            await self.close()

    def _open(self, loop: asyncio.AbstractEventLoop) -> tuple[Connections, Deadlines]:
        connections, deadlines = self._connections, self._deadlines
        if connections is None or deadlines is None or self._loop is not loop:
            headers: dict[str, str] = {
                hdrs.CONTENT_TYPE: "application/json",
                hdrs.USER_AGENT: f"taskmill/{__version__}",
            }
            if self._key:
                headers[hdrs.AUTHORIZATION] = f"Bearer {self._key}"
            self._loop = loop
            self._connections = connections = Connections(
                loop,
                self._url,
                headers,
                proxy=self._proxy,
                patience=self._timeouts.connect,
                keep_alive=self._keep_alive,
            )
            self._deadlines = deadlines = Deadlines(loop, self._patience)
        return connections, deadlines

    def _decode(self, raw: bytes, seconds: float) -> Completion:
        try:
            return decode_answer(raw, model=self._name, seconds=seconds)
        except ModelError as error:
            text = raw[:LARGEST_ERROR].decode("utf-8", "replace")
            clean = self._redacted(text)
            error.body = clean[:BODY_KEPT]
            if clean == text and len(raw) <= LARGEST_ERROR:
                raise
        # Read again without the secret, so that no message made of the body holds a part of it either.
        try:
            return decode_answer(clean.encode(), model=self._name, seconds=seconds)
        except ModelError as error:
            error.body = clean[:BODY_KEPT]
            raise

    # -- what went wrong --------------------------------------------------------------------------------------

    def _refusal(self, answer: Answer) -> ModelError:
        status, headers = answer.status, answer.headers
        if 300 <= status < 400:
            target = self._redacted(public_url(headers.get(hdrs.LOCATION, "")))
            return BadRequestError(
                f"{self._place} redirects to {target!r}; set base_url to where the endpoint really is",
                status=status,
            )
        # Redacted before anything is cut, or half a key could stand at the end.
        text = self._redacted(answer.body[:LARGEST_ERROR].decode("utf-8-sig", "replace"))
        if status < 300:
            error: ModelError = MalformedAnswerError(f"{self._place} answered {status}", status=status)
        else:
            error = refused(status, read_error(text), retry_after=retry_after_seconds(headers, time.time()))
        error.body = text[:BODY_KEPT]
        return error

    def _late(self, error: TimeoutError) -> ModelTimeoutError:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            text = f"no connection to {self._place} within {self._timeouts.connect:g} s"
        else:
            text = f"no answer from {self._place} within {self._patience:g} s"
        return ModelTimeoutError(text)

    def _broken(self, error: Exception) -> ModelError:
        text = self._redacted(f"{type(error).__name__}: {error}")
        match error:
            case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
                return ModelError(f"no trusted connection to {self._place}: {text}")
            case aiohttp.ClientConnectorError():
                return TransientModelError(
                    f"no connection to {self._place}: {self._redacted(_why(error.os_error))}"
                )
            case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
                return TransientModelError(
                    f"{self._place} closed the connection before the answer was whole: {text}"
                )
            case _:
                return MalformedAnswerError(f"{self._place} does not speak HTTP as expected: {text}")

    # -- fields an endpoint does not take ---------------------------------------------------------------------

    def _refused_field(self, error: BadRequestError, request: Request, without: frozenset[str]) -> str | None:
        """The optional field this refusal is about, if the request is worth sending again without it."""
        if error.status not in (400, 422):
            return None
        said = f"{error} {error.body or ''}"
        if "seed" not in without and request.sampling.seed is not None and re.search(r"\bseed\b", said):
            return "seed"
        if _UNKNOWN_FIELD.search(said) is None:
            return None
        if request.sampling.logprobs:
            for field in (TOKEN_IDS, "logprobs"):
                if field not in without and field in said:
                    return field
        limit = self._family.limit_field
        if limit not in without and request.sampling.max_tokens is not None and limit in said:
            return limit
        if REASONING_ECHO not in without and "reasoning" in said and _has_reasoning(request):
            return REASONING_ECHO
        return None

    def _remember(self, without: frozenset[str]) -> None:
        """Leave these fields out from now on: without them the endpoint answered. Said once for each."""
        for field in without - self._without:
            _log.warning(
                "%s does not take %s: left out from now on, or sent under another name", self._place, field
            )
        self._without |= without


def _secrets_of(url: URL | None) -> Iterator[str]:
    """What of an address is secret: a password, a user without one (a token, then), and what stands in the query."""
    if url is None:
        return
    if url.user is not None:
        yield url.password or url.user
        pair = f"{url.user}:{url.password or ''}"
        yield base64.b64encode(pair.encode("latin-1", "replace")).decode()
    for name, value in url.query.items():
        yield value or name


def _has_reasoning(request: Request) -> bool:
    return any(m.role == "assistant" and (m.reasoning or m.reasoning_details) for m in request.messages)


def _completions_url(base_url: str) -> URL:
    try:
        parts = urlsplit(base_url)
        path = parts.path.rstrip("/")
        if not path.endswith("/chat/completions"):
            path += "/chat/completions"
        url = URL(parts._replace(path=path, fragment="").geturl())
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(
            f"base_url={public_url(base_url)!r} is no address: give one such as 'https://host/v1'"
        )
    return url


def _proxy_for(url: URL) -> URL | None:
    """The environment's proxy for `url`. Looked up once: the environment is not read again for each call."""
    host = url.host or ""
    if _LOOPBACK.fullmatch(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None:
        return None
    with contextlib.suppress(ValueError):
        address = URL(proxy if "://" in proxy else f"http://{proxy}")
        if address.scheme in ("http", "https") and address.host:
            return address
    raise ConfigurationError(
        f"the environment's proxy for {url.scheme} can't be used: give an http:// proxy or list {host!r} in NO_PROXY"
    )


def _why(error: OSError) -> str:
    """What the system says of a connection that did not come about."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
