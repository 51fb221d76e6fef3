"""What a call cost: tokens times price, cached tokens billed once and at their own price.

Prices come from the user's table where it names the model, else from `genai-prices`, a list that ships with
its package and needs no network. Nothing is guessed: a host that list does not know has no price.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from taskmill.errors import ConfigurationError
from taskmill.records import Usage

_log = logging.getLogger(__name__)

Table = Mapping[str, Mapping[str, float]]
"""Model name to `{"input": …, "output": …, "cached": …}`, US dollars for a million tokens; `cached` defaults to
`input`."""

_FIELDS = frozenset({"input", "output", "cached"})
_MOST = 1e9
_REFRESH_SECONDS = 600
"""Some listed prices depend on the hour, so the list is asked again this often."""


class Rate(Struct, frozen=True):
    """US dollars for a million tokens; `tiers` are (input tokens above which, price), lowest first, for all tokens."""

    base: float
    tiers: tuple[tuple[int, float], ...] = ()

    def at(self, input_tokens: int) -> float:
        """The price that holds for a call with so many input tokens."""
        price = self.base
        for start, above in self.tiers:
            if input_tokens > start:
                price = above
        return price


class Tariff(Struct, frozen=True):
    """The prices of one model."""

    input: Rate
    output: Rate
    cached: Rate
    per_request: float = 0.0

    def cost(self, usage: Usage) -> float:
        """US dollars for `usage`."""
        sent = usage.input_tokens
        cached = min(usage.cached_tokens, sent)
        tokens = (
            (sent - cached) * self.input.at(sent)
            + cached * self.cached.at(sent)
            + usage.output_tokens * self.output.at(sent)
        )
        return tokens / 1_000_000 + self.per_request


def price_list(
    *,
    base_url: str,
    table: Table | None = None,
    clock: Callable[[], float] = time.time,
) -> Callable[[str, Usage], float | None]:
    """A function of model and usage that gives US dollars, or `None`, with one warning, where no price is known.

    Raises `ConfigurationError` for a table that can't be meant.
    """
    own = {model: _own_tariff(model, prices) for model, prices in (table or {}).items()}
    known: dict[str, tuple[int, Tariff | None]] = {}
    warned: set[str] = set()

    def price(model: str, usage: Usage) -> float | None:
        tariff = own.get(model)
        if tariff is None:
            hour = int(clock()) // _REFRESH_SECONDS
            since, tariff = known.get(model, (-1, None))
            if since != hour:
                tariff = _listed_tariff(model, base_url)
                known[model] = (hour, tariff)
        if tariff is None:
            if model not in warned:
                warned.add(model)
                _log.warning(
                    "no price known for model %r at this endpoint: its calls are counted without cost", model
                )
            return None
        return tariff.cost(usage)

    return price


def _own_tariff(model: str, prices: Mapping[str, float]) -> Tariff:
    if not {"input", "output"} <= prices.keys() <= _FIELDS:
        raise ConfigurationError(
            f"prices of model {model!r} have the fields {sorted(prices)!r}: "
            "give input, output and, if it differs, cached"
        )
    for field, value in prices.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
            raise ConfigurationError(
                f"price {field}={value!r} of model {model!r} can't be: give US dollars for a million tokens"
            )
    rates = {field: Rate(float(value)) for field, value in prices.items()}
    return Tariff(rates["input"], rates["output"], rates.get("cached", rates["input"]))


def _listed_tariff(model: str, base_url: str) -> Tariff | None:
    import genai_prices

    # The list works out a price in a third of a millisecond, more than the rest of a call takes: it is asked
    # for the model's prices once, and multiplying is done here.
    try:
        listed = genai_prices.calc_price(genai_prices.Usage(), model, provider_api_url=base_url).model_price
    except (LookupError, ValueError):
        return None
    sent = _rate(listed.input_mtok)
    received = _rate(listed.output_mtok)
    if sent is None and received is None:
        return None
    sent = sent or Rate(0.0)
    per_request = float(getattr(listed, "requests_kcount", None) or 0) / 1000
    return Tariff(sent, received or Rate(0.0), _rate(listed.cache_read_mtok) or sent, per_request)


def _rate(listed: Any) -> Rate | None:
    if listed is None:
        return None
    tiers = getattr(listed, "tiers", None)
    if tiers is None:
        return Rate(float(listed))
    return Rate(float(listed.base), tuple((tier.start, float(tier.price)) for tier in tiers))
