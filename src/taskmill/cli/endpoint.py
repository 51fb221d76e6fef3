"""Which model answers: options first, then the environment, then a TOML file, then the embedded model."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from taskmill.models.families import public_url


class Endpoint(Struct, frozen=True):
    """A model's name, where it is and the key to it; all `None` means the embedded model."""

    model: str | None
    base_url: str | None
    api_key: str | None
    source: str


def choose_endpoint(
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    file: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
) -> Endpoint:
    """Settle each of the three from the first place that names it.

    The file may give `model`, `base_url`, and `api_key` or `api_key_env` (the name of a variable). Nothing of
    it is written anywhere.
    """

    def from_file(name: str) -> str | None:
        value = file.get(name)
        return None if value is None else str(value)

    chosen = model or environment.get("MODEL_ID") or from_file("model")
    if chosen == "embedded":
        return Endpoint(None, None, None, "the embedded model")
    url = (
        base_url
        or environment.get("MODEL_BASE_URL")
        or environment.get("OPENAI_BASE_URL")
        or from_file("base_url")
    )
    key = (
        api_key
        or environment.get("MODEL_API_KEY")
        or environment.get("OPENAI_API_KEY")
        or from_file("api_key")
    )
    if key is None and (variable := from_file("api_key_env")):
        key = environment.get(variable)
    if chosen is None and base_url is None and from_file("base_url") is None:
        return Endpoint(None, None, None, "no model was named, so the embedded one answers")
    return Endpoint(chosen, url, key, f"{chosen} at {public_url(url or '')}")
