"""When to give up: a run whose rollouts mostly fail stops paying for more of the same."""

from __future__ import annotations

from taskmill.records import ErrorRecord

MINIMUM_JUDGED = 20
"""Fewer finished rollouts than this say nothing about the run, unless no later one can come out differently."""

HOPELESS = frozenset({"AuthenticationError", "ModelNotFoundError"})
"""Errors that every later call would meet as well."""


class FailureGate:
    """Closes when more than `max_fraction` of the rollouts finished so far failed.

    Judged from `MINIMUM_JUDGED` finished rollouts on; a run that met nothing but hopeless errors (a wrong key,
    an unknown model) is judged from its fourth. `first_error` is what people are shown.
    """

    def __init__(self, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self.finished = 0
        self.failed = 0
        self.hopeless = 0
        self.first_error: ErrorRecord | None = None

    def succeeded(self) -> None:
        """Count a rollout that did not fail."""
        self.finished += 1

    def fail(self, error: ErrorRecord) -> bool:
        """Count a failed rollout; true when it is the first."""
        self.finished += 1
        self.failed += 1
        self.hopeless += error.type in HOPELESS
        if self.first_error is None:
            self.first_error = error
            return True
        return False

    @property
    def closed(self) -> bool:
        """Whether the run should take no more work."""
        if self.max_fraction >= 1.0 or not self.failed:
            return False
        if self.hopeless == self.finished and self.finished >= 4:
            return True
        return self.finished >= MINIMUM_JUDGED and self.failed > self.max_fraction * self.finished

    def reason(self) -> str:
        """Why the gate is closed, in a sentence."""
        error = self.first_error
        told = f"; the first was {error.type}: {error.message}" if error else ""
        return f"gave up after {self.failed} of {self.finished} rollouts failed{told}"
