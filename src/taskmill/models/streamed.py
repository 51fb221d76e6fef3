"""A streamed answer, once it is whole, as the answer it would have been unstreamed.

Only the embedded model's server is asked to stream. It notices that nobody waits any more when it writes, and an
answer in one piece is written when all of it has been computed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from taskmill.errors import MalformedAnswerError

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields of a request for such an answer."""

_EVENT = b"data: "


def whole_answer(raw: bytes) -> bytes:
    """The events of one answer in text, put together. An error among them is given as it is.

    Raises `MalformedAnswerError` for events that are no JSON. A stream that ended early has no choice.
    """
    said: list[str] = []
    finish = None
    answer: dict[str, Any] = {"choices": []}
    for line in raw.splitlines():
        if not line.startswith(_EVENT) or line == b"data: [DONE]":
            continue
        try:
            event = msgspec.json.decode(line[len(_EVENT) :], type=dict[str, Any])
        except msgspec.DecodeError:
            raise MalformedAnswerError("the server streamed something that is not JSON") from None
        if event.get("error"):
            return line[len(_EVENT) :]
        for choice in event.get("choices") or ():
            said.append(choice["delta"].get("content") or "")
            finish = choice.get("finish_reason") or finish
        answer |= {name: event[name] for name in ("model", "usage") if event.get(name)}
    if finish is not None:
        message = {"role": "assistant", "content": "".join(said)}
        answer["choices"] = [{"message": message, "finish_reason": finish}]
    return msgspec.json.encode(answer)
