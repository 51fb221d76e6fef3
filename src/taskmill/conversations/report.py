"""What a run of conversations came to: a result for each job, read from disk where it was stored there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from taskmill.conversations.conversation import Conversation
from taskmill.conversations.health import Health, health_lines
from taskmill.conversations.record import Held, decode_head, decode_held
from taskmill.errors import ConfigurationError, StoreError
from taskmill.programs.conversation.transcript import Transcript
from taskmill.store.index import JobIndex, StoredRow
from taskmill.store.run import RunDirectory

T = TypeVar("T")

Rebuild = Callable[[Held], Conversation]


class RunResult:
    """How one job ended. `record` has everything that was recorded of it."""

    def __init__(self, record: Held, rebuild: Rebuild) -> None:
        self.record = record
        self._rebuild = rebuild

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.record.job_id

    @cached_property
    def conversation(self) -> Conversation:
        """The conversation as it ended; it can be sampled, branched and continued."""
        return self._rebuild(self.record)

    @cached_property
    def transcript(self) -> Transcript:
        """What was said; of a job that failed, before it did."""
        return Transcript(self.record.transcript)

    @property
    def analysis(self) -> Any:
        """What the analyzer said of it."""
        return self.record.analysis

    @property
    def row(self) -> Any:
        """The row of data it was about."""
        return self.record.row

    @property
    def error(self) -> str | None:
        """Class and message of what failed it; `None` for a job that is complete."""
        error = self.record.error
        if error is not None:
            return f"{error.type}: {error.message}"
        return None if self.record.state == "completed" else self.record.state

    @property
    def device(self) -> str | None:
        """Where its local models were."""
        return self.record.device

    @property
    def tokens_generated(self) -> int:
        """Tokens that were generated in it; 0 if it failed."""
        return self.record.tokens_generated if self.record.state == "completed" else 0

    def __repr__(self) -> str:
        how = self.error or f"{len(self.record.transcript)} turns"
        return f"<RunResult {self.job_id}: {how}>"


class MemoryResults(Mapping[str, RunResult]):
    """Results that are kept in memory, in the order of the plan."""

    def __init__(self, index: JobIndex) -> None:
        self._index = index
        self._held: dict[str, tuple[Held, Conversation]] = {}

    def put(self, held: Held, conversation: Conversation) -> None:
        """Keep one, with the conversation it began as."""
        self._held[held.job_id] = (held, conversation)

    def __getitem__(self, job_id: str) -> RunResult:
        held, began = self._held[job_id]
        return RunResult(held, lambda held: began.set(transcript=held.transcript))

    def __iter__(self) -> Iterator[str]:
        return (id for id in self._index.jobs() if id in self._held)

    def __len__(self) -> int:
        return len(self._held)


class StoredResults(Mapping[str, RunResult]):
    """Results that are read from the run's log when they are asked for, in the order of the plan."""

    def __init__(self, directory: RunDirectory, index: JobIndex, rebuild: Rebuild) -> None:
        self._directory = directory
        self._index = index
        self._rebuild = rebuild

    def __getitem__(self, job_id: str) -> RunResult:
        key = self._index.key_of(job_id)
        held = None if key is None else self._at(key)
        if held is None and key is not None and self._index.stored(key) is not None:
            # A later session has moved the rows: what they are now is what counts.
            self._index.forget_places()
            read_index(self._directory, self._index)
            held = self._at(key)
        if held is None:
            raise KeyError(job_id)
        if held.job_id != job_id:  # the row stands at another place of the data now
            held = msgspec.structs.replace(held, job_id=job_id)
        return RunResult(held, self._rebuild)

    def _at(self, key: str) -> Held | None:
        """The row of a job where the index has it, if it is there."""
        row = self._index.stored(key)
        if row is None or row.offset < 0:
            return None
        try:
            held = decode_held(self._directory.conversation_at(row.offset))
        except (msgspec.DecodeError, RecursionError):
            return None
        return held if held.id == key else None

    def __iter__(self) -> Iterator[str]:
        return self._index.jobs(with_rows=True)

    def __len__(self) -> int:
        return self._index.count(with_rows=True)


