"""`jsonl`: prompts from a file of your own, one JSON object a line, with an answer and a way to score it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import regex
from pydantic import Field, ValidationError

from taskmill.errors import TasksetError
from taskmill.records import Trace
from taskmill.store.jsonl import lines, strict_loads
from taskmill.tasks.builtin._shared import last_answer, number_in, similarity
from taskmill.tasks.explain import explain
from taskmill.tasks.scoring import reward
from taskmill.tasks.task import PromptMessage, Task, TaskConfig, TaskData
from taskmill.tasks.taskset import Taskset, TasksetConfig

Scorer = Literal["exact", "contains", "number", "regex", "similarity"]

_PATTERN_SECONDS = 5.0
_MARK = b"\xef\xbb\xbf"


class JsonlConfig(TasksetConfig):
    """The file, its fields, and how answers are scored."""

    path: str
    prompt_field: str = "prompt"
    """A text, or a list of messages (`{"role": …, "content": …}`)."""
    answer_field: str = "answer"
    """A text or a number, or a list of them, each of which is right."""
    scorer: Scorer = "exact"
    """`exact`: the answer and nothing else, white space around it aside. `contains`: the answer somewhere in the text.
    `number`: the same number (after `####`, in `\\boxed{}`, or the last one). `regex`: the answer is a pattern, which
    is searched for. `similarity`: the ratio of `difflib`, from 0 to 1."""
    ignore_case: bool = False
    """Whether capitals make no difference."""
    solution_field: str | None = None
    """A field with a reference solution, where that is more than the answer; a pattern has none without it."""
    system_prompt: str | None = None


class JsonlData(TaskData):
    """A row of the file: where it stood, its answers, and its other fields."""

    line: int
    answers: list[str]
    solution: str | None = None
    scorer: Scorer
    ignore_case: bool = False
    other: dict[str, Any] = Field(default_factory=dict)


class JsonlTask(Task[JsonlData]):
    """Reward: what the scorer says of the last answer, the best of all answers that are right."""

    @reward
    def correct(self, trace: Trace) -> float:
        said = last_answer(trace.messages)
        return max(self._score(said, answer) for answer in self.data.answers)

    def _score(self, said: str, answer: str) -> float:
        said, answer = said.strip(), answer.strip()
        if self.data.scorer == "regex":
            pattern = _compiled(answer, self.data.ignore_case)
            return float(pattern.search(said, timeout=_PATTERN_SECONDS) is not None)
        if self.data.scorer == "number":
            number = number_in(said)
            return float(number is not None and number == number_in(answer))
        if self.data.ignore_case:
            said, answer = said.casefold(), answer.casefold()
        if self.data.scorer == "similarity":
            return similarity(said, answer)
        return float(said == answer if self.data.scorer == "exact" else answer in said)


class SolvedJsonlTask(JsonlTask):
    """A row whose solution is known."""

    def solve(self) -> str | None:
        return self.data.solution


class JsonlTaskset(Taskset[JsonlTask]):
    """The prompts of a JSONL file, with their answers and a choice of scorer.

    Rows are read as they are asked for. Empty lines are passed over.
    """

    Config: ClassVar[type[TasksetConfig]] = JsonlConfig

    def load(self) -> Iterator[JsonlTask]:
        config = cast("JsonlConfig", self.config)
        path = Path(config.path).expanduser()
        idx = 0
        try:
            for number, (offset, line) in enumerate(lines(path), start=1):
                line = line.removeprefix(_MARK) if offset == 0 else line
                if not line.strip():
                    continue
                try:
                    yield _task(idx, number, strict_loads(line), config, self.config.task)
                except ValueError as error:
                    raise TasksetError(f"{path}, line {number}: {error}") from None
                idx += 1
        except OSError as error:
            raise TasksetError(f"{path} can't be read: {error.strerror or error}") from error
        if idx == 0:
            raise TasksetError(f"{path} has no row")


def _task(idx: int, number: int, row: Any, config: JsonlConfig, settings: TaskConfig) -> JsonlTask:
    """The task of a row. Raises `ValueError` with what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, not {row!r:.100}")
    for field in (config.prompt_field, config.answer_field):
        if field not in row:
            raise ValueError(
                f"there is no field {field!r}, only {', '.join(map(repr, row)) or 'an empty object'}"
            )
    right = _answers(row[config.answer_field], config)
    solution = right[0] if config.scorer != "regex" else None
    if config.solution_field is not None:
        solution = row.get(config.solution_field)
        if not isinstance(solution, str):
            raise ValueError(f"the field {config.solution_field!r} must be a text, not {solution!r:.100}")
    used = {config.prompt_field, config.answer_field, config.solution_field}
    data = JsonlData(
        idx=idx,
        prompt=_prompt(row[config.prompt_field], config.prompt_field),
        system_prompt=config.system_prompt,
        line=number,
        answers=right,
        solution=solution,
        scorer=config.scorer,
        ignore_case=config.ignore_case,
        other={name: value for name, value in row.items() if name not in used},
    )
    return (JsonlTask if solution is None else SolvedJsonlTask)(data, settings)


def _prompt(value: Any, field: str) -> str | list[PromptMessage]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value:
        try:
            return [PromptMessage.model_validate(turn) for turn in value]
        except ValidationError as problem:
            raise ValueError(f"the field {field!r}: {explain(problem, PromptMessage)}") from None
    raise ValueError(f"the field {field!r} must be a text or a list of messages, not {value!r:.100}")


def _answers(value: Any, config: JsonlConfig) -> list[str]:
    given = value if isinstance(value, list) else [value]
    right = []
    for answer in given:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise ValueError(
                f"the field {config.answer_field!r} must be a text or a number, not {answer!r:.100}"
            )
        right.append(str(answer))
        if config.scorer == "number" and number_in(right[-1]) is None:
            raise ValueError(f"the field {config.answer_field!r} has no number: {answer!r:.100}")
        if config.scorer == "regex":
            try:
                _compiled(right[-1].strip(), config.ignore_case)
            except regex.error as error:
                raise ValueError(f"the field {config.answer_field!r} is no pattern: {error}") from None
    if not right:
        raise ValueError(f"the field {config.answer_field!r} is an empty list")
    return right


@cache
def _compiled(pattern: str, ignore_case: bool) -> Any:
    return regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
