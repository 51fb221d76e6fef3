"""What a batch can be told, checked before anything is opened."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from taskmill.errors import ConfigurationError
from taskmill.models.base import Effort, Reasoning, Sampling
from taskmill.models.families import routing
from taskmill.records import Message
from taskmill.store.jsonl import content_hash

POLICY_FIELDS = frozenset(
    {
        "base_url",
        "batch_size",
        "dataset_file",
        "discard_without_reasoning",
        "max_failures",
        "max_samples",
        "num_workers",
        "sandbox",
    }
)
"""Stored settings that may differ at a resume: they decide how a run is carried out, not what a sample is."""


LARGEST = 2**53
"""The largest integer that every reader of JSON keeps exactly."""

Count = Annotated[int, Field(ge=1, le=LARGEST, strict=True)]
"""A number of things, at least one. Strict, because `True` would pass for 1."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class ReasoningConfig(_Strict):
    """Whether the model should think before it answers, and how hard."""

    enabled: bool = True
    effort: Effort | None = None


class PrefillMessage(_Strict):
    """A turn that is sent before every prompt and recorded nowhere."""

    role: Literal["system", "user", "assistant"]
    content: str


class BatchSettings(_Strict):
    """The settings of a batch run. Field names are those of `BatchRunner`'s arguments and of the TOML file."""

    dataset_file: Path
    """JSONL file of prompts."""
    batch_size: Count
    """Rows of a batch; they run one after another and share a shard."""
    run_name: str
    """Name of the run's folder under `output_dir`."""
    distribution: str = "default"
    """Which toolsets are offered, and how often."""
    max_iterations: Count = 10
    """Model calls of a sample before it is asked for its answer."""
    num_workers: Count = 4
    """Batches under way at once."""
    verbose: bool = False
    """Log each row as it ends."""
    ephemeral_system_prompt: str | None = None
    """Sent with every call, recorded nowhere."""
    log_prefix_chars: Annotated[int, Field(ge=0, le=LARGEST, strict=True)] = 100
    """Characters of a prompt or answer that a log line shows."""
    providers_allowed: list[str] | None = None
    providers_ignored: list[str] | None = None
    providers_order: list[str] | None = None
    provider_sort: Literal["price", "throughput", "latency"] | None = None
    """Routing options; they reach endpoints that route, and no others."""
    max_tokens: Count | None = None
    """Tokens of one answer."""
    reasoning_config: ReasoningConfig | None = None
    prefill_messages: list[PrefillMessage] | None = None
    max_samples: Count | None = None
    """Only the first so many usable rows."""

    output_dir: Path = Path("data")
    """Where the run's folder stands."""
    seed: Annotated[int, Field(ge=-LARGEST, le=LARGEST, strict=True)] = 0
    """Decides the draw of toolsets."""
    sandbox: Literal["auto", "bubblewrap", "plain", "docker"] = "auto"
    """What confines the commands a model runs."""
    network: bool = False
    """Whether those commands may use the network."""
    discard_without_reasoning: bool = True
    """Leave out samples in which no turn has reasoning."""
    max_failures: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Give up when a larger fraction of the finished rows failed; 1 never gives up."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    sampling_seed: Annotated[int, Field(ge=-LARGEST, le=LARGEST, strict=True)] | None = None
    """Each row's requests carry a seed made of this one and the row's rollout id; unset, they carry none."""
    tool_result_limit: Annotated[int, Field(ge=200, le=LARGEST, strict=True)] = 50_000
    """Characters of one tool result that the model sees."""
    call_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for one attempt at a model call."""
    total_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds for a model call with all its attempts and the waiting between them."""
    max_attempts: Count = 6
    """Attempts at a model call before its sample fails."""
    sync: Literal["each", "group", "none"] = "group"
    """When stored rows are forced to the disk: each, in groups, or when the system likes."""

    @field_validator("dataset_file", "output_dir")
    @classmethod
    def _is_a_path(cls, path: Path) -> Path:
        if "\0" in str(path):
            raise ValueError("a path can't hold a NUL character")
        return path

    @field_validator("run_name")
    @classmethod
    def _is_one_folder(cls, name: str) -> str:
        encoded = name.encode("utf-8", "replace")
        odd = any(c in name for c in "/\\\0") or encoded.decode() != name or len(encoded) > 200
        if not name.strip() or name in (".", "..") or odd:
            raise ValueError(
                f"{name!r} must be the name of one folder in UTF-8: no '/', no '..', at most 200 bytes"
            )
        return name

    def reasoning(self) -> Reasoning | None:
        """The reasoning setting as a request carries it."""
        config = self.reasoning_config
        return None if config is None else Reasoning(config.enabled, config.effort)

    def sampling(self) -> Sampling:
        """The sampling of the run; its seed becomes another one for each row."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=self.sampling_seed,
        )

    def prefill(self) -> tuple[Message, ...]:
        """The prefilled turns as messages."""
        return tuple(Message(m.role, m.content) for m in self.prefill_messages or ())

    def provider(self) -> dict[str, Any] | None:
        """The routing object of endpoints that route; `None` when nothing was asked."""
        return routing(
            only=self.providers_allowed,
            ignore=self.providers_ignored,
            order=self.providers_order,
            sort=self.provider_sort,
        )

    def stored(self, **also: Any) -> dict[str, Any]:
        """What the run's configuration keeps: no key, no display option, nothing about this machine's speed."""
        shown = self.model_dump(
            mode="json",
            exclude={
                *("verbose", "log_prefix_chars", "output_dir", "sync"),
                *("call_timeout", "total_timeout", "max_attempts"),
            },
        )
        # Enough to know at a resume whether they are the same, and nothing of what they say.
        for name in ("ephemeral_system_prompt", "prefill_messages"):
            if shown[name]:
                shown[name] = f"blake2b:{content_hash(shown[name]).hex()}"
        return shown | also


def check_settings(values: Mapping[str, Any]) -> BatchSettings:
    """Validate.

    Raises:
        ConfigurationError: naming each argument that won't do, and what would.
    """
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{name}={value!r} must be a finite number")
    try:
        return BatchSettings.model_validate(values)
    except ValidationError as problem:
        raise ConfigurationError("; ".join(_explain(error) for error in problem.errors())) from None


def _explain(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path, BatchSettings.model_fields, n=1)
        return f"unknown setting {path!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if error["type"] == "missing":
        return f"{path!r} is required"
    shown = "" if isinstance(error["input"], Mapping) else f"={_short(error['input'])}"
    return f"{path}{shown}: {error['msg'].removeprefix('Value error, ')}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or a number of thousands of digits
        return "…"
    return text if len(text) <= 200 else f"{text[:200]}…"
