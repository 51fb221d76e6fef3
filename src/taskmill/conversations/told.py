"""The events of a run of conversations as lines for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from taskmill.engine.progress import logged

logger = logging.getLogger("taskmill.conversations")


def event_line(event: Mapping[str, Any], *, verbose: bool) -> str | None:
    """What to say of an event, `None` where it is not worth a line. `verbose` has a line for each job that ends."""
    match event["event"]:
        case "warning" | "note":
            return f"{event['event']}: {event['message']}"
        case "first_error":
            message = " ".join(event["message"].split())
            return f"{event['job_id']} failed, the first: {event['type']}: {message}"
        case "worker_died":
            return f"warning: the worker of {event['device']} died ({event['how']}); {event['jobs']} jobs run again"
        case "recorded" if verbose:
            why = event["error"] or event["reason"]
            return f"{event['job_id']}: {event['state']} ({why}), {event['turns']} turns, {event['tokens']:,} tokens"
    return None


log_events = logged(lambda event: event_line(event, verbose=False), logger)
"""A listener for runs in code that have none of their own."""
