"""What a client and an environment server say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer

from taskmill.errors import ConfigurationError
from taskmill.models.base import Effort, Reasoning, Sampling
from taskmill.models.families import routing
from taskmill.tasks.explain import names_at
from taskmill.tasks.limits import Count, Limits
from taskmill.tasks.rollout import RolloutSettings

MAX_LAZY_TASKS = 1_000_000
"""Tasks of an infinite taskset that a worker keeps at most."""

MAX_GROUP = 1024
"""Rollouts that one request can ask for."""

TASKS_A_PAGE = 256
"""Tasks that are listed in one answer at most."""

RequestT = TypeVar("RequestT", bound="_Asked")

Seconds = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EndpointChoice(_Strict):
    """The model that answers: a name at an OpenAI-style endpoint. It is used for the request it stands in, only."""

    name: Annotated[str, Field(min_length=1)]
    base_url: Annotated[str, Field(pattern=r"^https?://[^/\s]")]
    """The part before `/chat/completions`."""
    api_key: SecretStr | None = None
    """Never stored, logged or repeated in an answer."""
    call_timeout: Seconds = 600.0
    """Seconds for one attempt at a model call."""
    total_timeout: Seconds = 3600.0
    """Seconds for a model call with all its attempts."""
    max_attempts: Count = 6
    """Attempts at a model call before its rollout fails."""
    prices: dict[str, dict[str, float]] | None = None
    """US dollars for a million tokens, by model."""

    @field_serializer("api_key", when_used="json")
    def _told(self, key: SecretStr | None) -> str | None:
        return None if key is None else key.get_secret_value()


class SamplingChoice(_Strict):
    """How the model samples; what is not set is the model's own way."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    seed: Annotated[int, Field(strict=True)] | None = None
    """Each rollout samples with a seed worked out from this one and its id."""
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    """Ask for the log-probability of each token, and for the tokens' ids where the endpoint has a way to."""


class ReasoningChoice(_Strict):
    """Whether the model should think before it answers, and how hard."""

    enabled: bool = True
    effort: Effort | None = None


class ProviderChoice(_Strict):
    """Routing options for endpoints that route."""

    only: list[str] | None = None
    ignore: list[str] | None = None
    order: list[str] | None = None
    sort: Literal["price", "throughput", "latency"] | None = None


class _Asked(_Strict):
    task_idx: Annotated[int, Field(ge=0, strict=True)]
    """Which task of the taskset, from 0."""
    model: EndpointChoice
    sampling: SamplingChoice = SamplingChoice()
    reasoning: ReasoningChoice | None = None
    provider: ProviderChoice | None = None
    limits: Limits = Limits(max_turns=100)
    """What one rollout may spend."""
    tool_result_limit: Annotated[int, Field(ge=200, strict=True)] = 50_000
    """Characters of one tool result that the model sees."""
    attempt: Count = 1
    """Which try this is, for the record."""

    def settings(self) -> RolloutSettings:
        """What the rollout is told."""
        provider = None if self.provider is None else routing(**self.provider.model_dump())
        return RolloutSettings(
            sampling=Sampling(**self.sampling.model_dump()),
            reasoning=None if self.reasoning is None else Reasoning(**self.reasoning.model_dump()),
            provider=provider,
            limits=self.limits,
            tool_result_limit=self.tool_result_limit,
        )


class RolloutRequest(_Asked):
    """Asks for one rollout. Its group rewards, if its task has any, are not given: ask for a group then."""

    number: Annotated[int, Field(ge=0, strict=True)] = 0
    """Which of the task's rollouts this is. It is part of the rollout's id, and so of its own seed."""


class GroupRequest(_Asked):
    """Asks for `n` rollouts of one task, scored together."""

    n: Annotated[int, Field(ge=1, le=MAX_GROUP, strict=True)]
    concurrency: Count | None = None
    """Rollouts of the group under way at once; all of them where nothing is said."""


class Info(Struct, frozen=True):
    """What a server serves. `num_tasks` is `None` for an infinite taskset.

    `problem` is there where `load` failed after that many tasks: those are served, and no others can be.
    """

    num_tasks: int | None
    requires_group_scoring: bool
    taskset: str
    version: str
    problem: str | None = None


class TaskListing(Struct, frozen=True):
    """One task as a server lists it: its number, the hash in the ids of its rollouts, and its data."""

    task_idx: int
    hash: str
    scored_in_groups: bool
    task: Mapping[str, Any]


class Complaint(Struct, frozen=True):
    """What went wrong with a request: the class of the error, and what it says."""

    type: str
    message: str
    request_id: str = ""


class Refusal(Struct, frozen=True):
    """The body of an answer that is an error."""

    error: Complaint


def cap_message(task_idx: int, cap: int = MAX_LAZY_TASKS) -> str:
    """What is said of a number that an infinite taskset is not asked for."""
    return f"task_idx {task_idx} exceeds the lazy-generation cap ({cap})"


def read_request(kind: type[RequestT], body: bytes) -> RequestT:
    """A request from its JSON. Raises `ConfigurationError` naming each field that won't do, and no secret."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as problem:
        raise ConfigurationError(faults(problem, kind)) from None


def faults(problem: ValidationError, kind: type[BaseModel]) -> str:
    """Every fault of a request, with the nearest name for a field there is not. No value that may be secret."""
    return "; ".join(
        _fault(error, kind) for error in problem.errors(include_url=False, include_context=False)
    )


def _fault(error: Any, kind: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return f"the body is no JSON: {said.removeprefix('Invalid JSON: ')}"
    if error["type"] == "extra_forbidden":
        *above, last = error["loc"]
        near = get_close_matches(str(last), names_at(kind, above), n=1)
        full = ".".join([*map(str, above), *near])
        return f"unknown field {path!r}" + (f"; did you mean {full!r}?" if near else "")
    if error["type"] == "missing":
        return f"{path!r} is required"
    # Values of the endpoint are not repeated: a key may stand in any of its fields by mistake.
    simple = isinstance(error["input"], int | float | str) and "model" not in error["loc"]
    shown = f"={error['input']!r:.200}" if simple else ""
    return f"{path or 'the body'}{shown}: {said}"
