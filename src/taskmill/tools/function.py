"""`@tool`: a typed function becomes a tool; its signature is the schema and its docstring the description."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import typing
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any, overload

import msgspec

from taskmill.errors import ConfigurationError, ToolArgumentsError
from taskmill.records import ToolSpec
from taskmill.tools.base import ToolContext, ToolResult
from taskmill.tools.threads import THREADS

DEFAULT_TIMEOUT = 120.0
"""Seconds a tool may take when it says nothing itself."""

_PLAIN = frozenset({str, dict, list, tuple, int, float, bool, type(None), ToolResult})
"""What most functions return; nothing of it can be awaited."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class FunctionTool:
    """A tool made from a function. Calling the object calls the function, as if it were not decorated.

    An async function runs on the event loop: one that blocks there (a `time.sleep`, a long computation) stops
    every rollout of the process, and no deadline can reach it. Write such a tool as a plain function: those
    run in a thread of their own, which is abandoned when the deadline passes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        exclusive: bool = False,
        namespace: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = name or getattr(function, "__name__", None) or ""
        if not _NAME.match(self.name):
            raise ConfigurationError(
                f"tool name {self.name!r}: a tool needs a name of 1 to 64 letters, digits, '_' or '-'; "
                "give one with name=…"
            )
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ConfigurationError(
                f"timeout of tool {self.name!r}: must be a finite number of seconds over 0, not {timeout!r}"
            )
        self.function = function
        self.exclusive = exclusive
        self.timeout = float(timeout)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - asks whether a callable object is async
        )
        self.runs_in_thread = not is_async
        self._description = description
        self._namespace = dict(namespace or {})
        self.__doc__ = getattr(function, "__doc__", None)
        self._check_parameters()
        self._early_hints = self._resolve_hints(missing_ok=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    @cached_property
    def spec(self) -> ToolSpec:
        """What a model is told about this tool."""
        return ToolSpec(
            name=self.name,
            description=self._arguments.description if self._description is None else self._description,
            parameters=msgspec.Raw(self._arguments.schema),
        )

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Check `arguments`, run the function, and put what it returns into a `ToolResult`.

        Raises `ToolArgumentsError` naming the argument and what would do; what the function raises goes on.
        """
        plan = self._arguments
        values = plan.validate(arguments)
        if plan.context_name is not None:
            values[plan.context_name] = context
        if self.runs_in_thread:
            value = await THREADS.run(self.function, **values)
            if type(value) not in _PLAIN and inspect.isawaitable(value):
                value = await value
        else:
            value = await self.function(**values)
        return to_result(value)

    @cached_property
    def _arguments(self) -> _Arguments:
        hints = self._early_hints
        if hints is None:
            hints = self._resolve_hints(missing_ok=False)
        return _Arguments(self.name, self.function, hints or {})

    def _check_parameters(self) -> None:
        try:
            signature = _signature(self.function)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"tool {self.name!r}: {self.function!r} has no signature") from error
        for position, parameter in enumerate(signature.parameters.values()):
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigurationError(
                    f"tool {self.name!r}: parameter {parameter.name!r} can't be given by name; "
                    "a model gives every argument by name"
                )
            in_class = "." in getattr(self.function, "__qualname__", "").rpartition("<locals>.")[2]
            if position == 0 and in_class and parameter.name in ("self", "cls"):
                raise ConfigurationError(
                    f"tool {self.name!r}: decorate a bound method instead: tool(instance.{self.name})"
                )

    def _resolve_hints(self, *, missing_ok: bool) -> dict[str, Any] | None:
        target = inspect.unwrap(self.function)
        while hasattr(target, "func"):
            target = target.func
        if not inspect.isroutine(target):
            target = type(target).__call__
        # ToolContext is known even where the module imports it for type checkers only.
        known = {"ToolContext": ToolContext, **getattr(target, "__globals__", {})}
        try:
            return typing.get_type_hints(target, known, self._namespace, include_extras=True)
        except NameError as error:
            if missing_ok:
                return None
            raise ConfigurationError(
                f"tool {self.name!r}: the type {error.name!r} of its signature is not defined in its module"
            ) from error


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    function: Callable[..., Any],
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    exclusive: bool = False,
) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    exclusive: bool = False,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    exclusive: bool = False,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool from a typed function, as `@tool` or `@tool(name=…, timeout=…, exclusive=…)`.

    The signature becomes the schema of the arguments, the docstring the description, its `Args:` section that
    of the arguments. A parameter annotated `ToolContext` is filled in and not shown to the model. The function
    returns a text, anything that is JSON, or a `ToolResult`; a dict with an `error` that is not `None`, or with
    `success` false, says that the call failed. An exception is a failure that the model reads.

    `timeout` is in seconds. `exclusive` tools run alone, in the order of the calls: for what changes
    something other calls of the same turn may look at.
    """
    namespace = dict(sys._getframe(1).f_locals)
    if namespace.get("__name__") is not None and "__builtins__" in namespace:
        namespace = {}  # decorated at module level: the function's globals say it, and may still grow

    def make(target: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            target,
            name=name,
            description=description,
            timeout=timeout,
            exclusive=exclusive,
            namespace=namespace,
        )

    return make if function is None else make(function)


class _Arguments:
    """The arguments of one function: schema, descriptions, and a check that turns JSON into values."""

    def __init__(self, tool_name: str, function: Callable[..., Any], hints: Mapping[str, Any]) -> None:
        import docstring_parser
        from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

        doc = docstring_parser.parse(inspect.getdoc(function) or "")
        parts = [doc.short_description, doc.long_description]
        self.description = "\n\n".join(part for part in parts if part)
        described = {entry.arg_name: entry.description for entry in doc.params if entry.description}

        self.tool_name = tool_name
        self.context_name: str | None = None
        self.names: list[str] = []
        self.defaulted: set[str] = set()
        self.open = False
        fields: dict[str, Any] = {}
        for name, parameter in _signature(function).parameters.items():
            hint = hints.get(name, Any if parameter.annotation is parameter.empty else parameter.annotation)
            if _is_context(hint):
                self.context_name = name
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                self.open = True
                continue
            # Fields stand under names of ours, so that an argument may be called `schema`, `json` or `_x`.
            details: dict[str, Any] = {"alias": name}
            text = described.get(name)
            if text is not None and not _has_description(hint):
                details["description"] = text
            if parameter.default is not parameter.empty:
                self.defaulted.add(name)
                details["default"] = parameter.default
            fields[f"field_{len(self.names)}"] = (hint, Field(**details))
            self.names.append(name)
        config = ConfigDict(
            extra="allow" if self.open else "forbid",
            coerce_numbers_to_str=True,
            arbitrary_types_allowed=True,
            protected_namespaces=(),
            defer_build=False,
        )
        base: type[BaseModel] = create_model("Arguments", __config__=config, **fields)
        self._pairs = [(f"field_{number}", name) for number, name in enumerate(self.names)]
        self._check = base.__pydantic_validator__.validate_python
        self._invalid = ValidationError
        shape = _without_titles(base.model_json_schema(by_alias=True))
        self.schema = json.dumps(shape, ensure_ascii=False, separators=(",", ":")).encode()
        self._properties: dict[str, Any] = shape.get("properties", {})

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the function takes them; raises `ToolArgumentsError`."""
        given = dict(arguments)
        try:
            checked = self._check(given)
        except self._invalid as error:
            mended = self._mend(given, error)
            if mended is None:
                raise ToolArgumentsError(self._explain(error)) from None
            try:
                checked = self._check(mended)
            except self._invalid as second:
                raise ToolArgumentsError(self._explain(second)) from None
        stored = checked.__dict__
        values = {name: stored[field] for field, name in self._pairs}
        if self.open:
            values.update(checked.__pydantic_extra__ or {})
        return values

    def _mend(self, given: dict[str, Any], error: Any) -> dict[str, Any] | None:
        """Two habits of models that leave no doubt about what is meant.

        A list or object written as a JSON text is decoded; null for an argument that may be left out is
        leaving it out.
        """
        mended = dict(given)
        for problem in error.errors(include_url=False, include_context=False):
            name = problem["loc"][0] if problem["loc"] else None
            if name not in mended:
                continue
            value = mended[name]
            if value is None and name in self.defaulted:
                del mended[name]
            elif isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
                try:
                    mended[name] = json.loads(value)
                except ValueError:
                    continue
        return mended if mended != given else None

    def _explain(self, error: Any) -> str:
        lines = []
        problems = error.errors(include_url=False, include_context=False)
        for problem in problems[:5]:
            place = ".".join(str(part) for part in problem["loc"]) or "arguments"
            if problem["type"] == "missing":
                lines.append(f"argument {place!r} is missing")
            elif problem["type"] == "extra_forbidden":
                near = get_close_matches(str(problem["loc"][-1]), self.names, n=1)
                lines.append(
                    f"there is no argument {place!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
                )
            else:
                shown = repr(problem["input"])
                shown = shown if len(shown) <= 80 else shown[:77] + "..."
                lines.append(f"argument {place!r}: {problem['msg']}, got {shown}")
        if len(problems) > 5:
            lines.append(f"and {len(problems) - 5} more")
        return f"{'; '.join(lines)}. {self.tool_name} takes {self._summary()}."

    def _summary(self) -> str:
        if not self.names:
            return "no arguments" if not self.open else "any arguments"
        said = []
        for name in self.names:
            shape = self._properties.get(name, {})
            kind = shape.get("type") or "/".join(
                option.get("type", "any") for option in shape.get("anyOf", ()) if option.get("type") != "null"
            )
            said.append(f"{name} ({kind or 'any'}{', optional' if name in self.defaulted else ''})")
        return ", ".join(said)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        # Annotations are evaluated late there, and some of their names may be for type checkers only.
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def _is_context(hint: Any) -> bool:
    if isinstance(hint, str):
        return "ToolContext" in re.split(r"\W+", hint)
    return hint is ToolContext or ToolContext in typing.get_args(hint)


