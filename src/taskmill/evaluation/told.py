"""The events of a taskset's run as lines for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from taskmill.engine.progress import logged
from taskmill.tasks.words import counted

logger = logging.getLogger("taskmill.evaluation")


def event_line(event: Mapping[str, Any], *, verbose: bool) -> str | None:
    """What to say of an event, `None` where it is not worth a line. `verbose` has a line for each rollout that ends."""
    match event["event"]:
        case "warning" | "note":
            return f"{event['event']}: {event['message']}"
        case "first_error":
            message = " ".join(event["message"].split())
            return f"task {event['idx']} failed, the first: {event['type']}: {message}"
        case "recorded" if verbose:
            reward = "no reward" if event["reward"] is None else f"reward {event['reward']:g}"
            why = event["error"] or event["reason"]
            return (
                f"task {event['idx']} rollout {event['number']}: {event['state']} ({why}), {reward}, "
                f"{counted(event['calls'], 'call')}, {counted(event['tokens'], 'token')}"
            )
    return None


log_events = logged(lambda event: event_line(event, verbose=False), logger)
"""A listener for runs in code that have none of their own."""
