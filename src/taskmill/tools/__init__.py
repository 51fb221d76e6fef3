"""What an agent can do: tools made from functions, the groups they come in, and the box that runs them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "DISTRIBUTIONS": "taskmill.tools.distributions",
    "TOOLSETS": "taskmill.tools.toolsets",
    "FunctionTool": "taskmill.tools.function",
    "Tool": "taskmill.tools.base",
    "ToolBox": "taskmill.tools.box",
    "ToolContext": "taskmill.tools.base",
    "ToolResult": "taskmill.tools.base",
    "Toolset": "taskmill.tools.toolsets",
    "known_tools": "taskmill.tools.toolsets",
    "load_distributions": "taskmill.tools.distributions",
    "open_mcp": "taskmill.tools.mcp",
    "register_distribution": "taskmill.tools.distributions",
    "register_toolset": "taskmill.tools.toolsets",
    "select_toolsets": "taskmill.tools.distributions",
    "tool": "taskmill.tools.function",
}

__all__ = [
    "DISTRIBUTIONS",
    "TOOLSETS",
    "FunctionTool",
    "Tool",
    "ToolBox",
    "ToolContext",
    "ToolResult",
    "Toolset",
    "known_tools",
    "load_distributions",
    "open_mcp",
    "register_distribution",
    "register_toolset",
    "select_toolsets",
    "tool",
]

if TYPE_CHECKING:
    from taskmill.tools.base import Tool, ToolContext, ToolResult
    from taskmill.tools.box import ToolBox
    from taskmill.tools.distributions import (
        DISTRIBUTIONS,
        load_distributions,
        register_distribution,
        select_toolsets,
    )
    from taskmill.tools.function import FunctionTool, tool
    from taskmill.tools.mcp import open_mcp
    from taskmill.tools.toolsets import TOOLSETS, Toolset, known_tools, register_toolset


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'taskmill.tools' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
