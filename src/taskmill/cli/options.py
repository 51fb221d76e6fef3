"""Options that reach any field by a dotted name, from the command line and from TOML files.

`parse` takes the words of a command apart, `layered` lays files and options over each other, and `resolve` makes of
them a taskset, settings and an endpoint. A command says in a `Grammar` what it takes beside the fields of its settings.

    parsed = parse(words, GRAMMAR)              # taskmill eval gsm8k -n 5 --sampling.temperature 0 @ run.toml
    resolved = resolve(parsed, GRAMMAR)         # resolved.taskset, .settings, .endpoint, .options
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from taskmill.cli.endpoint import Endpoint, choose_endpoint
from taskmill.errors import ConfigurationError
from taskmill.models.families import public_url
from taskmill.tasks.explain import names_at
from taskmill.tasks.registry import find_taskset
from taskmill.tasks.taskset import Taskset

ENDPOINT_FIELDS = ("model", "base_url", "api_key", "api_key_env")
TEXTS = frozenset({*ENDPOINT_FIELDS, "output_dir", "run_name", "resume"})
"""Options whose value is a text, whatever it looks like."""

TABLES = ("taskset", "task", "prices")
"""Names that hold names of their own, beside those settings that do."""

MADE_BY = frozenset({"command", "replay_of", "scoring"})
"""What the configuration of a run says of how it was made; settings for another run are without it."""

SHORT = {"m": "model", "n": "num_tasks", "r": "num_rollouts", "c": "concurrency", "v": "verbose"}


class Grammar(NamedTuple):
    """What a command takes: the fields of `settings`, the `options` of its own, of which `flags` have no value.

    `command` is its name, for messages. A field with a short letter has it from `short`.
    """

    command: str
    settings: type[BaseModel]
    options: tuple[str, ...] = ("output_dir", "run_name", "resume")
    flags: tuple[str, ...] = ("dry_run", "json", "verbose")
    short: Mapping[str, str] = SHORT

    @property
    def names(self) -> list[str]:
        """Every name that may stand first in an option, in the spelling of Python."""
        return [*self.settings.model_fields, *ENDPOINT_FIELDS, *TABLES, *self.options, *self.flags]

    @property
    def bare(self) -> set[str]:
        """Options that mean true and take no value with them, unless it is joined by `=`."""
        fields = self.settings.model_fields.items()
        return {*self.flags, *(name for name, field in fields if field.annotation is bool)}


class Parsed(NamedTuple):
    """The words of a command, taken apart.

    `given` nests what dotted names reach: `--sampling.top-p 1` is `{"sampling": {"top_p": 1}}`. `texts` has each value
    as it was typed, by its path, for fields that want a text although it looks like a number.
    """

    positional: tuple[str, ...]
    given: dict[str, Any]
    files: tuple[Path, ...] = ()
    texts: Mapping[tuple[str, ...], str] = {}

    def has(self, name: str) -> bool:
        """Whether a flag was given."""
        return self.given.get(name) is True


class Resolved(NamedTuple):
    """What a command works with. `settings` are the fields that were named, not yet validated with the others.

    `reference` is by which name the taskset is found again; `options` are those of the command's own that were given
    (`output_dir`, `dry_run`, …), `prices` the table of a file.
    """

    taskset: Taskset[Any]
    reference: str
    settings: dict[str, Any]
    endpoint: Endpoint
    options: dict[str, Any]
    prices: dict[str, Any] | None = None


def parse(words: Sequence[str], grammar: Grammar) -> Parsed:
    """Take the words of a command apart. Reads no file.

    `--name value`, `--name=value` and `-n value` give a value, read as TOML where it is a number, a truth value, a
    quoted text, a list or a table, and else as the text it is; `--name` before another option, or at the end, is true.
    `@ file.toml` names a file. Of an option that is given twice the later counts.

    Raises `ConfigurationError` for an option that does not exist, with the nearest one that does.
    """
    positional: list[str] = []
    given: dict[str, Any] = {}
    files: list[Path] = []
    texts: dict[tuple[str, ...], str] = {}
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if word == "@" or (word.startswith("@") and len(word) > 1):
            name = word[1:] or (waiting.pop() if waiting else "")
            if not name:
                raise ConfigurationError("'@' is followed by a TOML file: @ settings.toml")
            files.append(Path(name))
            continue
        option, value = _option(word, grammar)
        if option is None:
            positional.append(word)
            continue
        path = _path(option, grammar)
        if value is None:
            value = _value_after(option, path, waiting, grammar)
        if value == "" and len(path) == 1 and path[0] in TEXTS - {"api_key"}:
            raise ConfigurationError(f"--{option} needs a value, and it is empty")
        _put(given, path, True if value is None else _scalar(value, path), option)
        for stale in [known for known in texts if known[: len(path)] == path]:
            del texts[stale]
        if value is not None:
            texts[path] = value
    return Parsed(tuple(positional), given, tuple(files), texts)


def _option(word: str, grammar: Grammar) -> tuple[str | None, str | None]:
    """The name of the option on this word, as typed, and the value that is joined to it."""
    if word.startswith("--") and len(word) > 2:
        name, equals, value = word[2:].partition("=")
        return name, value if equals else None
    if not word.startswith("-") or len(word) == 1 or _is_number(word):
        return None, None
    if word[1] not in grammar.short:
        known = ", ".join(f"-{letter} (--{name.replace('_', '-')})" for letter, name in grammar.short.items())
        raise ConfigurationError(f"there is no option {word!r}; there are {known}")
    return grammar.short[word[1]], word[2:].removeprefix("=") or None


def _path(option: str, grammar: Grammar) -> tuple[str, ...]:
    path = tuple(part.replace("-", "_") for part in option.split("."))
    if path[0] == "task":
        path = ("taskset", *path)
    if "" in path:
        raise ConfigurationError(f"--{option} is no name of a field")
    if path[0] not in grammar.names:
        raise ConfigurationError(f"unknown option --{option}{_hint(path, grammar)}")
    return path


def _hint(path: Sequence[str], grammar: Grammar) -> str:
    inner = [
        f"{name}.{field}"
        for name in grammar.settings.model_fields
        for field in names_at(grammar.settings, [name])
    ]
    wanted = ".".join(path)
    alike = [name for name in inner if name.rpartition(".")[2] == path[-1]]
    near = get_close_matches(wanted, alike, n=1, cutoff=0) or get_close_matches(
        wanted, [*grammar.names, *inner], n=1
    )
    if not near:
        return f"; see 'taskmill {grammar.command} --help'. A taskset's own fields are --taskset.NAME"
    return f"; did you mean --{near[0].replace('_', '-')}?"


def _value_after(option: str, path: tuple[str, ...], waiting: list[str], grammar: Grammar) -> str | None:
    """The word that is this option's value, taken off; `None` where it has none and so is true."""
    following = waiting[-1] if waiting else None
    stands_alone = (
        following is None or following == "@" or (following.startswith("-") and not _is_number(following))
    )
    if len(path) == 1:
        if path[0] in grammar.bare:
            return waiting.pop() if following in ("true", "false") else None
        if stands_alone and path[0] not in TABLES:
            raise ConfigurationError(f"--{option} needs a value")
    return None if stands_alone else waiting.pop()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _scalar(text: str, path: tuple[str, ...]) -> Any:
    if path[0] in TEXTS:
        return text
    try:
        value = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    found = value.get("value")
    return found if len(value) == 1 and isinstance(found, bool | int | float | str | list | dict) else text


