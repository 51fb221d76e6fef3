"""Says things that a GBNF grammar allows, at random: what a model under that grammar could say.

Only what `taskmill.models.grammar` writes is understood: literals, character classes, names, groups,
alternatives, and the repetitions `?`, `*`, `{m,n}`.
"""

from __future__ import annotations

import random
import re

TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>"(?:[^"\\]|\\.)*")
      | (?P<chars>\[(?:[^\]\\]|\\.)+\])
      | (?P<repeat>\{\d+,\d+\})
      | (?P<name>[a-z][a-z0-9-]*)
      | (?P<mark>[()|?*])
    )""",
    re.VERBOSE,
)
ANY_CHARACTERS = "ABz 09-_/\\\"'<>{}[].,:;!?=\n\té中😀|"
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class Speaker:
    """Speaks `grammar`. `often` is the chance that something optional is said, and how long repetitions get."""

    def __init__(self, grammar: str, rng: random.Random, often: float = 0.5) -> None:
        self.rng = rng
        self.often = often
        self.rules = {}
        for line in grammar.rstrip("\n").split("\n"):
            name, _, body = line.partition(" ::= ")
            self.rules[name] = self._alternatives(_tokens(body))

    def say(self, rule: str = "root") -> str:
        return self._say(self.rules[rule])

    # -- reading the grammar

    def _alternatives(self, tokens):
        options = [[]]
        while tokens and tokens[0] != ("mark", ")"):
            kind, value = tokens.pop(0)
            if (kind, value) == ("mark", "|"):
                options.append([])
                continue
            if kind == "mark":
                assert value == "(", f"unexpected {value!r}"
                item = self._alternatives(tokens)
                assert tokens.pop(0) == ("mark", ")")
            else:
                item = (kind, value)
            low, high = 1, 1
            if tokens and tokens[0] == ("mark", "?"):
                tokens.pop(0)
                low, high = 0, 1
            elif tokens and tokens[0] == ("mark", "*"):
                tokens.pop(0)
                low, high = 0, 1000
            elif tokens and tokens[0][0] == "repeat":
                low, high = (int(n) for n in tokens.pop(0)[1][1:-1].split(","))
            assert 0 <= low <= high
            options[-1].append((item, low, high))
        return ("either", options)

    # -- speaking

    def _say(self, item) -> str:
        kind, value = item
        if kind == "either":
            return "".join(
                self._say(part)
                for part, low, high in self.rng.choice(value)
                for _ in range(self._times(low, high))
            )
        if kind == "name":
            return self._say(self.rules[value])
        if kind == "text":
            return _unescaped(value[1:-1])
        return self.rng.choice(_characters(value[1:-1]))

    def _times(self, low: int, high: int) -> int:
        if high == 1:
            return max(low, int(self.rng.random() < self.often))
        return high if self.rng.random() < 0.1 else min(high, low + self.rng.randrange(6))


def _tokens(body: str):
    tokens, place = [], 0
    while place < len(body.rstrip()):
        found = TOKEN.match(body, place)
        assert found, f"not understood: {body[place : place + 40]!r}"
        tokens.append((found.lastgroup, found[found.lastgroup]))
        place = found.end()
    return tokens


def _unescaped(text: str) -> str:
    return re.sub(r"\\(x[0-9A-Fa-f]{2}|.)", _character, text)


def _character(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) == 3 else ESCAPES.get(code, code)


def _characters(body: str) -> list[str]:
    negated = body.startswith("^")
    units = [_unescaped(unit) for unit in re.findall(r"\\x[0-9A-Fa-f]{2}|\\.|[^\\]", body.removeprefix("^"))]
    raw = re.findall(r"\\x[0-9A-Fa-f]{2}|\\.|[^\\]", body.removeprefix("^"))
    named, place = set(), 0
    while place < len(units):
        if raw[place + 1 : place + 2] == ["-"] and place + 2 < len(units):
            named.update(chr(c) for c in range(ord(units[place]), ord(units[place + 2]) + 1))
            place += 3
        else:
            named.add(units[place])
            place += 1
    return [c for c in ANY_CHARACTERS if c not in named] if negated else sorted(named)
