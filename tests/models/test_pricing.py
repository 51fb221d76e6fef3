from __future__ import annotations

import logging
from typing import Any

import genai_prices
import pytest

from taskmill.errors import ConfigurationError
from taskmill.models.pricing import price_list
from taskmill.records import Usage

TABLE = {"m": {"input": 1.0, "output": 10.0, "cached": 0.1}, "n": {"input": 2.0, "output": 4.0}}
OPENAI = "https://api.openai.com/v1"


def test_cached_tokens_are_billed_once_and_at_their_own_price() -> None:
    price = price_list(base_url="http://localhost/v1", table=TABLE)
    assert price("m", Usage(1000, 0, 900)) == pytest.approx((100 * 1.0 + 900 * 0.1) / 1e6)
    assert price("m", Usage(1000, 50, 0, 40)) == pytest.approx((1000 * 1.0 + 50 * 10.0) / 1e6)


def test_cached_tokens_cost_like_others_where_the_table_says_nothing_of_them() -> None:
    price = price_list(base_url="http://localhost/v1", table=TABLE)
    assert price("n", Usage(1000, 0, 900)) == pytest.approx(1000 * 2.0 / 1e6)


def test_an_unknown_price_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    price = price_list(base_url="http://localhost:8000/v1", table=TABLE)
    with caplog.at_level(logging.WARNING):
        assert [price("other", Usage(10, 10)) for _ in range(3)] == [None] * 3
        assert (
            price("gpt-4o", Usage(10, 10)) is None
        )  # A server of one's own does not bill like its namesake.
    assert len(caplog.records) == 2
    assert "'other'" in caplog.text


@pytest.mark.parametrize(
    ("base_url", "model"),
    [
        (OPENAI, "gpt-4o"),
        (OPENAI, "gpt-5-mini"),
        ("https://api.deepseek.com", "deepseek-chat"),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "gemini-2.5-pro"),
        ("https://openrouter.ai/api/v1", "anthropic/claude-sonnet-4"),
    ],
)
@pytest.mark.parametrize(
    "usage", [Usage(1000, 100, 900), Usage(300_000, 2_000, 10_000), Usage(200_000, 1), Usage()]
)
def test_listed_prices_come_out_as_the_list_itself_works_them_out(
    base_url: str, model: str, usage: Usage
) -> None:
    listed = genai_prices.calc_price(
        genai_prices.Usage(
            input_tokens=usage.input_tokens,
            cache_read_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        ),
        model,
        provider_api_url=base_url,
    )
    assert price_list(base_url=base_url)(model, usage) == pytest.approx(float(listed.total_price))


def test_the_user_s_table_goes_before_the_list() -> None:
    price = price_list(base_url=OPENAI, table={"gpt-4o": {"input": 1000, "output": 0}})
    assert price("gpt-4o", Usage(1_000_000)) == 1000


@pytest.mark.parametrize(
    "prices",
    [
        {},
        {"input": 1},
        {"input": 1, "output": 2, "cache": 3},
        {"input": -1, "output": 2},
        {"input": "1", "output": 2},
        {"input": 1, "output": float("nan")},
    ],
)
def test_a_table_that_can_t_be_meant_is_refused(prices: Any) -> None:
    with pytest.raises(ConfigurationError, match="'m'"):
        price_list(base_url=OPENAI, table={"m": prices})
