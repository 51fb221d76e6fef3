"""From conversations to jobs: one for each row and copy, with an id for people and a key that depends on content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from taskmill.conversations.conversation import Conversation
from taskmill.errors import ConfigurationError
from taskmill.programs.conversation.stop import count
from taskmill.store.index import JobIndex
from taskmill.store.jsonl import content_hash


class Job(NamedTuple):
    """One conversation to be held. `id` names it in reports; `key` is what it is, wherever it stands in the data.

    `recipe` is the name of the conversation whose recipe the run keeps; a job that has none brings its own.
    """

    id: str
    key: str
    conversation: Conversation
    recipe: str | None = None


class Plan(NamedTuple):
    """The jobs of a run, drawn one at a time; `total` where it is known, `recipes` by name where the run keeps them."""

    jobs: Iterator[Job]
    total: int | None
    recipes: dict[str, Conversation] | None


def plan_of(
    named: Sequence[tuple[str, Conversation]],
    n: int | None,
    limit: int | None,
    index: JobIndex,
    *,
    alone: bool = False,
) -> Plan:
    """The jobs of conversations: copies of each, of each row where it has data.

    One that runs `alone` has no name before the ids of its jobs. Raises `ConfigurationError` for what can't be meant.
    """
    if n is not None:
        count("the run", "n", n)
    if limit is not None:
        count("the run", "limit", limit)
    _refuse_twice([name for name, _ in named], "conversation")
    for name, conversation in named:
        if conversation._data is None and conversation.lineup.needs_row and not conversation._has_row:
            raise ConfigurationError(
                f"the conversation {name!r} is about a row of data, and has none: give it with .data(rows)"
            )

    def jobs() -> Iterator[Job]:
        for name, conversation in named:
            yield from _jobs(name, conversation, n, limit, index, alone=alone)

    sizes = [_rows_in(conversation, limit) for _, conversation in named]
    total = None if None in sizes else sum(size for size in sizes if size is not None) * (n or 1)
    return Plan(jobs(), total, dict(named))


def plan_of_jobs(jobs: Iterable[tuple[str, Conversation]]) -> Plan:
    """The jobs that a caller made. Where they are a list, all are looked at before the first one runs."""
    is_list = isinstance(jobs, Sequence)
    if isinstance(jobs, Sequence):
        _refuse_twice([_pair(pair)[0] for pair in jobs], "job")

    def made() -> Iterator[Job]:
        for pair in jobs:
            id, conversation = _pair(pair)
            yield Job(
                id,
                _digest("job", id),
                conversation.about(
                    conversation.row,
                    place=conversation._place,
                    stream=conversation._stream or id,
                    seed=conversation._seed,
                ),
            )

    return Plan(made(), len(jobs) if is_list else None, None)  # type: ignore[arg-type]


def _jobs(
    name: str, conversation: Conversation, n: int | None, limit: int | None, index: JobIndex, *, alone: bool
) -> Iterator[Job]:
    first = conversation.lineup.seed if conversation._seed is None else conversation._seed
    lead = "" if alone else f"{name}/"
    if conversation._data is None:
        stream = conversation._stream
        for copy in range(n or 1):
            held = conversation.about(
                conversation.row, place=conversation._place, stream=stream, seed=first + copy
            )
            yield Job(f"{lead}rollout_{copy:04d}", _digest(name, stream, str(copy)), held, name)
        return
    for number, row in enumerate(islice(conversation._data.draw(), limit)):
        content = _content(row)
        equals = index.occurrence(f"{name}\n{content}")
        stream = f"{content}:{equals}" if equals else content
        id = f"{lead}row_{number:05d}"
        for copy in range(n or 1):
            held = conversation.about(row, place=f"row {number}", stream=stream, seed=first + copy)
            yield Job(id if n is None else f"{id}/{copy:04d}", _digest(name, stream, str(copy)), held, name)


def _content(row: Any) -> str:
    """What a row is, as a hash of its content; a row that is no data has the hash of what it shows itself as."""
    try:
        return content_hash(row).hex()
    except (TypeError, ValueError, RecursionError):
        return blake2b(repr(row).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _digest(*parts: str) -> str:
    return blake2b("\n".join(parts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _rows_in(conversation: Conversation, limit: int | None) -> int | None:
    if conversation._data is None:
        return 1
    rows = conversation._data.rows
    try:
        size = len(rows)  # type: ignore[arg-type]
    except TypeError:
        return None
    return size if limit is None else min(size, limit)


def _pair(pair: Any) -> tuple[str, Conversation]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], Conversation):
        raise ConfigurationError(f"run_jobs takes pairs of a job id and a Conversation, not {pair!r:.200}")
    id, conversation = pair
    if not isinstance(id, str) or not id:
        raise ConfigurationError(f"a job id is a text that is not empty, not {id!r:.100}")
    if conversation._data is not None:
        raise ConfigurationError(f"job {id!r} has data; run([conversation]) makes a job of each of its rows")
    return id, conversation


def _refuse_twice(names: Sequence[str], what: str) -> None:
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ConfigurationError(
            f"two {what}s of this run are called {twice!r}: give one of them another name"
        )
