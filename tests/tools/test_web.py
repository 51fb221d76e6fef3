from __future__ import annotations

import json

import pytest
from aiohttp import web

from taskmill.errors import ConfigurationError, ToolRefusedError
from taskmill.records import ToolCall
from taskmill.tools import ToolBox
from taskmill.tools import web as web_module
from taskmill.tools.web import check_public, web_tools


class Provider:
    """A real server in the place of a search provider; answers from a list, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked = []
        self.answers = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, dict(request.headers), await request.json()))
        status, body = self.answers.pop(0)
        headers = {"Retry-After": "0"} if status == 429 else {}
        if status == 308:
            headers = {"Location": f"{self.url}/elsewhere"}
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")


@pytest.fixture
async def provider(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(web_module, "LONGEST_WAIT", 0.01)
    provider = Provider()
    app = web.Application()
    app.router.add_post("/{path:.*}", provider.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield provider
    await runner.cleanup()


async def ask(context, provider, name, arguments, kind="tavily"):
    tools = web_tools(kind, api_key="sk-very-secret", base_url=provider.url)
    [(message, event)] = await ToolBox(tools, context).run([ToolCall("c", name, json.dumps(arguments))])
    return event.success, message.content


async def test_searching_with_tavily(context, provider):
    rows = [
        {"title": "T", "url": "https://a.example/", "content": "text"},
        {"title": "U", "url": "u", "content": ""},
    ]
    provider.answers = [(200, {"results": rows})]
    success, text = await ask(context, provider, "web_search", {"query": "what", "limit": 1})
    assert (success, json.loads(text)) == (
        True,
        {"results": [{"title": "T", "url": "https://a.example/", "text": "text"}]},
    )
    [(path, headers, body)] = provider.asked
    assert (path, headers["Authorization"], body) == (
        "/search",
        "Bearer sk-very-secret",
        {"query": "what", "max_results": 1},
    )


async def test_searching_with_exa(context, provider):
    provider.answers = [(200, {"results": [{"title": "T", "url": "u", "highlights": ["a", "b"]}]})]
    success, text = await ask(context, provider, "web_search", {"query": "what"}, "exa")
    assert (success, json.loads(text)) == (True, {"results": [{"title": "T", "url": "u", "text": "a … b"}]})
    [(path, headers, body)] = provider.asked
    assert (path, headers["x-api-key"], body["numResults"]) == ("/search", "sk-very-secret", 5)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (
            "tavily",
            {
                "results": [{"url": "https://a.example/", "raw_content": "x" * 20_001}],
                "failed_results": [{"url": "https://b.example/", "error": "gone"}],
            },
        ),
        (
            "exa",
            {
                "results": [{"url": "https://a.example/", "text": "x" * 20_001}],
                "statuses": [
                    {"id": "https://a.example/", "status": "success"},
                    {"id": "https://b.example/", "status": "error", "error": {"tag": "gone"}},
                ],
            },
        ),
    ],
)
async def test_reading_pages(context, provider, kind, answer):
    provider.answers = [(200, answer)]
    urls = ["https://a.example/", "https://b.example/"]
    success, text = await ask(context, provider, "web_extract", {"urls": urls}, kind)
    [page, failed] = json.loads(text)["pages"]
    assert success
    assert page == {"url": "https://a.example/", "text": "x" * 20_000 + "\n[… 1 more characters]"}
    assert failed == {"url": "https://b.example/", "error": "gone"}


async def test_when_no_page_can_be_read_the_call_has_failed(context, provider):
    provider.answers = [
        (200, {"results": [], "failed_results": [{"url": "https://b.example/", "error": "gone"}]})
    ]
    said = await ask(context, provider, "web_extract", {"urls": ["https://b.example/"]})
    assert said == (False, "Error: https://b.example/: gone")


async def test_an_overloaded_provider_is_asked_again(context, provider):
    provider.answers = [(429, "{}"), (503, "{}"), (200, {"results": []})]
    assert await ask(context, provider, "web_search", {"query": "q"}) == (True, '{"results":[]}')
    assert len(provider.asked) == 3


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([(401, "no such key: sk-very-secret")], "tavily refuses the key (HTTP 401); check TAVILY_API_KEY"),
        ([(400, "key sk-very-secret may not")], "tavily answered HTTP 400: key [key removed] may not"),
        (
            [(400, "x" * 295 + " sk-very-secret")],
            "tavily answered HTTP 400: " + "x" * 295 + " [key",
        ),
        (
            [(308, ""), (200, {"results": []})],
            "tavily redirects (HTTP 308) and is not followed; check its base_url",
        ),
        ([(429, "slow")] * 3, "tavily answered HTTP 429: slow"),
        ([(200, "<html>")], "tavily answered with something that is not JSON"),
        ([(200, "[1]")], None),
    ],
)
async def test_what_a_provider_can_do_wrong(context, provider, answers, said):
    provider.answers = answers
    success, text = await ask(context, provider, "web_search", {"query": "q"})
    assert "/elsewhere" not in [path for path, _, _ in provider.asked]
    assert "sk-" not in text
    if said is None:
        assert (success, text) == (True, '{"results":[]}')
    else:
        assert (success, text) == (False, f"Error: {said}")


async def test_a_provider_that_is_away(context, provider):
    provider.url = "http://127.0.0.1:9"
    success, text = await ask(context, provider, "web_search", {"query": "q"})
    assert (success, text) == (False, "Error: tavily can't be reached: ClientConnectorError")


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/",
        "http://127.0.0.1:8000/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://10.0.0.8/",
        "http://169.254.169.254/latest/meta-data",
        "http://metadata.google.internal/",
        "http://printer.local/",
        "http://intranet/",
        "http://a.localhost./",
        "https://user:pass@example.com/",
        "file:///etc/passwd",
        "ftp://example.com/",
        "example.com",
        "http://[bad/",
        "",
    ],
)
async def test_addresses_that_are_not_public_are_refused(context, provider, url):
    with pytest.raises(ToolRefusedError):
        check_public(url)
    success, _ = await ask(context, provider, "web_extract", {"urls": ["https://example.com/", url]})
    assert not success
    assert provider.asked == []


@pytest.mark.parametrize(
    "url", ["https://example.com/a?b#c", "http://8.8.8.8/", "https://xn--bcher-kva.example/"]
)
def test_public_addresses_are_let_through(url):
    check_public(url)


def test_without_a_key_there_is_no_web(monkeypatch):
    for name in ("TAVILY_API_KEY", "EXA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert web_module.missing() == "no key of a search provider: set TAVILY_API_KEY or EXA_API_KEY"
    with pytest.raises(ConfigurationError, match="set TAVILY_API_KEY or EXA_API_KEY"):
        web_tools()
    with pytest.raises(ConfigurationError, match="set EXA_API_KEY"):
        web_tools("exa")
    with pytest.raises(ConfigurationError, match="'bing' is not known; there are exa, tavily"):
        web_tools("bing")
    monkeypatch.setenv("EXA_API_KEY", "k")
    assert web_module.missing() is None
