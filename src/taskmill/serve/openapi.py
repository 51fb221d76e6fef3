"""The server's description of itself, as OpenAPI 3.1: made from the types that requests and answers are read with."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from taskmill._version import __version__
from taskmill.engine.environment import GroupRequest, Info, Refusal, RolloutRequest, TaskListing
from taskmill.records import Trace

_REF = "#/components/schemas/{name}"
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def description(*, with_token: bool) -> dict[str, Any]:
    """The document that `/openapi.json` answers with."""
    _, requests = models_json_schema(
        [(RolloutRequest, "validation"), (GroupRequest, "validation")],
        ref_template=_REF.replace("{name}", "{model}"),
    )
    _, answers = msgspec.json.schema_components(
        [Trace, Info, Refusal, TaskListing], schema_hook=lambda kind: {}, ref_template=_REF
    )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "taskmill environment server",
            "version": __version__,
            "description": "Rollouts of a taskset by number, with rewards.",
        },
        "paths": {
            "/health": {"get": _operation("Whether requests are taken", _OBJECT)},
            "/info": {
                "get": _operation("What is served; num_tasks is null for an infinite taskset", _of("Info"))
            },
            "/tasks": {
                "get": _operation("What the tasks are, from a number on", _list("TaskListing"))
                | {"parameters": [_query("start", 0, 0), _query("count", 64, 1)]}
            },
            "/rollout": {"post": _operation("One rollout of a task", _of("Trace"), "RolloutRequest")},
            "/group": {
                "post": _operation(
                    "Several rollouts of a task, with its group rewards", _list("Trace"), "GroupRequest"
                )
            },
            "/metrics": {"get": _operation("Counts, as Prometheus reads them", _TEXT)},
            "/openapi.json": {"get": _operation("This description", _OBJECT)},
        },
        "components": {"schemas": requests["$defs"] | answers},
    }
    if with_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _operation(summary: str, answer: dict[str, Any], asks: str | None = None) -> dict[str, Any]:
    refusal = {"description": "An error of taskmill, by its class", "content": _content("Refusal")}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": answer}, "default": refusal},
    }
    if asks is not None:
        operation["requestBody"] = {"required": True, "content": _content(asks)}
    return operation


def _plain(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema}}


def _content(name: str) -> dict[str, Any]:
    return _plain("application/json", {"$ref": _REF.format(name=name)})


_of = _content


def _list(name: str) -> dict[str, Any]:
    return _plain("application/json", {"type": "array", "items": {"$ref": _REF.format(name=name)}})


def _query(name: str, default: int, least: int) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": least, "default": default}
    return {"name": name, "in": "query", "required": False, "schema": schema}
