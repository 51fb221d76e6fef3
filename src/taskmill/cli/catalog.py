"""`taskmill distributions`, `tools` and `models`: what there is, and what is missing for the rest."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from taskmill.cli import EXIT_OK
from taskmill.cli.display import say

FLAG = Parameter(negative="")


def distributions(*, json: Annotated[bool, FLAG] = False) -> int:
    """The toolset distributions, with their chances in percent.

    Parameters
    ----------
    json
        Write JSON.
    """
    from taskmill.tools import DISTRIBUTIONS, TOOLSETS
    from taskmill.tools.distributions import NO_TOOLSETS

    missing = {name: toolset.missing() for name, toolset in TOOLSETS.items()}
    listed = {**{name: dict(chances) for name, chances in DISTRIBUTIONS.items()}, NO_TOOLSETS: {}}
    if json:
        print(json_module.dumps(dict(sorted(listed.items()))))
        return EXIT_OK
    width = max(map(len, listed))
    for name, chances in sorted(listed.items()):
        drawn = "  ".join(
            f"{toolset} {chance:g}%{' (missing)' if missing.get(toolset) else ''}"
            for toolset, chance in sorted(chances.items(), key=lambda item: (-item[1], item[0]))
        )
        print(f"{name:<{width}}  {drawn or 'no toolsets'}")
    return EXIT_OK


def tools(*, json: Annotated[bool, FLAG] = False) -> int:
    """The tools an agent can be offered, by toolset, and what is missing for the others.

    Parameters
    ----------
    json
        Write JSON, with the schema of each tool's arguments.
    """
    from taskmill.sandbox.choose import describe
    from taskmill.tools import TOOLSETS

    found: list[dict[str, Any]] = []
    for name, toolset in TOOLSETS.items():
        lacks = toolset.missing()
        made = [] if lacks else toolset.tools()
        found.append(
            {
                "toolset": name,
                "description": toolset.description,
                "missing": lacks,
                "tools": [
                    {
                        "name": tool.spec.name,
                        "description": tool.spec.description,
                        "parameters": json_module.loads(bytes(tool.spec.parameters)),
                    }
                    for tool in made
                ],
                "names": list(toolset.names),
            }
        )
    if json:
        print(json_module.dumps(found))
        return EXIT_OK
    width = max(len(row["toolset"]) for row in found)
    for row in found:
        print(f"{row['toolset']:<{width}}  {', '.join(row['names'])}")
        print(f"{'':<{width}}  {row['description']}")
        if row["missing"]:
            print(f"{'':<{width}}  missing: {row['missing']}")
    print(f"\nsandbox: {describe('auto')}")
    return EXIT_OK


def models(
    action: Literal["list", "fetch"] = "list",
    kind: Literal["embedded", "local"] = "embedded",
    /,
    *,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """The models there are without an endpoint; 'fetch' gets the embedded one, 'fetch local' the small local one.

    Parameters
    ----------
    action
        list, or fetch to install what a model needs.
    kind
        What to fetch: embedded (llama.cpp) or local (transformers).
    json
        Write JSON.
    """
    from taskmill.models.catalog import fetch_embedded, fetch_local, installed_models, local_models

    if action == "fetch" and kind == "local":
        if fetch_local(tell=say) is None:
            say("the local model is here")
    elif action == "fetch" and not fetch_embedded(tell=say):
        say("all the embedded model needs is here")
    found = [*installed_models(), *local_models()]
    if json:
        print(msgspec.json.encode(found).decode())
        return EXIT_OK
    for model in found:
        where = (
            f"missing: {model.missing}"
            if model.missing
            else f"{(model.size or 0) / 1e6:.0f} MB at {model.path}"
        )
        print(f"{model.name}  {where}")
    print("\nany Hugging Face model: --model local:FOLDER or local:HUB_ID")
    print("any other model: --model NAME --base-url URL, or MODEL_ID, MODEL_BASE_URL and MODEL_API_KEY")
    return EXIT_OK
