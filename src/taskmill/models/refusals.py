"""What an endpoint means when it refuses: status and body of an answer to one class of `taskmill.errors`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from taskmill.errors import (
    AuthenticationError,
    BadRequestError,
    ContextWindowError,
    MalformedAnswerError,
    ModelError,
    ModelNotFoundError,
    ModelTimeoutError,
    RateLimitedError,
    TransientModelError,
)

BODY_KEPT = 2000
"""Characters of a raw answer that are kept with an error."""

_WINDOW = re.compile(
    r"context[_ ]length|context[_ ]window|context[_ ]size|maximum context|max_model_len|exceed_context"
    r"|(prompt|input|request|conversation) (is|was) too (long|large)|too many (input )?tokens|input token count"
    r"|reduce the length|longer than the maximum|exceeds? the (model'?s )?(maximum|max|limit).{0,40}tokens?",
    re.IGNORECASE,
)
_NO_CREDIT = re.compile(
    r"insufficient[_ ](quota|credit|balance|fund)|billing|payment required", re.IGNORECASE
)
_TOO_FAST = re.compile(r"rate.?limit|too many requests", re.IGNORECASE)
_MODERATED = re.compile(r"moderation|flagged|content[_ ]policy|content[_ ]filter", re.IGNORECASE)


def refused(status: int, said: Any, *, retry_after: float | None = None) -> ModelError:
    """The error for an HTTP `status` and what the endpoint `said`: an error object, text, or a whole body.

    An error under status 200 carries its own code, if anything. The caller adds `body`.
    """
    message, code = _words(said)
    if status < 400:
        if not code.isdecimal() or not 400 <= int(code) <= 599:
            text = f"the endpoint answered status {status} with an error instead of an answer: {message}"
            return _with(_kind(None, f"{message} {code}"), text, None, retry_after)
        status = int(code)
    kind = _kind(status, f"{message} {code}")
    if status == 503 and retry_after is not None:
        kind = RateLimitedError
    return _with(
        kind, f"the endpoint answered {status}{_ADVICE.get(kind, '')}: {message}", status, retry_after
    )


_ADVICE: dict[type[ModelError], str] = {
    AuthenticationError: " (check the API key, its rights and its credit)",
    ModelNotFoundError: " (check the model's name and the base URL)",
    ContextWindowError: " (the conversation does not fit the model's context window)",
}


def _with(kind: type[ModelError], text: str, status: int | None, retry_after: float | None) -> ModelError:
    return kind(text, status=status, retry_after=retry_after)


def _kind(status: int | None, words: str) -> type[ModelError]:
    # Providers put these under all sorts of status; what the words say is the surer sign.
    if status != 429 and _WINDOW.search(words):
        return ContextWindowError
    match status:
        case 401 | 402:
            return AuthenticationError
        case 403:
            return BadRequestError if _MODERATED.search(words) else AuthenticationError
        case 404:
            return ModelNotFoundError
        case 408 | 504:
            return ModelTimeoutError
        case 409 | 425:
            return TransientModelError
        case 429:
            # An account without credit is told 429 too, and waiting won't fill it.
            return AuthenticationError if _NO_CREDIT.search(words) else RateLimitedError
        case 529:
            return RateLimitedError
        case None:
            return RateLimitedError if _TOO_FAST.search(words) else MalformedAnswerError
        case _:
            return TransientModelError if status >= 500 else BadRequestError


def _words(said: Any) -> tuple[str, str]:
    """Message and code of an error, wherever the endpoint put them."""
    if isinstance(said, Mapping):
        inner = said.get("error")
        if isinstance(inner, (Mapping, str)) and inner:
            message, code = _words(inner)
            return message, code or str(said.get("code") or "")
        for name in ("message", "detail", "msg", "error_message"):
            if said.get(name):
                message = said[name] if isinstance(said[name], str) else _json(said[name])
                break
        else:
            message = _json(said)
        code = next((str(said[name]) for name in ("code", "status", "type") if said.get(name)), "")
        # A router's own message is often "Provider returned error"; the cause is one level down.
        metadata = said.get("metadata")
        if isinstance(metadata, Mapping) and metadata.get("raw"):
            message = f"{message}: {metadata['raw']}"
        return message[:BODY_KEPT], code
    if isinstance(said, str):
        return " ".join(said.split())[:500] or "(empty body)", ""
    return _json(said), ""


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()[:500]
    except (TypeError, ValueError):
        return repr(value)[:500]


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds an endpoint asks to wait: `Retry-After` as a number or a date, or `retry-after-ms`.

    `now` is the time of day (seconds since 1970), used where the answer has no `Date` of its own: against
    that one, a clock that is wrong on either side does no harm.
    """
    exact = headers.get("retry-after-ms")
    if exact is not None and (milliseconds := _number(exact)) is not None:
        return milliseconds / 1000
    asked = headers.get("Retry-After")
    if asked is None:
        return None
    if (seconds := _number(asked)) is not None:
        return seconds
    until = _moment(asked)
    if until is None:
        return None
    return max(0.0, until - (_moment(headers.get("Date")) or now))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _moment(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
