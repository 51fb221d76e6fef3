"""JSON as it is stored: one value a line, valid for the strictest reader, and hashed in one canonical form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

MAX_DEPTH = 200
"""Levels of nesting a stored value may have. Common readers give up between 250 and 1000."""

_BLOCK = 1 << 20
_MAX_INTEGER_BITS = 14_000  # Python turns integers of up to 4300 digits into text, and no longer ones.


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(
        f"a stored record can't hold a {type(value).__module__}.{type(value).__qualname__}: {value!r:.200}"
    )


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_canonical_encoder = msgspec.json.Encoder(enc_hook=_plain, order="deterministic")
_decoder = msgspec.json.Decoder()


def encode_row(value: Any, *, finite: bool = False) -> bytes:
    """`value` as one line of JSON, newline included, that any strict reader takes.

    JSON has no word for some values, and a record that can't be written is a record lost, so they are kept as
    well as they can be. A float that is not finite becomes `null`, with a note beside it in the same object:
    `{"loss": null, "loss__nonfinite": "nan"}`; inside lists the note stands in the object that owns the list
    and maps positions: `{"scores": [1, null], "scores__nonfinite": {"1": "inf"}}`. What is nested deeper than
    `MAX_DEPTH`, or is an integer of thousands of digits, becomes `null` with a note `<key>__omitted`. An
    unpaired surrogate becomes the six characters `\\udXXX`, because the escape itself is refused by strict readers.

    `finite` vouches that no float of `value` is NaN or infinite, which saves looking.

    Raises `TypeError` for objects that are no data (name of the type in the message).
    """
    return _encode(value, _encoder, finite=finite) + b"\n"


def encode_json(value: Any) -> bytes:
    """`value` as an indented JSON text for a file that people read, with the same care as `encode_row`."""
    return msgspec.json.format(_encode(value, _encoder), indent=2) + b"\n"


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value: keys sorted, no white space. Equal values give equal bytes in every process."""
    return _encode(value, _canonical_encoder)


def content_hash(value: Any, *, finite: bool = False) -> bytes:
    """16 bytes that stand for a JSON value: BLAKE2b of its canonical spelling. `finite` as for `encode_row`."""
    return blake2b(_encode(value, _canonical_encoder, finite=finite), digest_size=16).digest()


def _encode(value: Any, encoder: msgspec.json.Encoder, *, finite: bool = False) -> bytes:
    try:
        line = encoder.encode(value)
    except (UnicodeEncodeError, RecursionError, ValueError):
        return encoder.encode(_clean(value, {}, "", 0))
    # The encoder writes non-finite floats as null without a word; only a line with a null can hold one.
    if not finite and b"null" in line and _has_nonfinite(value):
        return encoder.encode(_clean(value, {}, "", 0))
    return line


def _has_nonfinite(root: Any) -> bool:
    stack = [root]
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind is str or kind is int or value is None or kind is bool:
            continue
        if kind is dict:
            stack.extend(value.values())
        elif kind is list or kind is tuple:
            stack.extend(value)
        elif isinstance(value, float):
            if not isfinite(value):
                return True
        elif isinstance(value, Struct):
            stack.extend(getattr(value, name) for name in value.__struct_fields__)
        elif isinstance(value, Mapping):
            stack.extend(value.values())
    return False


def without_surrogates(text: str) -> str:
    """`text` with each unpaired surrogate spelled out (`\\ud83d`), so that it can be sent and stored as UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _clean(value: Any, notes: dict[str, str], path: str, depth: int) -> Any:
    """`value` without what JSON can't say. `notes` gets what was taken out, by position `path` in the owning object."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, float):
        if isfinite(value):
            return value
        notes[path] = "nan" if value != value else "inf" if value > 0 else "-inf"
        return None
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        notes[path] = f"an integer of {value.bit_length()} bits"
        return None
    if isinstance(value, Struct):
        value = _fields(value)
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return value
    if depth >= MAX_DEPTH:
        notes[path] = f"nested deeper than {MAX_DEPTH} levels"
        return None
    if isinstance(value, Mapping):
        return _clean_object(value, depth)
    return [_clean(item, notes, f"{path}.{n}" if path else str(n), depth + 1) for n, item in enumerate(value)]


