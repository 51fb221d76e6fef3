"""Secrets taken out of what others said, however they spelt them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

REMOVED = "[key removed]"


def redactor(secrets: Iterable[str]) -> Callable[[str], str]:
    """A function of a text that gives it without any of `secrets`; empty ones are none.

    A secret is found as it is, percent-encoded as in an address (whole or in part), and escaped as in JSON. Apply
    it before a text is cut, or half a secret may stand at the end.
    """
    # The longest first: where one is the beginning of another, nothing of that one is left.
    known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
    if not known:
        return str
    spellings = re.compile("|".join("".join(map(_spellings, secret)) for secret in known))

    def redact(text: str) -> str:
        return spellings.sub(REMOVED, text)

    return redact


def _spellings(character: str) -> str:
    """A pattern for one character of a secret."""
    plain = r"[ +]" if character == " " else re.escape(character)
    if not character.isalnum():
        plain = rf"\\?{plain}"
    octets = character.encode("utf-8", "surrogatepass")
    units = character.encode("utf-16-be", "surrogatepass").hex(" ", 2).split()
    in_address = "".join(f"%{octet:02x}" for octet in octets)
    in_json = "".join(rf"\\u{unit}" for unit in units)
    return f"(?:(?i:{in_address}|{in_json})|{plain})"
