"""Python code that an agent writes and runs, in the rollout's sandbox."""

from __future__ import annotations

from typing import Any

from taskmill.errors import ToolArgumentsError
from taskmill.tools.base import ToolContext
from taskmill.tools.function import tool
from taskmill.tools.terminal import LONGEST_COMMAND, fitting, shell_of


@tool(exclusive=True, timeout=LONGEST_COMMAND + 60)
async def execute_code(code: str, timeout: float = 120, *, context: ToolContext) -> dict[str, Any]:
    """Run a Python script in the workspace and get what it prints. Nothing is kept from one script to the next.

    It runs in a process of its own with python3, in the terminal's working directory. Print what you want to see.

    Args:
        code: The whole script.
        timeout: Seconds after which it is killed, at most 600.
    """
    if not code.strip():
        raise ToolArgumentsError("code is blank")
    if not 0 < timeout <= LONGEST_COMMAND:
        raise ToolArgumentsError(
            f"timeout must be over 0 and at most {LONGEST_COMMAND:g} seconds, not {timeout!r}"
        )
    result = await context.sandbox.run(
        ["python3", "-u", "-"],
        timeout=timeout,
        cwd=shell_of(context).cwd,
        stdin=code.encode("utf-8", "replace"),
    )
    error = None
    if result.timed_out:
        error = f"timed out after {timeout:g} s and was killed"
    elif result.exit_code == 127 and result.cwd is None and "python3" in result.output:
        error = "there is no python3 in this sandbox"
    return fitting(result.output, {"exit_code": result.exit_code, "error": error})
