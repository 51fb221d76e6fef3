"""Searching the web and reading pages, through a search provider that the user has a key for."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from taskmill.errors import ConfigurationError, ToolError, ToolRefusedError, ToolTimeoutError
from taskmill.models.redaction import redactor
from taskmill.tools.base import Tool
from taskmill.tools.function import tool

ATTEMPT_SECONDS = 40.0
ATTEMPTS = 3
LONGEST_WAIT = 10.0
"""Seconds to wait at most before another attempt, whatever the provider asks for."""

LARGEST_ERROR = 64 * 1024
LARGEST_ANSWER = 16 * 1024 * 1024
LONGEST_PAGE = 20_000
"""Characters of one page; a page of which that is not enough is cut, and it is said."""

MOST_PAGES = 5


class Found(Struct, frozen=True):
    """One result of a search."""

    title: str
    url: str
    text: str


class Page(Struct, frozen=True, omit_defaults=True):
    """One page as text, or why there is none."""

    url: str
    title: str = ""
    text: str = ""
    error: str | None = None


class Provider(Struct, frozen=True):
    """How one search provider is spoken to: where it is, how the key travels, what is sent and what comes back."""

    name: str
    key_variable: str
    base_url: str
    headers: Callable[[str], Mapping[str, str]]
    search: tuple[str, Callable[[str, int], dict[str, Any]], Callable[[Any], list[Found]]]
    extract: tuple[str, Callable[[Sequence[str]], dict[str, Any]], Callable[[Any], list[Page]]]


def _results(answer: Any, key: str = "results") -> list[Mapping[str, Any]]:
    entries = answer.get(key) if isinstance(answer, Mapping) else None
    return [entry for entry in entries or () if isinstance(entry, Mapping)]


def _text(entry: Mapping[str, Any], *keys: str) -> str:
    for key in keys:
        value = entry.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            return " … ".join(value)
    return ""


def _tavily_pages(answer: Any) -> list[Page]:
    pages = [
        Page(_text(entry, "url"), _text(entry, "title"), _text(entry, "raw_content"))
        for entry in _results(answer)
    ]
    failed = [
        Page(_text(entry, "url"), error=_text(entry, "error") or "the page could not be read")
        for entry in _results(answer, "failed_results")
    ]
    return pages + failed


def _exa_pages(answer: Any) -> list[Page]:
    pages = [
        Page(_text(entry, "url", "id"), _text(entry, "title"), _text(entry, "text"))
        for entry in _results(answer)
    ]
    for entry in _results(answer, "statuses"):
        if entry.get("status") == "error":
            error = entry.get("error")
            reason = _text(error, "tag") if isinstance(error, Mapping) else ""
            pages.append(Page(_text(entry, "id"), error=reason or "the page could not be read"))
    return pages


def _found(answer: Any) -> list[Found]:
    return [
        Found(
            _text(entry, "title"),
            _text(entry, "url"),
            _text(entry, "content", "highlights", "summary", "text"),
        )
        for entry in _results(answer)
    ]


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(
            name="tavily",
            key_variable="TAVILY_API_KEY",
            base_url="https://api.tavily.com",
            headers=lambda key: {"Authorization": f"Bearer {key}"},
            search=("/search", lambda query, limit: {"query": query, "max_results": limit}, _found),
            extract=("/extract", lambda urls: {"urls": list(urls), "format": "text"}, _tavily_pages),
        ),
        Provider(
            name="exa",
            key_variable="EXA_API_KEY",
            base_url="https://api.exa.ai",
            headers=lambda key: {"x-api-key": key},
            search=(
                "/search",
                lambda query, limit: {"query": query, "numResults": limit, "contents": {"highlights": True}},
                _found,
            ),
            extract=("/contents", lambda urls: {"urls": list(urls), "text": True}, _exa_pages),
        ),
    )
}
"""Search providers in the order in which their keys are looked for."""


def missing(environment: Mapping[str, str] | None = None) -> str | None:
    """Why there is no web in this environment, or `None` when there is."""
    environment = os.environ if environment is None else environment
    if any(environment.get(provider.key_variable) for provider in PROVIDERS.values()):
        return None
    variables = " or ".join(provider.key_variable for provider in PROVIDERS.values())
    return f"no key of a search provider: set {variables}"


def web_tools(
    provider: str | None = None, *, api_key: str | None = None, base_url: str | None = None
) -> list[Tool]:
    """`web_search` and `web_extract` over a provider: the named one, or the first whose key is in the environment.

    `base_url` is where its API is, for a gateway of one's own. Raises `ConfigurationError` for an unknown
    provider or a missing key. Nothing is fetched by this machine but from the provider.
    """
    if provider is not None and provider not in PROVIDERS:
        raise ConfigurationError(
            f"web provider {provider!r} is not known; there are {', '.join(sorted(PROVIDERS))}"
        )
    candidates = PROVIDERS.values() if provider is None else (PROVIDERS[provider],)
    for candidate in candidates:
        key = api_key or os.environ.get(candidate.key_variable)
        if key:
            return _tools(candidate, key, (base_url or candidate.base_url).rstrip("/"))
    variables = " or ".join(candidate.key_variable for candidate in candidates)
    raise ConfigurationError(f"no key of a search provider: set {variables}")


def _tools(provider: Provider, key: str, base_url: str) -> list[Tool]:
    headers = provider.headers(key)

    @tool(timeout=ATTEMPTS * (ATTEMPT_SECONDS + LONGEST_WAIT))
    async def web_search(query: str, limit: int = 5) -> dict[str, Any]:
        """Search the web. Gives the title, address and a short text of each result.

        Args:
            query: What to look for.
            limit: How many results, 1 to 20.
        """
        if not query.strip():
            raise ToolRefusedError("the query is blank; say what to look for")
        path, body, read = provider.search
        limit = max(1, min(limit, 20))
        answer = await _post(provider, base_url + path, headers, body(query, limit), key)
        return {"results": read(answer)[:limit]}

    @tool(timeout=ATTEMPTS * (ATTEMPT_SECONDS + LONGEST_WAIT))
    async def web_extract(urls: list[str]) -> dict[str, Any]:
        """Read web pages as text.

        Args:
            urls: The addresses of 1 to 5 pages, each beginning with http:// or https://.
        """
        if not 1 <= len(urls) <= MOST_PAGES:
            raise ToolRefusedError(f"give 1 to {MOST_PAGES} addresses, not {len(urls)}")
        for url in urls:
            check_public(url)
        path, body, read = provider.extract
        pages = read(await _post(provider, base_url + path, headers, body(urls), key))
        if pages and all(page.error is not None for page in pages):
            raise ToolError("; ".join(f"{page.url}: {page.error}" for page in pages))
        return {"pages": [_cut(page) for page in pages]}

    return [web_search, web_extract]


def _cut(page: Page) -> Page:
    if len(page.text) <= LONGEST_PAGE:
        return page
    note = f"\n[… {len(page.text) - LONGEST_PAGE:,} more characters]"
    return Page(page.url, page.title, page.text[:LONGEST_PAGE] + note)


def check_public(url: str) -> None:
    """Raises `ToolRefusedError` unless `url` is the http(s) address of a public host.

    The provider fetches the pages, so nothing of this machine's network can be reached; addresses of it are
    refused all the same, because asking for them gives them away.
    """
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".").lower()
        has_user = parts.username is not None or parts.password is not None
    except ValueError:
        raise ToolRefusedError(f"{url!r} is no web address") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ToolRefusedError(f"{url!r} is no web address; it must begin with http:// or https://")
    if has_user:
        raise ToolRefusedError("an address with a user name or password in it is not sent anywhere")
    try:
        is_public = ipaddress.ip_address(host.split("%")[0]).is_global
    except ValueError:
        # Short forms such as 127.1 or 0x7f000001 are numbers too: a name of a public host has a letter at its end.
        last = host.rpartition(".")[2]
        is_public = "." in host and not last.isdigit() and not last.startswith("0x")
        is_public = is_public and last not in (
            "localhost",
            "local",
            "internal",
            "lan",
            "home",
            "corp",
            "test",
        )
    if not is_public:
        raise ToolRefusedError(f"{url!r} is not the address of a public host")


async def _post(
    provider: Provider, url: str, headers: Mapping[str, str], body: Mapping[str, Any], key: str
) -> Any:
    """The provider's answer; tried again while it is overloaded or away."""
    import aiohttp

    problem: ToolError | None = None
    timeout = aiohttp.ClientTimeout(total=ATTEMPT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        for attempt in range(ATTEMPTS):
            try:
                # Redirects are not followed: the key is meant for this address only.
                async with session.post(url, json=body, headers=headers, allow_redirects=False) as response:
                    data = await response.content.read(LARGEST_ANSWER + 1)
                    while not response.content.at_eof() and len(data) <= LARGEST_ANSWER:
                        data += await response.content.read(LARGEST_ANSWER + 1 - len(data))
                    if response.status == 200:
                        return _decoded(provider, data)
                    problem = _refusal(provider, response.status, data, key)
                    if response.status != 429 and response.status < 500:
                        raise problem
                    wait = _retry_after(response.headers.get("Retry-After"))
            except TimeoutError:
                problem = ToolTimeoutError(f"{provider.name} gave no answer within {ATTEMPT_SECONDS:g} s")
                wait = None
            except aiohttp.ClientError as error:
                problem = ToolError(f"{provider.name} can't be reached: {type(error).__name__}")
                wait = None
            if attempt < ATTEMPTS - 1:
                await asyncio.sleep(min(LONGEST_WAIT, 2.0**attempt if wait is None else wait))
    assert problem is not None
    raise problem


def _decoded(provider: Provider, data: bytes) -> Any:
    import json

    if len(data) > LARGEST_ANSWER:
        raise ToolError(f"{provider.name} answered with more than {LARGEST_ANSWER:,} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ToolError(f"{provider.name} answered with something that is not JSON") from None


def _refusal(provider: Provider, status: int, data: bytes, key: str) -> ToolError:
    # Redacted before it is cut, or half a key could stand at the end.
    text = redactor([key])(data[:LARGEST_ERROR].decode(errors="replace"))
    said = " ".join(text[:300].split())
    if 300 <= status < 400:
        return ToolError(f"{provider.name} redirects (HTTP {status}) and is not followed; check its base_url")
    if status in (401, 403):
        return ToolError(f"{provider.name} refuses the key (HTTP {status}); check {provider.key_variable}")
    return ToolError(f"{provider.name} answered HTTP {status}: {said}")


def _retry_after(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
