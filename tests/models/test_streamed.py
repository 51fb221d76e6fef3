"""Events of a stream, put together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskmill.errors import MalformedAnswerError, TransientModelError
from taskmill.models.streamed import whole_answer
from taskmill.models.wire import decode_answer
from taskmill.records import Message, Usage


def streamed(*events: Any) -> bytes:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return "".join(lines).encode()


def delta(content: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"model": "m", "choices": [{"delta": {"content": content}, "finish_reason": finish}]}


def test_pieces_of_a_text_are_one_answer() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    raw = streamed(delta(None), delta("Gr\u2028"), delta("üße"), delta(None, "length"), usage, "[DONE]")
    completion = decode_answer(whole_answer(raw))
    assert completion.message == Message("assistant", "Gr\u2028üße")
    assert (completion.finish_reason, completion.model) == ("length", "m")
    assert (completion.usage, completion.counted) == (Usage(3, 2), True)


@pytest.mark.parametrize("raw", [b"", b"data: {", streamed(delta("cut off")), b'{"choices": []}'])
def test_a_stream_without_its_end_is_no_answer(raw: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        decode_answer(whole_answer(raw))


def test_an_error_amid_the_stream_is_that_error() -> None:
    raw = streamed(delta("so far"), {"error": {"code": 500, "message": "out of memory"}})
    with pytest.raises(TransientModelError, match="out of memory"):
        decode_answer(whole_answer(raw))
