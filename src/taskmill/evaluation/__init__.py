"""Running tasksets: rollouts with rewards, checked, replayed, compared."""

from taskmill.evaluation.debugging import debug_task
from taskmill.evaluation.replaying import Replay, replay
from taskmill.evaluation.runner import EvalResult, Evaluation, evaluate
from taskmill.evaluation.validation import Validation, ValidationResult, validate

__all__ = [
    "EvalResult",
    "Evaluation",
    "Replay",
    "Validation",
    "ValidationResult",
    "debug_task",
    "evaluate",
    "replay",
    "validate",
]
