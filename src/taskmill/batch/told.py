"""The events of a run as lines for people: printed by the command, logged where nobody else listens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from taskmill.engine.progress import logged

logger = logging.getLogger("taskmill.batch")


def event_line(event: Mapping[str, Any], *, verbose: bool) -> str | None:
    """What to say of an event, `None` where it is not worth a line. `verbose` has a line for each row that ends."""
    match event["event"]:
        case "warning" | "note":
            return f"{event['event']}: {event['message']}"
        case "first_error":
            message = " ".join(event["message"].split())
            return f"row {event['prompt_index']} failed, the first: {event['type']}: {message}"
        case "recorded" if verbose:
            return (
                f"row {event['prompt_index']}: {event['state']} ({event['reason']}), {event['calls']} calls, "
                f"{event['tokens']:,} tokens, {event['prompt']!r}"
            )
    return None


def log_events(*, verbose: bool) -> Callable[[Mapping[str, Any]], None]:
    """A listener that logs what `event_line` says."""
    return logged(lambda event: event_line(event, verbose=verbose), logger)
