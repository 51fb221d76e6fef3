from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from taskmill.errors import ConfigurationError, ToolArgumentsError
from taskmill.tools import ToolContext, ToolResult, tool


@dataclass
class Point:
    x: int
    y: int = 0


def schema_of(made) -> dict[str, Any]:
    return json.loads(bytes(made.spec.parameters))


def test_signature_and_docstring_become_the_specification():
    @tool
    def look_up(
        word: str,
        limit: int = 3,
        order: Literal["first", "last"] = "first",
        *,
        depth: Annotated[int, Field(ge=1, description="How deep.")] = 1,
        context: ToolContext,
    ) -> str:
        """Look a word up.

        In the big book.

        Args:
            word: The word.
            limit: How many at most,
                over two lines.
        """
        return word

    assert look_up.spec.name == "look_up"
    assert look_up.spec.description == "Look a word up.\n\nIn the big book."
    assert schema_of(look_up) == {
        "type": "object",
        "additionalProperties": False,
        "required": ["word"],
        "properties": {
            "word": {"type": "string", "description": "The word."},
            "limit": {"type": "integer", "default": 3, "description": "How many at most,\nover two lines."},
            "order": {"type": "string", "enum": ["first", "last"], "default": "first"},
            "depth": {"type": "integer", "default": 1, "minimum": 1, "description": "How deep."},
        },
    }
    assert look_up("still a function", context=None) == "still a function"


def test_options_of_the_decorator():
    @tool(name="other-name", timeout=3, exclusive=True, description="Said here.")
    def something() -> None: ...

    assert (something.spec.name, something.timeout, something.exclusive) == ("other-name", 3.0, True)
    assert something.spec.description == "Said here."
    assert schema_of(something) == {"type": "object", "additionalProperties": False, "properties": {}}


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "10", True])
def test_a_timeout_that_is_no_deadline_is_refused(timeout):
    with pytest.raises(ConfigurationError, match="timeout of tool 'wait'"):
        tool(name="wait", timeout=timeout)(lambda: None)


def test_functions_that_cannot_be_tools_are_refused():
    with pytest.raises(ConfigurationError, match=r"needs a name of 1 to 64"):
        tool(lambda: None)
    with pytest.raises(ConfigurationError, match="'rest' can't be given by name"):

        @tool
        def f(*rest): ...

    with pytest.raises(ConfigurationError, match="decorate a bound method"):

        class Shelf:
            @tool
            def take(self, book: str): ...


async def test_a_bound_method_is_a_tool(context):
    class Shelf:
        books = ("a", "b")

        def take(self, number: int) -> str:
            return self.books[number]

    assert (await tool(Shelf().take).call({"number": 1}, context)).content == "b"


async def test_the_context_is_filled_in_and_not_shown(context):
    @tool
    async def who(context: ToolContext | None = None) -> str:
        return context.rollout_id

    assert schema_of(who)["properties"] == {}
    assert (await who.call({}, context)).content == "rollout"


@tool
def typed(
    number: int = 0,
    share: float = 0.0,
    text: str = "",
    flag: bool = False,
    items: list[str] | None = None,
    point: Point | None = None,
    table: dict[str, int] = {},  # noqa: B006 - a shared default must not leak between calls
) -> dict[str, Any]:
    table["seen"] = table.get("seen", 0) + 1
    return {
        "number": number,
        "share": share,
        "text": text,
        "flag": flag,
        "items": items,
        "point": point,
        "table": table,
    }


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"number": "12"}, "number", 12),
        ({"number": 3.0}, "number", 3),
        ({"share": "0.5"}, "share", 0.5),
        ({"text": 12}, "text", "12"),
        ({"flag": "true"}, "flag", True),
        ({"flag": "no"}, "flag", False),
        ({"items": '["a", "b"]'}, "items", ["a", "b"]),
        ({"items": None}, "items", None),
        ({"number": None}, "number", 0),
        ({"point": '{"x": 1}'}, "point", {"x": 1, "y": 0}),
        ({"point": {"x": "1", "y": 2}}, "point", {"x": 1, "y": 2}),
        ({}, "table", {"seen": 1}),
    ],
)
async def test_what_is_meant_is_accepted(context, given, name, value):
    for _ in range(2):
        assert json.loads((await typed.call(given, context)).content)[name] == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"number": "many"}, r"argument 'number': .*integer.*got 'many'"),
        ({"number": 2.5}, r"argument 'number': .*integer"),
        ({"nubmer": 2}, r"no argument 'nubmer' \(did you mean 'number'\?\)"),
        ({"point": {"y": 2}}, r"argument 'point.*x'"),
        ({"items": "a, b"}, r"argument 'items': .*list.*got 'a, b'"),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_the_field_and_what_would_do(context, given, said):
    with pytest.raises(ToolArgumentsError, match=said) as raised:
        await typed.call(given, context)
    assert "typed takes number (integer, optional), share (number, optional)" in str(raised.value)


