"""GBNF grammars from JSON Schemas: what a model that runs under llama.cpp is able to say.

A grammar is how a very small model is made useful: whatever it samples is a well-formed turn. The part of
JSON Schema understood here is what tools are described with: `type` (also as a list), `properties`,
`required`, `items`, `enum`, `const`, `anyOf`, `oneOf`, `$ref` into the same schema, `minLength`, `maxLength`,
`minItems`, `maxItems`, and a `minimum` of zero or more. What goes beyond (patterns, formats, other bounds) is
left to the tool, which checks its arguments anyway. Everything is bounded in length, since a small model does
not stop by itself: see `Bounds`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from taskmill.errors import ConfigurationError
from taskmill.records import ToolSpec

Calling = Literal["must", "may", "never"]
"""Whether a turn has to be a tool call, may be one, or has to be an answer."""

THINK_OPEN, THINK_CLOSE = "<think>\n", "\n</think>\n"
CALL_OPEN, CALL_CLOSE = "<tool_call>\n", "\n</tool_call>"

MOST_REPEATS = 1000
"""llama.cpp refuses a grammar with more repetitions of one thing than twice this."""


class Bounds(Struct, frozen=True):
    """How much may be said; what is given here is right for a model that does not stop by itself.

    Characters of a `text` argument, `items` of an array, levels of nesting (`depth`), `digits` of a number;
    `thoughts` of so many characters each (0: no thinking), `sentences` of an answer of so many characters each
    (0: an answer is free). `optional` is whether a tool's optional arguments are offered.
    """

    text: int = 160
    items: int = 8
    depth: int = 6
    digits: int = 9
    thoughts: int = 2
    thought: int = 140
    sentences: int = 4
    sentence: int = 160
    optional: bool = False


def turn_grammar(
    tools: Sequence[ToolSpec] = (),
    *,
    calling: Calling = "never",
    thought: str | None = None,
    answer: str | None = None,
    bounds: Bounds | None = None,
) -> str:
    """Grammar of one assistant turn: a think block, then one tool call or a plain answer.

    `thought` is how the first thought has to begin, `answer` how an answer has to; `None` leaves it free. With
    `bounds.thoughts == 0` there is no think block. Raises `ConfigurationError` when a tool's schema allows no
    value at all.
    """
    bounds = bounds or Bounds()
    rules = _Rules(bounds)
    parts = []
    if bounds.thoughts:
        parts.append(rules.add("think", _thoughts(rules, thought)))
    endings = []
    if calling != "never" and tools:
        endings.append(rules.add("call", _call(rules, tools)))
    if calling != "must" or not tools:
        endings.append(rules.add("answer", _answer(bounds, answer)))
    parts.append(endings[0] if len(endings) == 1 else f"({' | '.join(endings)})")
    return rules.text(" ".join(parts))


def value_grammar(schema: Any, *, bounds: Bounds | None = None) -> str:
    """Grammar of the JSON texts that `schema` describes."""
    rules = _Rules(bounds or Bounds())
    return rules.text(_value(rules, schema, schema, 0))


def offered_schema(tool: ToolSpec, *, optional: bool = False) -> dict[str, Any]:
    """The arguments a model is shown and held to: the required ones, or all where none is required.

    Optional ones are left out unless asked for: a tiny model fills every field it sees, with noise.
    """
    schema = msgspec.json.decode(tool.parameters) if bytes(tool.parameters) else {}
    if not isinstance(schema, dict):
        return {"type": "object"}
    properties = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if name in properties]
    if required and not optional:
        schema = {**schema, "properties": {name: properties[name] for name in required}}
    return schema


# -- a turn ---------------------------------------------------------------------------------------------------


def _thoughts(rules: _Rules, opening: str | None) -> str:
    bounds = rules.bounds
    body = rf"[^<>\n.!?]{{8,{bounds.thought}}} [.!?]"
    # A rule of its own: llama.cpp counts what is repeated inside of what is repeated, and refuses large products.
    free = rules.add("thought", f"[A-Z] {body}")
    first = f"{literal(opening + ' ')} {body}" if opening else free
    more = f' (" " {free}){{0,{bounds.thoughts - 1}}}' if bounds.thoughts > 1 else ""
    return f"{literal(THINK_OPEN)} {first}{more} {literal(THINK_CLOSE)}"


def _call(rules: _Rules, tools: Sequence[ToolSpec]) -> str:
    bodies = []
    for tool in tools:
        schema = offered_schema(tool, optional=rules.bounds.optional)
        value = _value(rules, {"type": "object", **schema}, schema, 0)
        head = literal(f'{{"name": {_json(tool.name)}, "arguments": ')
        bodies.append(f'{head} {value} "}}"')
    return f"{literal(CALL_OPEN)} {_either(bodies)} {literal(CALL_CLOSE)}"


def _answer(bounds: Bounds, opening: str | None) -> str:
    # Ends at the end of a sentence when the bound is reached, and wherever the model likes before that. Every
    # text has one derivation only: where it has several, llama.cpp follows them all. It begins with a word and
    # not with the fence of a code block, which is where a tiny model likes to stop.
    start = f"{literal(opening + ' ')} " if opening else ""
    if not bounds.sentences:
        return rf"{start}[^\x00-\x20<] [^\x00]*"
    start += r"[^\x00-\x20<.!?`#*]"
    run = rf"[^<.!?\n]{{0,{bounds.sentence}}}"
    return rf"{start} {run} ([.!?\n] {run}){{0,{bounds.sentences - 1}}} [.!?]?"


# -- values ---------------------------------------------------------------------------------------------------


class _Rules:
    """Rules by name; equal bodies share one rule, so that schemas that repeat themselves stay small."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def add(self, stem: str, body: str) -> str:
        if body not in self._names:
            name = stem if stem not in self._bodies else f"{stem}-{len(self._bodies)}"
            self._bodies[name] = body
            self._names[body] = name
        return self._names[body]

    def text(self, root: str) -> str:
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines) + "\n"