class Part(Mapping[str, T]):
    """One thing of each complete result, by job id; read when it is asked for."""

    def __init__(self, results: Mapping[str, RunResult], part: Callable[[RunResult], T]) -> None:
        self._results = results
        self._part = part

    def __getitem__(self, job_id: str) -> T:
        result = self._results[job_id]
        if result.error is not None:
            raise KeyError(job_id)
        return self._part(result)

    def __iter__(self) -> Iterator[str]:
        return (job_id for job_id, result in self._results.items() if result.error is None)

    def items(self) -> Any:
        """Pairs of id and part, each result read once."""
        return ((id, self._part(result)) for id, result in self._results.items() if result.error is None)

    def values(self) -> Any:
        """The parts, each result read once."""
        return (part for _, part in self.items())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self._results)} results, read when asked for>"


class RunReport:
    """What a run came to.

    `results` maps job ids to results, failed ones and those of earlier sessions included. `skipped` are the ids of jobs
    that were done before. `path` is the run's directory, where there is one.
    """

    def __init__(
        self,
        results: Mapping[str, RunResult],
        skipped: Collection[str],
        path: Path | None = None,
    ) -> None:
        self.results = results
        self.skipped = skipped
        self.path = path

    @cached_property
    def failed(self) -> list[str]:
        """Ids of the jobs that have an error."""
        return [id for id, result in self.results.items() if result.error is not None]

    def transcripts(self) -> Mapping[str, Transcript]:
        """What was said in each complete conversation."""
        return Part(self.results, lambda result: result.transcript)

    def analyses(self) -> Mapping[str, Any]:
        """What the analyzer said of each complete conversation."""
        return Part(self.results, lambda result: result.analysis)

    def conversations(self) -> Mapping[str, Conversation]:
        """Each complete conversation, to be sampled or continued."""
        return Part(self.results, lambda result: result.conversation)

    @cached_property
    def health(self) -> dict[str, Any]:
        """What was odd, by participant: silent turns, turns cut at their limit, refusals, placeholders."""
        health = Health()
        for result in self.results.values():
            health.add(result.record.transcript)
        return health.summary()

    def __str__(self) -> str:
        total = len(self.results)
        lines = [
            f"{total:,} conversations, {len(self.skipped):,} of them from before, {len(self.failed):,} failed"
        ]
        return "\n".join([*lines, *health_lines(self.health)])

    def __repr__(self) -> str:
        return f"<RunReport of {len(self.results)} results>"

    @classmethod
    def read(cls, path: Path | str) -> RunReport:
        """The report of a run that is stored in `path`, finished or not. Needs no lock and changes nothing."""
        directory = RunDirectory(path)
        directory.require()
        stored = directory.read_config() or {}
        if stored.get("kind") != KIND:
            raise StoreError(f"the run in {str(path)!r} is not one of conversations")
        index = JobIndex()
        read_index(directory, index, plan=True)
        return cls(StoredResults(directory, index, rebuilder(stored["recipes"])), [], Path(path))


KIND = "conversations"


def rebuilder(recipes: Mapping[str, Any], live: Mapping[str, Conversation] | None = None) -> Rebuild:
    """From a record to its conversation, by the run's recipes or those that are at hand."""

    def rebuild(held: Held) -> Conversation:
        if held.recipe is not None:
            base = Conversation.from_recipe(held.recipe)
        elif live is not None and (held.name or "") in live:
            base = live[held.name or ""]
        elif (held.name or "") in recipes:
            base = Conversation.from_recipe(recipes[held.name or ""])
        else:
            raise ConfigurationError(f"the recipe of job {held.job_id!r} is not stored")
        about = base.about(held.row, stream=held.stream, seed=held.seed)
        about._transcript = Transcript(held.transcript)
        return about

    return rebuild


def read_index(directory: RunDirectory, index: JobIndex, *, plan: bool = False) -> int:
    """Note where the rows of a log stand; gives how many are not done, damaged ones among them."""
    open_rows = 0
    for offset, line in directory.read_conversations():
        try:
            head = decode_head(line)
        except (msgspec.DecodeError, RecursionError):
            open_rows += 1
            continue
        done = head.state == "completed"
        open_rows += not done
        index.store(head.id, StoredRow(offset, done, head.attempt))
        if plan:
            index.plan(head.job_id, head.id, reused=True)
    return open_rows
