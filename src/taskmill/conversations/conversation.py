"""`Conversation`: a recipe, a dialogue that can be held turn by turn, and many rollouts of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from taskmill.conversations.blocking import portal, wait_for
from taskmill.conversations.models import OpenModels
from taskmill.errors import ConfigurationError, StoreError
from taskmill.programs.conversation.context import ContextPolicy, Refuse
from taskmill.programs.conversation.dialogue import Dialogue, Services
from taskmill.programs.conversation.lineup import MODERATOR, Hook, Lineup
from taskmill.programs.conversation.order import SpeakingPolicy
from taskmill.programs.conversation.participant import Participant, Visibility
from taskmill.programs.conversation.recipes import as_recipe, from_recipe
from taskmill.programs.conversation.stop import StopCondition, all_of, ambient
from taskmill.programs.conversation.templates import Template
from taskmill.programs.conversation.transcript import Message, Transcript
from taskmill.store.jsonl import encode_json

if TYPE_CHECKING:
    from taskmill.conversations.report import RunReport
    from taskmill.models.base import Model
    from taskmill.sandbox.base import Sandbox

T = TypeVar("T")

FORMAT = 1


class Data:
    """The rows that conversations are about: any iterable, drawn row by row."""

    def __init__(self, rows: Iterable[Any]) -> None:
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise ConfigurationError(
                f"data(…) takes rows: a list, a generator or a dataset, not {rows!r:.100}"
            )
        self.rows = rows
        self._is_used = False

    def draw(self) -> Iterator[Any]:
        """The rows. Raises `ConfigurationError` for an iterator that an earlier rollout has drawn from."""
        rows = iter(self.rows)
        if rows is self.rows:
            if self._is_used:
                raise ConfigurationError(
                    "this data is an iterator that an earlier rollout has drawn from, so rows would be missing: "
                    "give it anew, .data(rows), or as a list"
                )
            self._is_used = True
        return rows


class Conversation:
    """A conversation between participants.

    Until it is run it is a recipe; `run`, `step` and their like hold it, and `rollout` holds many copies of it, or
    one for each row of its `data`, without touching it. Methods that change the recipe give a copy:

        pair = Conversation([ann, bob], shared_context=dataset_field("question")).turns(6).seed(3)
        report = pair.data(rows).analyzer(grade).rollout(out_dir="runs/pair")

    `shared_context` is said by the moderator before the first turn, `shared_system_prompt` stands in every
    participant's system block after what only that one is told. See `Lineup` for the rest.
    """

    def __init__(
        self,
        participants: Sequence[Participant],
        shared_context: Template | None = None,
        shared_system_prompt: Template | None = None,
        *,
        turns: int | None = None,
        until: StopCondition | None = None,
        first: str | None = None,
        order: SpeakingPolicy | None = None,
        context: ContextPolicy = Refuse(),  # noqa: B008 - frozen
        hooks: Sequence[Hook] = (),
        reasoning_visibility: Visibility = "none",
        moderator: str = MODERATOR,
        seed: int = 0,
        analyzer: Any = None,
        name: str | None = None,
        data: Iterable[Any] | None = None,
        transcript: Iterable[Any] = (),
    ) -> None:
        self._lineup = Lineup(
            participants=participants,  # type: ignore[arg-type]  # made a tuple there
            shared_context=shared_context,
            shared_system_prompt=shared_system_prompt,
            turns=turns,
            until=until,
            first=first,
            order=order,
            context=context,
            hooks=hooks,  # type: ignore[arg-type]
            reasoning_visibility=reasoning_visibility,
            moderator=moderator,
            seed=seed,
            analyzer=analyzer,
        )
        self._saved = SavedLineup()
        self._name = _name(name)
        self._data = None if data is None else Data(data)
        self._transcript = Transcript(transcript)
        self._row: Any = None
        self._has_row = False
        self._place = "the row"
        self._stream = ""
        self._seed: int | None = None
        self._also: StopCondition | None = None
        self._bound: Bound | None = None

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def lineup(self) -> Lineup:
        """The recipe."""
        return self._lineup

    @property
    def participants(self) -> tuple[Participant, ...]:
        """Who takes part, in speaking order."""
        return self._lineup.participants

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return self._lineup.names

    @property
    def transcript(self) -> Transcript:
        """What was said so far."""
        return self._transcript

    @property
    def row(self) -> Any:
        """The row of data that this conversation is about, for analyzers, hooks and conditions."""
        return self._row

    @property
    def new_turns(self) -> int:
        """How many turns it has."""
        return len(self._transcript)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Conversation of {', '.join(self.names)}, {len(self._transcript)} turns>"

    def _state(self) -> tuple[Any, ...]:
        rows = None if self._data is None else self._data.rows
        return (
            type(self),
            self._lineup,
            self._name,
            rows,
            self._transcript,
            self._row,
            self._seed,
            self._stream,
        )

    # -- changes, as copies -----------------------------------------------------------------------------------

    def turns(self, turns: int | None) -> Self:
        """So many turns a run."""
        return self.set(turns=turns)

    def run_until(self, until: StopCondition | Any) -> Self:
        """Until a condition is met: a stop condition, or a function of the conversation."""
        return self.set(until=until)

    def data(self, rows: Iterable[Any] | None) -> Self:
        """One conversation for each row, which templates of the recipe are filled with."""
        return self.set(data=rows)

    def analyzer(self, analyzer: Any) -> Self:
        """What looks at each conversation of a rollout when it has ended: a function, or a registered name."""
        return self.set(analyzer=analyzer)

    def name(self, name: str | None) -> Self:
        """What its jobs are called in a run of several."""
        return self.set(name=name)

    def seed(self, seed: int) -> Self:
        """What its randomness is worked out from. Copy *i* of a rollout has `seed + i`."""
        return self.set(seed=seed)

    def set(self, **fields: Any) -> Self:
        """With other values of any fields of the constructor. Raises `ConfigurationError` for one there is not."""
        made = self._copy()
        if "name" in fields:
            made._name = _name(fields.pop("name"))
        if "data" in fields:
            rows = fields.pop("data")
            made._data = None if rows is None else Data(rows)
        if "transcript" in fields:
            made._transcript = Transcript(fields.pop("transcript"))
        if "seed" in fields:
            made._seed = None
        if fields:
            made._lineup = self._lineup.with_fields(**fields)
            made._saved = SavedLineup()
        return made

    def branch(self) -> Self:
        """An independent copy that goes on from here."""
        return self._copy()

    def branch_from(self, turn: int) -> Self:
        """An independent copy as it was after so many turns."""
        if not 0 <= turn <= len(self._transcript):
            raise ConfigurationError(
                f"branch_from({turn!r}): this conversation has {len(self._transcript)} turns"
            )
        made = self._copy()
        made._transcript = self._transcript[:turn]
        return made

    def _copy(self) -> Self:
        made = copy(self)
        made._bound = None
        return made

    def about(self, row: Any, *, place: str = "the row", stream: str = "", seed: int | None = None) -> Self:
        """A copy about one row. `stream` and `seed` decide its randomness beside the turn's number."""
        made = self._copy()
        made._data = None
        made._row, made._has_row, made._place = row, row is not None, place
        made._stream, made._seed = stream, seed
        return made

    def ended_by(self, *conditions: StopCondition) -> Self:
        """A copy that is held to other conditions beside its own."""
        made = self._copy()
        made._also = all_of(self._also, *conditions)
        return made

    # -- the live dialogue ------------------------------------------------------------------------------------

    def edit(self, turn: int, content: str) -> Self:
        """Change what was said in a turn, here and now. The turn is marked as edited."""
        try:
            self._transcript = self._transcript.with_content(turn, content)
        except IndexError:
            raise ConfigurationError(
                f"edit({turn!r}): this conversation has {len(self._transcript)} turns"
            ) from None
        return self

    def rewind(self, turns: int = 1) -> Self:
        """Take back the last turns, here and now."""
        if not 0 <= turns <= len(self._transcript):
            raise ConfigurationError(
                f"rewind({turns!r}): this conversation has {len(self._transcript)} turns"
            )
        self._transcript = self._transcript[: len(self._transcript) - turns]
        return self

    def run(self, turns: int | None = None) -> Transcript:
        """Hold it until it is over, or `turns` turns more; gives the transcript. What was said stays in it."""
        return self._wait(lambda: self.arun(turns))

    async def arun(self, turns: int | None = None) -> Transcript:
        """`run`, to be awaited."""
        async with self._held() as dialogue:
            await dialogue.run(turns)
        return self._transcript

    def step(self) -> Message | None:
        """One turn; `None` where the speaking policy has nobody speak."""
        return self._wait(self.astep)

    async def astep(self) -> Message | None:
        """`step`, to be awaited."""
        async with self._held() as dialogue:
            limit = all_of(self._also, *ambient(), self._lineup.until)
            return await dialogue.step(None if limit is None else limit.token_limit(dialogue))

    def sample(self, speaker: str, message: str | None = None) -> Message:
        """What a participant would say now, to a last word of the moderator's if there is one. Nothing is recorded."""
        return self._wait(lambda: self.asample(speaker, message))

    async def asample(self, speaker: str, message: str | None = None) -> Message:
        """`sample`, to be awaited."""
        async with self._held() as dialogue:
            return await dialogue.sample(speaker, message)

    def model(self, speaker: str) -> Model:
        """The model that answers for a participant, opened if need be: of a local one, the way to its torch module."""
        return self._wait(lambda: self.amodel(speaker))

    async def amodel(self, speaker: str) -> Model:
        """`model`, to be awaited, on the event loop of a run or of the blocking calls."""
        async with self._services() as services:
            return await services.models(self._lineup.participant(speaker))

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return wait_for(work, loop=None if self._bound is None else self._bound.loop)

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[Dialogue]:
        """The dialogue, for one call. Whatever ends it, what was said is kept."""
        if self._data is not None and self._lineup.needs_row:
            raise ConfigurationError(
                "this conversation is one for each row of its data: hold them with .rollout()"
            )
        async with self._services() as services:
            dialogue = self.dialogue(services, extra=all_of(*ambient()))
            try:
                yield dialogue
            finally:
                self._transcript = dialogue.transcript
                await dialogue.close()

    @asynccontextmanager
    async def _services(self) -> AsyncIterator[Services]:
        if self._bound is not None:
            yield self._bound.services
            return
        models, is_ours = _live_models()
        try:
            with tempfile.TemporaryDirectory(prefix="taskmill-") as folder:
                yield Services(models=models.of, sandbox=_sandboxes(Path(folder)))
        finally:
            if is_ours:
                await models.close()

    def dialogue(
        self, services: Services, *, id: str = "conversation", extra: StopCondition | None = None
    ) -> Dialogue:
        """The program that holds it, with the services it is given."""
        return Dialogue(
            self._lineup,
            services,
            id=id,
            transcript=self._transcript,
            row=self._row,
            place=self._place,
            seed=self._seed,
            stream=self._stream,
            extra=all_of(self._also, extra),
        )

    def after(self, dialogue: Dialogue, services: Services) -> Self:
        """A copy as a dialogue left it, which asks its models where that was held."""
        made = self._copy()
        made._transcript = dialogue.transcript
        made._bound = Bound(services, asyncio.get_running_loop())
        return made

    # -- many of it -------------------------------------------------------------------------------------------

    def rollout(self, n: int | None = None, *, seed: int | None = None, **options: Any) -> RunReport:
        """Hold `n` copies, or one (or `n`) for each row of its data, and report. See `run` for the options."""
        return wait_for(lambda: self.arollout(n, seed=seed, **options))

    async def arollout(self, n: int | None = None, *, seed: int | None = None, **options: Any) -> RunReport:
        """`rollout`, to be awaited."""
        from taskmill.conversations.runner import roll_out

        return await roll_out(self if seed is None else self.seed(seed), n, **options)

    # -- saving -----------------------------------------------------------------------------------------------

    def recipe(self) -> dict[str, Any]:
        """All of it as JSON, but for its data. Raises `ConfigurationError` naming what can't be saved."""
        return {
            "lineup": self._saved.recipe(self._lineup),
            "name": self._name,
            "transcript": [msgspec.to_builtins(message) for message in self._transcript],
            **({"until": as_recipe(self._also)} if self._also is not None else {}),
        }

    def save(self, path: Path | str) -> None:
        """Write it to a file, with its data and what was said. Raises `ConfigurationError` for what can't be saved."""
        from taskmill.store.files import replace

        rows = None
        if self._data is not None:
            if not isinstance(self._data.rows, list | tuple):
                raise ConfigurationError(
                    f"the data of the conversation can't be saved: it is {self._data.rows!r:.100}, and only a list "
                    "can. Save it without, .data(None), and give the data again after loading"
                )
            rows = list(self._data.rows)
        value = {
            "format": FORMAT,
            **self.recipe(),
            "data": rows,
            "row": self._row,
            "seed": self._seed,
            "stream": self._stream,
            "place": self._place,
        }
        replace(Path(path), encode_json(value))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read what `save` wrote. It imports the modules named there: load only files that you trust."""
        from taskmill.store.files import read_whole

        try:
            value = msgspec.json.decode(read_whole(Path(path)))
        except OSError as error:
            raise StoreError(f"{str(path)!r} can't be read: {error.strerror}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise StoreError(f"{str(path)!r} is not a saved conversation: {error}") from error
        if not isinstance(value, dict) or "lineup" not in value:
            raise StoreError(f"{str(path)!r} is not a saved conversation")
        if value.get("format", 0) > FORMAT:
            raise StoreError(f"{str(path)!r} was saved by a later version of taskmill; update to read it")
        made = cls.from_recipe(value)
        made._data = None if value.get("data") is None else Data(value["data"])
        made._row, made._has_row = value.get("row"), value.get("row") is not None
        made._seed, made._stream = value.get("seed"), value.get("stream", "")
        made._place = value.get("place", "the row")
        return made

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> Self:
        """What `recipe` was made of."""
        lineup = from_recipe(recipe["lineup"])
        if not isinstance(lineup, Lineup):
            raise ConfigurationError(f"the recipe is of {lineup!r:.100}, and not of a conversation")
        made = cls(lineup.participants, name=recipe.get("name"), transcript=recipe.get("transcript", ()))
        made._lineup = lineup
        made._saved = SavedLineup()
        made._also = from_recipe(recipe.get("until"))
        return made


class SavedLineup:
    """The recipe of a lineup as JSON, worked out once for all copies that share it."""

    def __init__(self) -> None:
        self._recipe: Any = None

    def recipe(self, lineup: Lineup) -> Any:
        """It; raises `ConfigurationError` for what can't be saved."""
        if self._recipe is None:
            self._recipe = as_recipe(lineup)
        return self._recipe


class Bound:
    """Where the models of a conversation are, while a run that held it goes on."""

    def __init__(self, services: Services, loop: asyncio.AbstractEventLoop) -> None:
        self.services = services
        self.loop = loop


_live: OpenModels | None = None


def _live_models() -> tuple[OpenModels, bool]:
    """The models for a live dialogue, and whether it has to close them: on the shared loop they stay open."""
    global _live
    shared = portal()
    if asyncio.get_running_loop() is not shared.loop:
        return OpenModels(), True
    if _live is None:
        _live = OpenModels()
        shared.closing.append(_live.close)
    return _live, False


def _sandboxes(folder: Path) -> Any:
    from taskmill.engine.sandboxes import SandboxSource
    from taskmill.tasks.task import TaskData

    source = SandboxSource("auto", folder, lambda event, message: None)

    def make(id: str) -> Sandbox:
        return source.make(id, TaskData(idx=0, prompt="conversation"))

    return make


def _name(name: Any) -> str | None:
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ConfigurationError(f"name={name!r} must be a text that is not blank")
    return name