def _clean_object(value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
    cleaned: dict[Any, Any] = {}
    for key, item in value.items():
        name = _clean(key, {}, "", 0) if isinstance(key, str) else key
        notes: dict[str, str] = {}
        cleaned[name] = _clean(item, notes, "", depth + 1)
        if not notes:
            continue
        for suffix, chosen in (
            ("nonfinite", {place: note for place, note in notes.items() if note in ("nan", "inf", "-inf")}),
            ("omitted", {place: note for place, note in notes.items() if note not in ("nan", "inf", "-inf")}),
        ):
            if chosen:
                cleaned[f"{name}__{suffix}"] = chosen.get("", chosen)
    return cleaned


def _fields(record: Struct) -> dict[str, Any]:
    """A struct as the encoder would write it, one level deep."""
    config = record.__struct_config__
    written: dict[str, Any] = {}
    if config.tag is not None:
        written[config.tag_field or "type"] = config.tag
    for info in msgspec.structs.fields(record):
        value = getattr(record, info.name)
        if config.omit_defaults:
            default = info.default_factory() if callable(info.default_factory) else info.default
            if type(default) is type(value) and default == value:
                continue
        written[info.encode_name] = value
    return written


# -- reading --------------------------------------------------------------------------------------------------


def lines(path: Path, start: int = 0, *, whole: bool = False) -> Iterator[tuple[int, bytes]]:
    """`(byte offset, line without its newline)` for each line of a file, from the byte `start` on.

    Only the byte 0x0A ends a line. Memory is one block and the longest line. A last line without newline is
    given too, unless `whole` asks for complete lines alone (a live run may be in the middle of writing it):
    then only if it is a JSON object or array, to which nothing can be missing.
    """
    with open(path, "rb", buffering=_BLOCK) as file:
        file.seek(start)
        offset = start
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line[:-1]
            elif not whole or is_whole(line):
                yield offset, line
            offset += len(line)


def is_whole(line: bytes) -> bool:
    """Whether `line` is a complete JSON object or array. (A bare number never surely is: `12` may begin `123`.)"""
    if line.lstrip(b" \t\r")[:1] not in (b"{", b"["):
        return False
    try:
        _decoder.decode(line)
    except msgspec.ValidationError:  # a number beyond the fast decoder's range, and the rest not looked at
        return _is_json(line)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8"), parse_int=float)
    except (ValueError, RecursionError):
        return False
    return True


def strict_loads(line: bytes) -> Any:
    """The value of a line from outside, or `ValueError` with the reason in words a person can use.

    Refused, beyond what is no JSON: bytes that are not UTF-8, a field name that stands twice in one object, NaN and
    infinities (also as `1e999`), unpaired surrogates, nesting deeper than `MAX_DEPTH`.
    """
    try:
        value = _decoder.decode(line)
        # Decoding keeps the last of two equal names. Where every `":` of the text is accounted for by a decoded
        # name, there were none; a text that holds more of them (or spaces before colons) takes the slow way.
        if line.count(b'":') == _count_names(value, 0) and not _has_spaced_colon(line):
            return value
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        pass
    return _loads_with_reasons(line)


def _has_spaced_colon(line: bytes) -> bool:
    return b" :" in line or b"\t:" in line or b"\r:" in line or b"\n:" in line


def _count_names(value: Any, depth: int) -> int:
    if depth > MAX_DEPTH:
        raise RecursionError
    if type(value) is dict:
        count = len(value)
        for item in value.values():
            if type(item) is dict or type(item) is list:
                count += _count_names(item, depth + 1)
        return count
    if type(value) is list:
        return sum(
            _count_names(item, depth + 1) for item in value if type(item) is dict or type(item) is list
        )
    return 0


def _loads_with_reasons(line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
        _count_names(value, 0)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    _refuse_surrogates(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the field {name!r} stands twice in one object")
            seen.add(name)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:40]} is beyond the range of a float")
    return number


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"an integer of {len(text)} digits is too long") from None


def _refuse_surrogates(root: Any) -> None:
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value)
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"an unpaired surrogate (\\u{ord(value[error.start]):04x}) in a text"
                ) from None


__all__ = [
    "MAX_DEPTH",
    "canonical",
    "content_hash",
    "encode_json",
    "encode_row",
    "is_whole",
    "lines",
    "strict_loads",
    "without_surrogates",
]
