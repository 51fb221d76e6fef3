"""A lineup in TOML: participants, what they are told, the rules, a file of data, and an analyzer by its import path."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from taskmill.conversations.analyzers import find_analyzer
from taskmill.conversations.conversation import Conversation
from taskmill.errors import ConfigurationError, StoreError
from taskmill.programs.conversation.context import ContextPolicy, DropOldest, Refuse, SlidingWindow, Summarise
from taskmill.programs.conversation.lineup import MODERATOR
from taskmill.programs.conversation.participant import Participant, Person, Visibility
from taskmill.programs.conversation.recipes import imported
from taskmill.programs.conversation.stop import StopCondition, TextPattern, TokenBudget, When, all_of
from taskmill.programs.conversation.templates import Template, dataset_field
from taskmill.store.files import read_whole
from taskmill.store.jsonl import lines, strict_loads
from taskmill.tasks.explain import explain


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FieldPart(_Strict):
    """A field of the row: `{ field = "question" }`."""

    field: str


class FunctionPart(_Strict):
    """A function of the row: `{ function = "module:name" }`."""

    function: str


Part = str | FieldPart | FunctionPart
TextSetting = Part | list[Part]


class ParticipantTable(_Strict):
    """One of `[[participants]]`. One of `model`, `answers`, `function` and `person` says what answers for it."""

    name: str
    model: str | None = None
    base_url: str | None = None
    api_key_env: str = "MODEL_API_KEY"
    answers: list[str] | None = None
    function: str | None = None
    person: bool = False
    system_prompt: TextSetting | None = None
    context: TextSetting | None = None
    tools: list[str] = []
    max_tool_rounds: int = 8
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: list[str] = []
    seed: int | None = None
    thinking: bool | None = None
    context_window: int | None = None
    dtype: str | None = None
    adapters: list[str] = []
    card_sampling: bool = False


class UntilTable(_Strict):
    """`[until]`: any of these ends a conversation."""

    pattern: str | None = None
    by: str | None = None
    ignore_case: bool = False
    tokens_per_conversation: int | None = None
    tokens_per_turn: int | None = None
    function: str | None = None


class ContextTable(_Strict):
    """`[context]`: what to do when a view outgrows its model's window."""

    policy: Literal["error", "drop_oldest", "sliding_window", "summarise"] = "error"
    turns: int | None = None
    keep: int = 4


class LineupFile(_Strict):
    """A lineup as a file has it. `data` is a file of JSON lines; paths are taken from the folder of the file."""

    participants: list[ParticipantTable]
    name: str | None = None
    turns: int | None = None
    shared_context: TextSetting | None = None
    shared_system_prompt: TextSetting | None = None
    first: str | None = None
    until: UntilTable = UntilTable()
    context: ContextTable = ContextTable()
    reasoning_visibility: Visibility = "none"
    moderator: str = MODERATOR
    seed: int = 0
    data: str | None = None
    analyzer: str | None = None


class Rows:
    """The rows of a file of JSON lines, read anew by each who asks, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        for number, (_, line) in enumerate(lines(self.path), start=1):
            if not line.strip():
                continue
            try:
                yield strict_loads(line)
            except ValueError as error:
                raise StoreError(f"{str(self.path)!r}, line {number}: {error}") from None

    def __len__(self) -> int:
        return sum(1 for _, line in lines(self.path) if line.strip())

    def __repr__(self) -> str:
        return f"the rows of {str(self.path)!r}"


def read_lineup(path: Path) -> Conversation:
    """The conversation a file describes. Modules that it names are found beside it as well.

    Raises `ConfigurationError` naming what is wrong and where.
    """
    try:
        values = tomllib.loads(read_whole(path).decode("utf-8"))
        told = LineupFile.model_validate(values)
    except FileNotFoundError:
        raise ConfigurationError(f"no lineup at {str(path)!r}") from None
    except OSError as error:
        raise ConfigurationError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except ValidationError as problem:
        raise ConfigurationError(explain(problem, LineupFile, repr(str(path)))) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{str(path)!r} is not TOML: {error}") from None
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    conversation = Conversation(
        [_participant(table) for table in told.participants],
        _text(told.shared_context, "shared_context"),
        _text(told.shared_system_prompt, "shared_system_prompt"),
        turns=told.turns,
        until=_until(told.until),
        first=told.first,
        context=_policy(told.context),
        reasoning_visibility=told.reasoning_visibility,
        moderator=told.moderator,
        seed=told.seed,
        analyzer=told.analyzer,
        name=told.name or path.stem,
    )
    if told.analyzer is not None:
        find_analyzer(told.analyzer)
    if told.data is None:
        return conversation
    rows = path.parent / told.data
    if not rows.is_file():
        raise ConfigurationError(f"{str(path)!r}: there is no file of data at {str(rows)!r}")
    return conversation.data(Rows(rows))


def _participant(table: ParticipantTable) -> Participant:
    fields = table.model_dump(exclude={"name", "model", "answers", "function", "person"})
    where = f"participant {table.name!r}"
    answering: dict[str, Any] = {
        "model": table.model,
        "answers": table.answers,
        "function": None if table.function is None else imported(table.function, where),
        "person": Person() if table.person else None,
    }
    given = {name: value for name, value in answering.items() if value is not None}
    if len(given) != 1:
        raise ConfigurationError(f"{where} needs one of model, answers, function and person")
    fields["system_prompt"] = _text(table.system_prompt, f"{where}: system_prompt")
    fields["context"] = _text(table.context, f"{where}: context")
    fields["tools"] = [imported(name, where) if ":" in name else name for name in table.tools]
    return Participant(table.name, next(iter(given.values())), **fields)


def _text(setting: TextSetting | None, where: str) -> Template | None:
    if setting is None or isinstance(setting, str):
        return setting
    if isinstance(setting, list):
        parts: Any = tuple(_text(part, where) for part in setting)
        return parts  # type: ignore[no-any-return]
    if isinstance(setting, FieldPart):
        return dataset_field(setting.field)
    found: Template = imported(setting.function, where)
    return found


def _until(table: UntilTable) -> StopCondition | None:
    found: list[StopCondition] = []
    if table.pattern is not None:
        found.append(TextPattern(table.pattern, by=table.by, ignore_case=table.ignore_case))
    if table.tokens_per_conversation is not None or table.tokens_per_turn is not None:
        found.append(TokenBudget(table.tokens_per_conversation, table.tokens_per_turn))
    if table.function is not None:
        found.append(When(imported(table.function, "until.function")))
    return all_of(*found)


def _policy(table: ContextTable) -> ContextPolicy:
    if table.policy == "sliding_window":
        if table.turns is None:
            raise ConfigurationError("context: sliding_window needs turns, how many are shown")
        return SlidingWindow(table.turns)
    if table.policy == "summarise":
        return Summarise(table.keep)
    return DropOldest() if table.policy == "drop_oldest" else Refuse()