def _has_description(hint: Any) -> bool:
    return any(getattr(extra, "description", None) for extra in getattr(hint, "__metadata__", ()))


def _without_titles(shape: Any) -> Any:
    """The schema without the titles pydantic makes up from names: they cost tokens and say nothing."""
    if isinstance(shape, list):
        return [_without_titles(part) for part in shape]
    if not isinstance(shape, dict):
        return shape
    cleaned = {}
    for key, value in shape.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            cleaned[key] = {name: _without_titles(part) for name, part in value.items()}
        elif key in ("default", "enum", "const", "examples"):
            cleaned[key] = value
        else:
            cleaned[key] = _without_titles(value)
    return cleaned


def to_result(value: Any) -> ToolResult:
    """What a tool returned, as a `ToolResult`: text as it is, the rest as JSON.

    A mapping speaks for itself: `error` that is not `None`, or `success` false, is a failure.
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(value)
    if type(value) is dict or isinstance(value, Mapping):
        error = value.get("error")
        if error is not None or value.get("success") is False:
            said = error if isinstance(error, str) else None if error is None else to_json(error)
            return ToolResult(to_json(value), success=False, error=said or "the tool reports a failure")
    return ToolResult(to_json(value))


def to_json(value: Any) -> str:
    """Compact JSON of what a tool returned; raises `TypeError` for what is not JSON."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
        # Models, lone surrogates, integers over 64 bits: rarer things that the standard encoder and pydantic know.
        from pydantic_core import to_jsonable_python

        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=to_jsonable_python)
