"""The task list an agent keeps for itself: as long as the rollout, seen by nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from taskmill.errors import ToolRefusedError
from taskmill.tools.base import ToolContext
from taskmill.tools.function import tool

MOST_ITEMS = 200
LONGEST_ITEM = 4_000

Status = Literal["pending", "in_progress", "completed", "cancelled"]


@dataclass(frozen=True)
class TodoItem:
    """One task of the list."""

    id: str
    content: str
    status: Status = "pending"


@tool(exclusive=True, timeout=10)
async def todo(
    todos: list[TodoItem] | None = None, merge: bool = False, *, context: ToolContext
) -> dict[str, Any]:
    """Keep a list of the tasks at hand: for work of several steps, so that none is forgotten.

    Without `todos` it only reads. Always answers with the whole list. Have one task in_progress at a time,
    and set it to completed as soon as it is.

    Args:
        todos: The tasks to write, each with id, content and status (pending, in_progress, completed, cancelled).
        merge: False replaces the whole list; true changes tasks with a known id and adds the others at the end.
    """
    items: dict[str, TodoItem] = context.state.get("todo", {})
    if todos is not None:
        fresh = {item.id: item for item in todos}
        if len(fresh) < len(todos):
            raise ToolRefusedError("two tasks have the same id; give each an id of its own")
        items = {**items, **fresh} if merge else fresh
        if len(items) > MOST_ITEMS:
            raise ToolRefusedError(f"{len(items)} tasks are too many; keep at most {MOST_ITEMS}")
        for item in todos:
            if not item.content.strip() or len(item.content) > LONGEST_ITEM:
                raise ToolRefusedError(
                    f"task {item.id!r}: content must be 1 to {LONGEST_ITEM} characters and not blank"
                )
        context.state["todo"] = items
    counts = dict.fromkeys(get_args(Status), 0)
    for item in items.values():
        counts[item.status] += 1
    return {"todos": list(items.values()), "summary": {"total": len(items), **counts}}
