"""One row of a taskset: what it is (`TaskData`), and what it does (`Task`).

The two are apart because the data alone travels and is stored, while the behaviour is code: a trace can be read
where the code is not, and scored again where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from taskmill.records import Message
from taskmill.tasks.judge import JudgeConfig

Seconds = Annotated[float, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PromptMessage(_Record):
    """A turn that stands in a prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


class TaskTimeouts(_Record):
    """Seconds that the parts of a rollout may take. `None` for the conversation is no limit of the task's own."""

    setup: Seconds = 600.0
    conversation: Seconds | None = None
    finalize: Seconds = 600.0
    scoring: Seconds = 600.0


class Resources(_Record):
    """What the sandbox of a rollout may use: bytes of memory, whether the network is there."""

    memory: Annotated[int, Field(ge=1)] | None = None
    network: bool = False


class TaskData(_Record):
    """What a row is. Subclass it for typed fields of your own (the answer, the ground truth).

    `prompt` is a text, a list of messages, or `None` where the task's `user` speaks first. `image` and `workdir`
    say where its tools run.
    """

    idx: int = Field(ge=0)
    name: str | None = None
    prompt: str | list[PromptMessage] | None = None
    system_prompt: str | None = None
    image: str | None = None
    workdir: str | None = None
    timeouts: TaskTimeouts = TaskTimeouts()
    resources: Resources = Resources()

    def fields(self) -> dict[str, Any]:
        """Every field as JSON has it, those left at their defaults not among them, but always `idx` and `prompt`."""
        return {"idx": self.idx, "prompt": None} | self.model_dump(mode="json", exclude_defaults=True)


class AnyTaskData(TaskData):
    """Task data as a reader without its class has it: the fields it does not know are there all the same."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=True)


class TaskConfig(BaseModel):
    """Settings that every task of a taskset shares. Subclass it for your own; they are reached as `task.<field>`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    judges: dict[str, JudgeConfig] = Field(default_factory=dict)
    """Models that grade, by name. Each adds a reward of that name."""


UNSET = TaskConfig()
"""The configuration of a task that was given none; it gets that of its taskset when it is drawn."""

DataT = TypeVar("DataT", bound=TaskData)


class Task(Generic[DataT]):
    """What a row does. One object serves all rollouts of its row: keep nothing of a rollout on it.

    All methods below, and those marked `@reward`, `@metric` and `@stop`, take by name what they need of

    - `task`: this object,
    - `state`: a dict that lives as long as the rollout, and is stored with it,
    - `sandbox`: the rollout's workspace, set up when it is first used,
    - `messages`: what was said so far,
    - `trace`: the record so far.

    They may be plain or async. Plain ones run in a thread, so that none can stop the others; each part of a
    rollout has its deadline (`TaskData.timeouts`). `@group_reward` methods take `traces`, and `task`.
    """

    def __init__(self, data: DataT, config: TaskConfig | None = None) -> None:
        self.data = data
        self.config = UNSET if config is None else config

    def tools(self) -> Sequence[Any]:
        """What the model is offered: tools, typed functions, or names of toolsets."""
        return ()

    # What follows is looked for by name, and called only where a subclass has it. The signatures are the subclass's
    # own, as each asks for what it needs, so there is nothing to override here but the absence.

    setup: Callable[..., Any] | None = None
    """Make the workspace or the state ready, before the first turn."""

    user: Callable[..., Any] | None = None
    """Speak as the user: first where the data has no prompt, then after every answer of the model that calls no tool.

    A text, a message or a list of messages is said next; `None` ends the conversation.
    """

    finalize: Callable[..., Any] | None = None
    """Collect what the rewards need, after the last turn, while the workspace is still there."""

    solve: Callable[..., Any] | None = None
    """The reference solution, a turn at a time: what a perfect model answers to what was said so far."""

    validate: Callable[..., Any] | None = None
    """Check the task itself, beyond its reference solution. Return `False` or raise where it won't do."""


def prompt_messages(data: TaskData) -> list[Message]:
    """The turns that a task's conversation starts with, its system prompt not among them."""
    if data.prompt is None:
        return []
    if isinstance(data.prompt, str):
        return [Message("user", data.prompt)]
    return [Message(turn.role, turn.content) for turn in data.prompt]


def read_data(fields: Mapping[str, Any], kind: type[TaskData] = AnyTaskData) -> TaskData:
    """Task data from stored fields, of its own class where that is known."""
    return kind.model_validate(fields)
