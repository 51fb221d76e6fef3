"""Which model answers: options first, then the environment, then a TOML file, then the embedded model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

from taskmill.errors import ConfigurationError
from taskmill.models.choose import is_local
from taskmill.models.families import public_url


class Endpoint(Struct, frozen=True):
    """A model's name, where it is and the key to it; all `None` means the embedded model."""

    model: str | None
    base_url: str | None
    api_key: str | None
    source: str


class Place(NamedTuple):
    """One place that may name an address and its key. `has_key` is true also of a variable that is not set."""

    url: str | None
    key: str | None
    has_key: bool


def choose_endpoint(
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    file: Mapping[str, object],
    environment: Mapping[str, str] = os.environ,
) -> Endpoint:
    """Settle model and address from the first place that names them, and the key from where the address is from.

    The file may give `model`, `base_url`, and `api_key` or `api_key_env` (the name of a variable). Nothing of
    it is written anywhere. Raises `ConfigurationError` for an address that somebody gave without a model.
    """

    def from_file(name: str) -> str | None:
        value = file.get(name)
        return None if value is None else str(value)

    def place(url: str | None, key: str | None) -> Place:
        return Place(url, key, bool(key))

    variable = from_file("api_key_env")
    file_key = from_file("api_key") or (environment.get(variable) if variable else None)
    options = place(base_url, api_key)
    own = place(environment.get("MODEL_BASE_URL"), environment.get("MODEL_API_KEY"))
    openai = place(environment.get("OPENAI_BASE_URL"), environment.get("OPENAI_API_KEY"))
    filed = Place(from_file("base_url"), file_key, bool(file_key or variable))

    chosen = model or environment.get("MODEL_ID") or from_file("model")
    if chosen == "embedded":
        return Endpoint(None, None, None, "the embedded model")
    if chosen is not None and base_url is None and is_local(chosen, None):
        return Endpoint(chosen, None, None, f"the local model {chosen.removeprefix('local:')!r}")
    source = next((place for place in (options, own, openai, filed) if place.url), None)
    if chosen is None:
        given = next((place.url for place in (options, own, filed) if place.url), None)
        if given is not None:
            raise ConfigurationError(
                f"base_url={public_url(given)!r} without a model: set --model, MODEL_ID or 'model' in the file "
                "to a name that endpoint serves, or --model embedded"
            )
        unused = "; OPENAI_BASE_URL is not used" if openai.url else ""
        return Endpoint(None, None, None, f"no model was named, so the embedded one answers{unused}")
    if source is None or source.url is None:
        return Endpoint(chosen, None, None, chosen)
    key = _key_for(source.url, source, options, own, openai, filed)
    return Endpoint(chosen, source.url, key, f"{chosen} at {public_url(source.url)}")


def _key_for(url: str, source: Place, options: Place, own: Place, openai: Place, filed: Place) -> str | None:
    """The key that goes to `url`, which `source` names.

    `--api-key` is meant for whatever address there is, and `MODEL_API_KEY` for `--base-url`. Any other key belongs
    to the address beside it, and to another only where there is none beside it. OpenAI's comes last, except for
    OpenAI: it stands in many environments for other programs.
    """
    places = [options, source]
    if source is options or not own.url:
        places.append(own)
    if _is_openai(url):
        places.append(openai)
    if not filed.url:
        places.append(filed)
    if not openai.url and not source.has_key:
        places.append(openai)
    return next((place.key for place in places if place.key), None)


def _is_openai(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host == "openai.com" or host.endswith(".openai.com")
