"""Which endpoint takes what: the differences between providers of the chat-completions API, in one table.

A family says which field asks for reasoning, whether an earlier turn's reasoning goes back with the
conversation, how the length limit is called, and whether the endpoint routes between providers. The family
follows from the host in the base URL; a host nobody knows is taken for a server of the user's own (vLLM,
SGLang, llama.cpp and the like).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from taskmill.models.base import Effort, Reasoning

Echo = Literal["no", "details", "content", "calls"]
"""How reasoning of earlier turns goes back: not at all; as `reasoning_details`, else `reasoning`; as
`reasoning_content`; or as `reasoning_content` on the turns that called tools, where it is required even if empty."""

_OPENAI_REASONERS = re.compile(r"(^|/)(o\d|gpt-[5-9]|codex)")


class Family(Struct, frozen=True):
    """What endpoints of one kind take. `asks` maps a wish for reasoning to fields of the request.

    `gives_token_ids` says that the ids of an answer's tokens can be asked for, or that asking does no harm.
    """

    name: str
    asks: Callable[[Reasoning, str, int | None], Mapping[str, Any]]
    echo: Echo = "no"
    limit_field: str = "max_tokens"
    routes: bool = False
    gives_token_ids: bool = False


def routing(
    *,
    only: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    order: Sequence[str] | None = None,
    sort: str | None = None,
) -> dict[str, Any] | None:
    """The object that tells endpoints which route between providers; `None` when nothing is asked for."""
    asked = {"only": only, "ignore": ignore, "order": order, "sort": sort}
    return {name: value for name, value in asked.items() if value} or None


def _clamped(effort: Effort, highest: Effort, lowest: Effort = "minimal") -> Effort:
    """`effort`, or the nearest that the family knows."""
    scale: tuple[Effort, ...] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    if effort == "none":
        return effort
    return scale[min(max(scale.index(effort), scale.index(lowest)), scale.index(highest))]


def _off(wish: Reasoning) -> bool:
    return not wish.enabled or wish.effort == "none"


def _openrouter(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    if _off(wish):
        return {"reasoning": {"enabled": False}}
    effort = {} if wish.effort is None else {"effort": _clamped(wish.effort, "xhigh")}
    return {"reasoning": {"enabled": True, **effort}}


def _openai(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    if _off(wish):
        return {"reasoning_effort": "none"} if _OPENAI_REASONERS.search(model) else {}
    return {} if wish.effort is None else {"reasoning_effort": _clamped(wish.effort, "xhigh")}


def _effort_only(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    if _off(wish):
        return {"reasoning_effort": "none"}
    return {} if wish.effort is None else {"reasoning_effort": _clamped(wish.effort, "high", "low")}


def _thinking_type(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    return {"thinking": {"type": "disabled" if _off(wish) else "enabled"}}


def _deepseek(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    asked = dict(_thinking_type(wish, model, limit))
    if not _off(wish) and wish.effort is not None:
        asked["reasoning_effort"] = _clamped(wish.effort, "max", "low")
    return asked


_BUDGETS: dict[Effort, int] = {
    "minimal": 1024,
    "low": 2048,
    "medium": 8192,
    "high": 16384,
    "xhigh": 24576,
    "max": 31999,
}


def _anthropic(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    if _off(wish):
        return {}
    budget = _BUDGETS[wish.effort or "medium"]
    # The budget is part of max_tokens and must leave room for an answer; 1024 is the least that is taken.
    if limit is not None:
        budget = max(1024, min(budget, limit // 2))
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


def _dashscope(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    return {"enable_thinking": not _off(wish)}


def _own_server(wish: Reasoning, model: str, limit: int | None) -> Mapping[str, Any]:
    # Chat templates call the switch `enable_thinking` (Qwen, GLM) or `thinking` (DeepSeek, Granite) and
    # ignore names they don't know; gpt-oss reads the effort.
    asked: dict[str, Any] = {
        "chat_template_kwargs": {"enable_thinking": not _off(wish), "thinking": not _off(wish)}
    }
    if not _off(wish) and wish.effort is not None:
        asked["reasoning_effort"] = _clamped(wish.effort, "high", "low")
    return asked


OWN_SERVER = Family("own server", _own_server, echo="content", gives_token_ids=True)

_HOSTS: tuple[tuple[str, Family], ...] = (
    ("openrouter.ai", Family("openrouter", _openrouter, echo="details", routes=True)),
    ("openai.com", Family("openai", _openai, limit_field="max_completion_tokens")),
    ("openai.azure.com", Family("openai", _openai, limit_field="max_completion_tokens")),
    ("deepseek.com", Family("deepseek", _deepseek, echo="calls")),
    ("anthropic.com", Family("anthropic", _anthropic)),
    ("moonshot.ai", Family("moonshot", _thinking_type, echo="content")),
    ("moonshot.cn", Family("moonshot", _thinking_type, echo="content")),
    ("z.ai", Family("z.ai", _thinking_type, echo="content")),
    ("bigmodel.cn", Family("z.ai", _thinking_type, echo="content")),
    ("aliyuncs.com", Family("dashscope", _dashscope, echo="content")),
    ("groq.com", Family("effort", _effort_only)),
    ("x.ai", Family("effort", _effort_only)),
    ("googleapis.com", Family("effort", _effort_only)),
    ("mistral.ai", Family("effort", _effort_only)),
    ("fireworks.ai", Family("effort", _effort_only, echo="content")),
    ("together.xyz", Family("effort", _effort_only, echo="content")),
    ("together.ai", Family("effort", _effort_only, echo="content")),
)


def public_url(url: str) -> str:
    """An address without what may be secret in it (user, password, query): fit for records and messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(no address)"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def family_of(base_url: str) -> Family:
    """The family of the endpoint at `base_url`, by its host."""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    for domain, family in _HOSTS:
        if host == domain or host.endswith("." + domain):
            return family
    return OWN_SERVER
