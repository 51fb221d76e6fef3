"""What the run of a taskset can be told, checked before anything is opened or written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taskmill.engine.environment import ProviderChoice, ReasoningChoice, SamplingChoice
from taskmill.errors import ConfigurationError
from taskmill.models.base import Reasoning, Sampling
from taskmill.models.families import routing
from taskmill.tasks.explain import explain
from taskmill.tasks.limits import Count, Limits
from taskmill.tasks.rollout import RolloutSettings

POLICY_FIELDS = frozenset(
    {
        "base_url",
        "call_timeout",
        "concurrency",
        "max_attempts",
        "max_failures",
        "num_rollouts",
        "num_tasks",
        "pass_reward",
        "run_limits",
        "sandbox",
        "sync",
        "total_timeout",
    }
)
"""Settings that may differ at a resume. (`num_tasks` and `num_rollouts` may only grow, which is checked apart.)"""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EvalSettings(_Strict):
    """The settings of a run. Field names are those of `evaluate`'s arguments and of the TOML file."""

    num_tasks: Count | None = None
    """Only the first so many tasks; needed where the taskset is infinite."""
    num_rollouts: Count = 1
    """Rollouts of each task."""
    concurrency: Count = 16
    """Rollouts under way at once."""
    shuffle: bool = False
    """Draw the tasks from the whole taskset instead of taking the first."""
    seed: Annotated[int, Field(strict=True)] = 0
    """Decides the shuffle."""
    sampling: SamplingChoice = SamplingChoice()
    reasoning: ReasoningChoice | None = None
    provider: ProviderChoice | None = None
    limits: Limits = Limits(max_turns=100)
    """What one rollout may spend."""
    run_limits: Limits = Limits()
    """What the run may spend; `max_turns` counts the turns of all rollouts."""
    tool_result_limit: Annotated[int, Field(ge=200, strict=True)] = 50_000
    """Characters of one tool result that the model sees."""
    max_failures: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Give up when the model failed in a larger fraction of the rollouts; 1 never gives up."""
    pass_reward: float = 1.0
    """The reward from which on a rollout counts as passed."""
    sandbox: Literal["auto", "bubblewrap", "plain", "docker"] = "auto"
    """What confines the commands a model runs."""
    call_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for one attempt at a model call."""
    total_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds for a model call with all its attempts."""
    max_attempts: Count = 6
    """Attempts at a model call before its rollout fails."""
    sync: Literal["each", "group", "none"] = "group"
    """When stored rows are forced to the disk."""

    def rollout(self) -> RolloutSettings:
        """What every rollout is told."""
        provider = None if self.provider is None else routing(**self.provider.model_dump())
        return RolloutSettings(
            sampling=Sampling(**self.sampling.model_dump()),
            reasoning=None if self.reasoning is None else Reasoning(**self.reasoning.model_dump()),
            provider=provider,
            limits=self.limits,
            tool_result_limit=self.tool_result_limit,
        )


def check_settings(values: Mapping[str, Any]) -> EvalSettings:
    """Validate. Raises `ConfigurationError` naming each field that won't do, and what would."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f"{name}={value!r} must be a finite number")
    try:
        return EvalSettings.model_validate(dict(values))
    except ValidationError as problem:
        raise ConfigurationError(explain(problem, EvalSettings)) from None