def _value(rules: _Rules, schema: Any, root: Any, depth: int) -> str:
    if schema is False:
        raise ConfigurationError("a schema of `false` allows no value, so no grammar can be made of it")
    if schema is True or not isinstance(schema, Mapping) or depth > rules.bounds.depth:
        return _anything(rules)
    if "$ref" in schema:
        return _value(rules, _resolve(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return literal(_json(schema["const"]))
    if "enum" in schema:
        if not schema["enum"]:
            raise ConfigurationError("a schema with an empty `enum` allows no value")
        return rules.add("choice", _either(literal(_json(value)) for value in schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return rules.add("either", _either(_value(rules, one, root, depth + 1) for one in schema[key]))
    if len(schema.get("allOf", ())) == 1:
        return _value(rules, schema["allOf"][0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        return rules.add(
            "either", _either(_value(rules, {**schema, "type": one}, root, depth + 1) for one in kind)
        )
    match kind:
        case "string":
            return rules.add("text", _text(rules, schema))
        case "integer":
            return rules.add("integer", _integer(schema, rules.bounds))
        case "number":
            return rules.add("number", _integer(schema, rules.bounds) + ' ("." [0-9]{1,6})?')
        case "boolean":
            return rules.add("boolean", '"true" | "false"')
        case "null":
            return '"null"'
        case "array":
            return rules.add("array", _array(rules, schema, root, depth))
        case "object":
            return rules.add("object", _object(rules, schema, root, depth))
        case None if "properties" in schema:
            return rules.add("object", _object(rules, schema, root, depth))
        case _:
            return _anything(rules)


def _anything(rules: _Rules) -> str:
    text = rules.add("text", _text(rules, {}))
    number = rules.add("integer", _integer({}, rules.bounds))
    return rules.add("anything", f'{text} | {number} | "true" | "false" | "null"')


def _text(rules: _Rules, schema: Mapping[str, Any]) -> str:
    asked = min(_count(schema, "minLength", 0), MOST_REPEATS)
    longest = min(_count(schema, "maxLength", rules.bounds.text), max(rules.bounds.text, asked))
    if longest == 0:
        return r'"\"\""'
    # An empty text is what a small model gives when it has nothing to say, and no tool can do anything with it.
    shortest = min(_count(schema, "minLength", 1), longest)
    character = rules.add("character", r"""[^"\\\x00-\x1F\x7F] | "\\" ["\\nt]""")
    return rf'"\"" {character}{{{shortest},{longest}}} "\""'


def _integer(schema: Mapping[str, Any], bounds: Bounds) -> str:
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    sign = "" if isinstance(lowest, int | float) and lowest >= 0 else '"-"? '
    return f'{sign}("0" | [1-9] [0-9]{{0,{bounds.digits - 1}}})'


def _array(rules: _Rules, schema: Mapping[str, Any], root: Any, depth: int) -> str:
    item = _value(rules, schema.get("items", True), root, depth + 1)
    fewest = min(_count(schema, "minItems", 0), MOST_REPEATS)
    most = max(min(_count(schema, "maxItems", rules.bounds.items), rules.bounds.items), fewest)
    if most == 0:
        return '"[]"'
    some = f'{item} (", " {item}){{{max(fewest - 1, 0)},{most - 1}}}'
    return f'"[" {some} "]"' if fewest else f'"[" ({some})? "]"'


def _object(rules: _Rules, schema: Mapping[str, Any], root: Any, depth: int) -> str:
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = [name for name in properties if name in set(schema.get("required") or ())]
    optional = [name for name in properties if name not in set(required)]
    if depth >= rules.bounds.depth:
        optional = []

    def pair(name: str) -> str:
        return f"{literal(_json(name) + ': ')} {_value(rules, properties[name], root, depth + 1)}"

    if required:
        body = ' ", " '.join(pair(name) for name in required)
        for name in optional:
            body += f' (", " {pair(name)})?'
        return f'"{{" {body} "}}"'
    if not optional:
        return '"{}"'
    # The first field that is there has no comma before it: one alternative for each field that may be the first.
    pairs = [rules.add("field", pair(name)) for name in optional]
    starts = [
        " ".join([first, *(f'(", " {later})?' for later in pairs[place + 1 :])])
        for place, first in enumerate(pairs)
    ]
    return f'"{{" ({_either(starts)})? "}}"'


def _resolve(reference: str, root: Any) -> Any:
    found = root
    if not reference.startswith("#"):
        raise ConfigurationError(f"$ref {reference!r} points outside its schema, which can't be followed")
    for step in reference.lstrip("#").strip("/").split("/") if reference.strip("#/") else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or step not in found:
            raise ConfigurationError(f"$ref {reference!r} names nothing in its schema")
        found = found[step]
    return found


def _count(schema: Mapping[str, Any], key: str, default: int) -> int:
    value = schema.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _either(bodies: Iterable[str]) -> str:
    listed = list(dict.fromkeys(bodies))
    return listed[0] if len(listed) == 1 else f"({' | '.join(listed)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def literal(text: str) -> str:
    """`text` as a GBNF string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\x{ord(c):02X}" for c in escaped) + '"'