async def test_a_missing_argument_is_named(context):
    @tool
    def need(path: str) -> None: ...

    with pytest.raises(ToolArgumentsError, match=r"argument 'path' is missing. need takes path \(string\)\."):
        await need.call({}, context)


async def test_arguments_may_have_any_name(context):
    @tool
    def odd(schema: str, copy: int, _private: int, model_config: str, **rest: int) -> Any:
        return [schema, copy, _private, model_config, rest]

    given = {"schema": "s", "copy": 1, "_private": 2, "model_config": "m", "more": 3}
    assert json.loads((await odd.call(given, context)).content) == ["s", 1, 2, "m", {"more": 3}]


@pytest.mark.parametrize(
    ("returned", "content", "success"),
    [
        ("text", "text", True),
        ('{"error": "only a text"}', '{"error": "only a text"}', True),
        (None, "null", True),
        ([1, "ü"], '[1,"ü"]', True),
        ((1, 2), "[1,2]", True),
        ({"error": None, "rows": 1}, '{"error":null,"rows":1}', True),
        ({"success": True}, '{"success":true}', True),
        ({"success": False}, '{"success":false}', False),
        ({"error": "no such row"}, '{"error":"no such row"}', False),
        ({"error": {"code": 4}}, '{"error":{"code":4}}', False),
        (Point(1), '{"x":1,"y":0}', True),
        (2**80, str(2**80), True),
        ({"a": "\ud83d"}, '{"a":"\ud83d"}', True),
        (ToolResult("x", success=False, error="y"), "x", False),
    ],
)
async def test_what_a_tool_returns(context, returned, content, success):
    @tool
    def give() -> Any:
        return returned

    result = await give.call({}, context)
    assert (result.content, result.success) == (content, success)


async def test_the_error_a_tool_reports_is_kept(context):
    assert (await tool(name="t")(lambda: {"error": "no such row"}).call({}, context)).error == "no such row"
    assert (await tool(name="t")(lambda: {"error": {"code": 4}}).call({}, context)).error == '{"code":4}'


async def test_a_result_that_is_no_json_is_an_error(context):
    with pytest.raises(Exception, match="object"):
        await tool(name="t")(lambda: object()).call({}, context)


async def test_plain_functions_run_in_a_thread_and_async_ones_on_the_loop(context):
    plain = tool(name="plain")(lambda: threading.current_thread().name)

    @tool
    async def on_loop() -> str:
        return threading.current_thread().name

    assert (await plain.call({}, context)).content.startswith("taskmill-tool-")
    assert (await on_loop.call({}, context)).content == threading.main_thread().name


def test_a_type_nobody_defined_is_named_when_the_tool_is_used():
    @tool
    def f(x: NotThere) -> None: ...  # noqa: F821

    with pytest.raises(ConfigurationError, match="'NotThere'"):
        f.spec  # noqa: B018


def test_importing_and_decorating_needs_no_pydantic():
    code = (
        "import sys, taskmill\n"
        "assert 'msgspec' not in sys.modules\n"
        "@taskmill.tool\n"
        "def f(x: int): 'Doc.'\n"
        "heavy = {'pydantic', 'docstring_parser', 'mcp', 'aiohttp', 'regex', 'json_repair'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "f.spec\n"
        "assert 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
