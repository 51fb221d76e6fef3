"""Which address is asked, and which key goes there."""

from __future__ import annotations

import pytest

from taskmill.cli.endpoint import choose_endpoint
from taskmill.errors import ConfigurationError

A, B, C, OPENAI = (
    "https://a.example/v1",
    "https://b.example/v1",
    "https://c.example/v1",
    "https://api.openai.com/v1",
)


@pytest.mark.parametrize(
    ("options", "environment", "file", "expected"),
    [
        # Each level is whole.
        ((A, "K-o"), {"MODEL_BASE_URL": B, "MODEL_API_KEY": "K-m"}, {}, (A, "K-o")),
        (
            (None, None),
            {"MODEL_BASE_URL": B, "MODEL_API_KEY": "K-m", "OPENAI_API_KEY": "K-oa"},
            {},
            (B, "K-m"),
        ),
        (
            (None, None),
            {"OPENAI_BASE_URL": B, "OPENAI_API_KEY": "K-oa"},
            {"base_url": C, "api_key": "K-f"},
            (B, "K-oa"),
        ),
        ((None, None), {"OPENAI_API_KEY": "K-oa"}, {"base_url": C, "api_key": "K-f"}, (C, "K-f")),
        (
            (None, None),
            {"OPENAI_API_KEY": "K-oa", "LAB": "K-lab"},
            {"base_url": C, "api_key_env": "LAB"},
            (C, "K-lab"),
        ),
        # A key does not go to another level's address where it has one of its own.
        ((A, None), {}, {"base_url": C, "api_key": "K-f"}, (A, None)),
        ((A, None), {"OPENAI_BASE_URL": B, "OPENAI_API_KEY": "K-oa"}, {}, (A, None)),
        ((None, None), {"MODEL_BASE_URL": A}, {"base_url": C, "api_key": "K-f"}, (A, None)),
        ((None, None), {"OPENAI_API_KEY": "K-oa"}, {"base_url": C, "api_key_env": "UNSET"}, (C, None)),
        # A key without an address goes to the one there is.
        ((None, "K-o"), {"MODEL_BASE_URL": A, "MODEL_API_KEY": "K-m"}, {}, (A, "K-o")),
        ((A, None), {"MODEL_API_KEY": "K-m"}, {}, (A, "K-m")),
        ((A, None), {"MODEL_BASE_URL": B, "MODEL_API_KEY": "K-m"}, {}, (A, "K-m")),
        ((None, None), {"MODEL_API_KEY": "K-m"}, {"base_url": C}, (C, "K-m")),
        ((None, None), {"MODEL_API_KEY": "K-m"}, {"base_url": C, "api_key": "K-f"}, (C, "K-f")),
        ((A, None), {}, {"api_key": "K-f"}, (A, "K-f")),
        ((A, None), {"OPENAI_API_KEY": "K-oa"}, {"api_key": "K-f"}, (A, "K-f")),
        ((A, None), {"OPENAI_API_KEY": "K-oa"}, {}, (A, "K-oa")),
        # OpenAI's goes to OpenAI.
        (
            (OPENAI, None),
            {"OPENAI_BASE_URL": B, "OPENAI_API_KEY": "K-oa"},
            {"api_key": "K-f"},
            (OPENAI, "K-oa"),
        ),
        (
            ("https://api.openai.com.example/v1", None),
            {"OPENAI_BASE_URL": B, "OPENAI_API_KEY": "K-oa"},
            {},
            ("https://api.openai.com.example/v1", None),
        ),
    ],
)
def test_a_key_goes_to_the_address_beside_it(
    options: tuple[str | None, str | None],
    environment: dict[str, str],
    file: dict[str, object],
    expected: tuple[str, str | None],
) -> None:
    chosen = choose_endpoint("m", *options, file, environment)
    assert (chosen.base_url, chosen.api_key) == expected


def test_the_natural_three_variables_are_enough() -> None:
    environment = {"MODEL_ID": "m", "MODEL_BASE_URL": A, "MODEL_API_KEY": "K"}
    chosen = choose_endpoint(None, None, None, {}, environment)
    assert (chosen.model, chosen.base_url, chosen.api_key) == ("m", A, "K")
    assert chosen.source == f"m at {A}"


@pytest.mark.parametrize(
    ("option", "environment", "file"),
    [(A, {}, {}), (None, {"MODEL_BASE_URL": A}, {}), (None, {"OPENAI_BASE_URL": B}, {"base_url": A})],
)
def test_an_address_that_was_given_needs_a_model(
    option: str | None, environment: dict[str, str], file: dict[str, object]
) -> None:
    with pytest.raises(ConfigurationError, match=r"base_url='https://a.example/v1' without a model"):
        choose_endpoint(None, option, None, file, environment)


def test_an_address_of_other_programs_asks_for_nothing_and_it_is_said() -> None:
    environment = {"OPENAI_BASE_URL": A, "OPENAI_API_KEY": "K"}
    chosen = choose_endpoint(None, None, None, {}, environment)
    assert (chosen.model, chosen.base_url, chosen.api_key) == (None, None, None)
    assert "embedded" in chosen.source
    assert "OPENAI_BASE_URL is not used" in chosen.source
