"""Keys go to the endpoint and nowhere else: no file, no event, no log, no error has one."""

from __future__ import annotations

import logging
import traceback
from typing import Any
from urllib.parse import urlsplit

import pytest

from taskmill.testing import FakeEndpoint
from taskmill.testing.endpoint import Step, answer, reply
from tests.batch.mill import Mill

KEY = "sk-SECRET-of-the-header"
PASSWORD = "SECRET-of-the-address"
QUERY = "SECRET-of-the-query"


@pytest.mark.parametrize("where", ["header", "address"])
async def test_no_key_stands_in_any_file_event_log_or_error(
    mill: Mill, where: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even when the endpoint sends all of it back in its refusals, and in answers that make no sense."""
    caplog.set_level(logging.DEBUG)
    mill.prompts("good", "refused", "strange", "broken", "not found")
    echoed = f"who sent {KEY if where == 'header' else PASSWORD} to http://h/?key={QUERY}?"

    def script(body: dict[str, Any]) -> Step:
        match body["messages"][-1]["content"]:
            case "refused":
                return reply({"error": {"message": f"Incorrect API key provided: {echoed}"}}, status=401)
            case "strange":
                return reply({"detail": echoed})
            case "broken":
                return reply(echoed.encode())
            case "not found":
                return reply(f"<html>{echoed}</html>".encode(), status=404)
        return answer("fine", reasoning="hm")

    problem = ""
    async with FakeEndpoint(script) as endpoint:
        parts = urlsplit(endpoint.url)
        user = f"user:{PASSWORD}@" if where == "address" else ""
        base_url = f"http://{user}{parts.netloc}{parts.path}?key={QUERY}"
        key = KEY if where == "header" else None
        for resume in (False, True):
            try:
                await mill.run(
                    "m", base_url=base_url, api_key=key, max_attempts=1, max_failures=1.0, resume=resume
                )
            except Exception:
                problem += traceback.format_exc()
        sent = endpoint.requests[0].headers

    assert sent["Authorization"].startswith("Bearer sk-" if where == "header" else "Basic ")
    stored = mill.stored
    assert {row["error"]["type"] for row in stored.outcomes} >= {"AuthenticationError", "ModelNotFoundError"}
    assert len(stored.rows) == 1
    printed = capfd.readouterr()
    told = [problem, caplog.text, printed.out, printed.err, str(mill.events), repr(mill.runner())]
    for secret in (KEY if where == "header" else PASSWORD, QUERY):
        for name, content in stored.content().items():
            assert secret.encode() not in content, f"{secret} in {name}"
        assert not [text for text in told if secret in text], secret


@pytest.mark.parametrize("model", [None, "m"])
async def test_no_key_stands_in_a_refusal_of_the_settings(mill: Mill, model: str | None) -> None:
    from taskmill import BatchRunner

    url = f"http://user:{PASSWORD}@host/v1?key={QUERY}" if model is None else f"ftp://user:{PASSWORD}@host"
    with pytest.raises(ValueError, match="base_url") as refused:
        BatchRunner("p.jsonl", 1, "run", model=model, base_url=url, api_key=KEY)

    for secret in (KEY, PASSWORD, QUERY):
        assert secret not in str(refused.value)