def _put(into: dict[str, Any], path: Sequence[str], value: Any, option: str) -> None:
    for part in path[:-1]:
        into = into.setdefault(part, {})
        if not isinstance(into, dict):
            raise ConfigurationError(f"--{option}: {part!r} was given a value of its own before")
    into[path[-1]] = value


# -- files and layers -----------------------------------------------------------------------------------------


def read_file(path: Path, grammar: Grammar) -> dict[str, Any]:
    """The settings of a TOML file, such as the `config.toml` of a run. Raises `ConfigurationError` naming the place."""
    from taskmill.store.files import read_whole

    try:
        values = tomllib.loads(read_whole(path).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"there is no settings file {str(path)!r}") from None
    except OSError as problem:
        raise ConfigurationError(f"{_file(path)} can't be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise ConfigurationError(f"{_file(path)} is not UTF-8 (byte {problem.start})") from None
    except ValueError as problem:
        raise ConfigurationError(f"{_file(path)} is not TOML: {problem}") from None
    except RecursionError:
        raise ConfigurationError(f"{_file(path)} is nested too deep to be read") from None
    for name in MADE_BY & values.keys():
        del values[name]
    for name in values:
        if name not in grammar.names:
            near = get_close_matches(name, grammar.names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(f"{_file(path)}: unknown setting {name!r}{hint}")
    for name in TEXTS & values.keys():
        if not isinstance(values[name], str):
            raise ConfigurationError(f"{_file(path)}: write {name} as a text, in quotes")
    for name in TABLES:
        if not isinstance(values.get(name, {}), dict):
            raise ConfigurationError(f"{_file(path)}: write {name} as a table, [{name}]")
    if "task" in values:
        values["taskset"] = overlaid(values.get("taskset", {}), {"task": values.pop("task")})
    return values


def _file(path: Path) -> str:
    return f"the settings file {str(path)!r}"


def overlaid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, those of `over` before those of `under`. Dashes and underscores in names are alike."""
    values = dict(under)
    spelled = {name.replace("-", "_"): name for name in values}
    for name, value in over.items():
        name = spelled.get(name.replace("-", "_"), name)
        below = values.get(name)
        nested = isinstance(below, Mapping) and isinstance(value, Mapping)
        values[name] = overlaid(below, value) if nested else value  # type: ignore[arg-type]
    return values


def layered(parsed: Parsed, grammar: Grammar, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All settings of a command: `base` at the bottom, then its files in their order, then its options."""
    values: dict[str, Any] = dict(base or {})
    for path in parsed.files:
        values = overlaid(values, read_file(path, grammar))
    return overlaid(values, parsed.given)


def resolve(
    parsed: Parsed,
    grammar: Grammar,
    *,
    stored: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Resolved:
    """Find the taskset, and settle its configuration, the settings and the endpoint.

    `stored` is the configuration of a run to go on with: it stands under everything else, and its model and address
    stand above the environment.

    Raises:
        ConfigurationError: for what can't be meant, naming the field.
        TasksetError: there is no such taskset, or a package that it needs is missing.
    """
    if len(parsed.positional) > 1:
        raise ConfigurationError(
            f"one taskset is needed, and there are {', '.join(map(repr, parsed.positional))}; "
            "options start with '--', and a value that starts with '-' is joined to its option by '='"
        )
    values = layered(parsed, grammar, stored)
    for name in MADE_BY:
        values.pop(name, None)
    taskset, reference = _taskset(parsed, values.pop("taskset", {}), stored, grammar)
    endpoint = _endpoint(parsed, grammar, stored, environment)
    prices: dict[str, Any] | None = values.pop("prices", None)
    for name in ENDPOINT_FIELDS:
        values.pop(name, None)
    options = {name: values.pop(name) for name in (*grammar.options, *grammar.flags) if name in values}
    for name in grammar.flags:
        if not isinstance(options.get(name, True), bool):
            raise ConfigurationError(f"{name}={options[name]!r} is true or false")
    settings = as_typed(grammar.settings, values, parsed.texts)
    return Resolved(taskset, reference, settings, endpoint, options, prices)


def _taskset(
    parsed: Parsed, table: Any, stored: Mapping[str, Any] | None, grammar: Grammar
) -> tuple[Taskset[Any], str]:
    if not isinstance(table, dict):
        raise ConfigurationError("name a taskset by its own word, and its fields as --taskset.NAME")
    fields = dict(table)
    named = fields.pop("name", None)
    reference = parsed.positional[0] if parsed.positional else named
    if not isinstance(reference, str):
        raise ConfigurationError(
            f"name a taskset: taskmill {grammar.command} TASKSET (see 'taskmill tasksets' for those there are)"
        )
    if "resume" in grammar.options and (Path(reference) / "run.json").is_file():
        raise ConfigurationError(
            f"{reference!r} is the directory of a run, not a taskset; to go on with it: "
            f"taskmill {grammar.command} --resume {shlex.quote(reference)}"
        )
    kind = find_taskset(reference)
    before = None if stored is None else stored["taskset"]["name"]
    if before is not None and before != reference and find_taskset(before) is kind:
        reference = before
    own = {path[1:]: text for path, text in parsed.texts.items() if path[0] == "taskset"}
    return kind(as_typed(kind.Config, fields, own)), _lasting(reference)


def _lasting(reference: str) -> str:
    """The name of a taskset in a file, so that it is found from any folder."""
    file, colon, wanted = (reference, "", "") if reference.endswith(".py") else reference.rpartition(":")
    return f"{Path(file).resolve()}{colon}{wanted}" if file.endswith(".py") else reference


def _endpoint(
    parsed: Parsed, grammar: Grammar, stored: Mapping[str, Any] | None, environment: Mapping[str, str]
) -> Endpoint:
    file = layered(parsed._replace(given={}), grammar)
    model, url, key = (parsed.given.get(name) for name in ("model", "base_url", "api_key"))
    if "api_key_env" in parsed.given:
        file["api_key_env"] = parsed.given["api_key_env"]
    if stored is None:
        return choose_endpoint(model, url, key, file, environment)
    model = model or file.get("model") or str(stored.get("model"))
    url = url or file.get("base_url")
    if url is None and (kept := stored.get("base_url")) is not None:
        # A stored address has lost what is secret in it; where the environment has the whole of it, that is taken.
        places = (environment.get("MODEL_BASE_URL"), environment.get("OPENAI_BASE_URL"))
        url = next((place for place in places if place and public_url(place) == kept), str(kept))
    if url is None:
        return Endpoint(model, None, None, model)
    return choose_endpoint(model, url, key, file, environment)


def as_typed(
    model: type[BaseModel], values: Mapping[str, Any], texts: Mapping[tuple[str, ...], str]
) -> dict[str, Any]:
    """`values` in which a field of `model` that wants a text has what was typed, though it looks like a number."""
    fitting = overlaid({}, values)
    try:
        model.model_validate(fitting)
    except ValidationError as problem:
        for error in problem.errors(include_url=False, include_context=False):
            if error["type"] == "string_type":
                for path in _heads(tuple(map(str, error["loc"]))):
                    if path in texts:
                        fitting = overlaid(fitting, _nested(path, texts[path]))
                        break
    return fitting


def _heads(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (path[:end] for end in range(len(path), 0, -1))


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return dict(value)
