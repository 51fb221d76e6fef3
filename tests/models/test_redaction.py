"""A secret does not come through, however it is spelt."""

from __future__ import annotations

import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmill.models.redaction import REMOVED, redactor

SECRETS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@given(SECRETS)
def test_no_spelling_of_a_secret_comes_through(secret: str) -> None:
    redact = redactor([secret])
    spellings = (
        secret,
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        "".join(f"%{octet:02x}" for octet in secret.encode()),
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1].replace("/", "\\/"),
    )
    for spelling in spellings:
        assert redact(spelling) == REMOVED


@pytest.mark.parametrize("spelling", ["a\\u002Bb", "a\\u002bb", "a%2Bb", "%61+b"])
def test_escapes_of_json_and_of_addresses_are_read_in_either_case(spelling: str) -> None:
    assert redactor(["a+b"])(f"key {spelling}!") == f"key {REMOVED}!"


def test_of_a_secret_that_begins_like_another_nothing_is_left() -> None:
    assert redactor(["abc", "abcdef"])("abcdef abc abd") == f"{REMOVED} {REMOVED} abd"


@given(st.text())
def test_without_secrets_a_text_stays_as_it_is(text: str) -> None:
    assert redactor(["", ""])(text) == text
