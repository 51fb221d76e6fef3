"""The files a command is given: settings as TOML, messages as JSON."""

from __future__ import annotations

import json
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from taskmill.errors import ConfigurationError

ENDPOINT_FIELDS = ("model", "base_url", "api_key", "api_key_env")
TABLES = ("prices", "mcp", "distributions")
"""Tables of tables: prices by model, MCP servers and distributions by name."""


def read_config(path: Path | None) -> dict[str, Any]:
    """The settings of a TOML file; no file, no settings.

    Raises:
        ConfigurationError: for what is no TOML, naming the place, and for a name that means nothing, with the
            nearest one that does.
    """
    if path is None:
        return {}
    text = _text_of("--config", path)
    try:
        settings = tomllib.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"--config: {str(path)!r} is not TOML: {problem}") from None
    except RecursionError:
        raise ConfigurationError(f"--config: {str(path)!r} is nested too deep to be read") from None
    _check_names(path, settings)
    for name in ("dataset_file", *ENDPOINT_FIELDS):
        if not isinstance(settings.get(name, ""), str):
            raise ConfigurationError(f"--config: {str(path)!r}: write {name} as a text, in quotes")
    for name in TABLES:
        tables = settings.get(name, {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise ConfigurationError(f"--config: {str(path)!r}: write {name} as tables, [{name}.NAME]")
    return settings


def _check_names(path: Path, settings: dict[str, Any]) -> None:
    from taskmill.batch.settings import BatchSettings

    known = [*BatchSettings.model_fields, *ENDPOINT_FIELDS, *TABLES]
    for name in settings.keys() - set(known):
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"--config: {str(path)!r}: unknown setting {name!r}{hint}")


def read_prefill(path: Path | None) -> list[Any] | None:
    """The messages of a JSON file. Raises `ConfigurationError` for what is no list."""
    if path is None:
        return None
    text = _text_of("--prefill", path)
    try:
        messages = json.loads(text)
    except ValueError as problem:
        raise ConfigurationError(f"--prefill: {str(path)!r} can't be read as JSON: {problem}") from None
    except RecursionError:
        raise ConfigurationError(f"--prefill: {str(path)!r} is nested too deep to be read") from None
    if not isinstance(messages, list):
        raise ConfigurationError(f"--prefill: {str(path)!r} must hold a list of messages")
    return messages


def _text_of(option: str, path: Path) -> str:
    """The text of a regular file. Raises `ConfigurationError`, naming the option, where there is none."""
    from taskmill.store.files import read_whole

    try:
        return read_whole(path).decode("utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{option}: no file at {str(path)!r}") from None
    except OSError as problem:
        raise ConfigurationError(f"{option}: {str(path)!r} can't be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise ConfigurationError(f"{option}: {str(path)!r} is not UTF-8 (byte {problem.start})") from None
