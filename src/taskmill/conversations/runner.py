"""`run`, `run_jobs` and rollouts: options checked, a directory opened, hands found, and the report given."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from taskmill.conversations.blocking import wait_for
from taskmill.conversations.conversation import Conversation
from taskmill.conversations.devices import check_crossing, chosen_devices
from taskmill.conversations.execution import ConversationRun, Hands
from taskmill.conversations.hands import WorkerHands
from taskmill.conversations.jobs import Job, Plan, plan_of, plan_of_jobs
from taskmill.conversations.models import OpenModels
from taskmill.conversations.record import Held, Holding, Surroundings
from taskmill.conversations.report import KIND, RunReport
from taskmill.conversations.told import log_events
from taskmill.engine.progress import Progress
from taskmill.engine.sandboxes import SandboxSource
from taskmill.errors import ConfigurationError, RunChangedError
from taskmill.programs.conversation.stop import ambient, count
from taskmill.programs.conversation.transcript import Message
from taskmill.store.commit import Sync
from taskmill.store.index import JobIndex
from taskmill.store.run import RunDirectory
from taskmill.tasks.task import TaskData

WINDOW = 64
"""Conversations under way at once in a process, where nobody says another number."""

Listener = Callable[[Mapping[str, Any]], None]


class Options(Struct, frozen=True, kw_only=True):
    """What a run can be told, the same for `run`, `run_jobs` and `rollout`.

    `devices` are where local models are: every GPU or else the CPU by default; several mean a worker process each.
    `out_dir` keeps the run, `resume` goes on with one that is there. `batched` holds many conversations side by side,
    `max_batch_size` bounds the rows of a local model's forward pass. `initializer` is a function, or `module:function`,
    that each worker process calls once, before its first job. `on_event` hears of what happens.
    """

    devices: Any = None
    out_dir: Path | str | None = None
    resume: bool = False
    batched: bool = True
    max_batch_size: int | None = None
    initializer: Any = None
    on_event: Listener | None = None
    progress: Progress | None = None
    sync: Sync = "group"

    def __post_init__(self) -> None:
        if self.resume and self.out_dir is None:
            raise ConfigurationError("resume=True goes with out_dir=, the directory of the run to go on with")
        if self.max_batch_size is not None:
            count("the run", "max_batch_size", self.max_batch_size)

    @property
    def window(self) -> int:
        """Conversations under way at once in a process."""
        return max(WINDOW, self.max_batch_size or 0) if self.batched else 1


def run(
    conversations: Iterable[Conversation],
    devices: Any = None,
    out_dir: Path | str | None = None,
    resume: bool = False,
    batched: bool = True,
    max_batch_size: int | None = None,
    **options: Any,
) -> RunReport:
    """Hold several conversations in one pool: `n` copies of each, or of each row where it has data.

    Jobs are called `row_00000` or `rollout_0000` under the conversation's name (`conv0`, `conv1`, … for those that
    have none). `n` and `limit` bound copies and rows; the rest is told in `Options`.

    Raises:
        ConfigurationError: for what can't be meant, before anything runs.
        RunExistsError: `out_dir` holds a run already, and `resume` is false.
        RunChangedError: the run in `out_dir` was made by other recipes.
        RunAbortedError: nothing more could be held; what was recorded stays.
    """
    return wait_for(lambda: arun(conversations, devices, out_dir, resume, batched, max_batch_size, **options))


async def arun(
    conversations: Iterable[Conversation],
    devices: Any = None,
    out_dir: Path | str | None = None,
    resume: bool = False,
    batched: bool = True,
    max_batch_size: int | None = None,
    *,
    n: int | None = None,
    limit: int | None = None,
    **options: Any,
) -> RunReport:
    """`run`, to be awaited."""
    if isinstance(conversations, Conversation):
        conversations = [conversations]
    named = []
    for place, conversation in enumerate(conversations):
        if not isinstance(conversation, Conversation):
            raise ConfigurationError(f"run takes conversations, not {conversation!r:.100}")
        named.append((conversation._name or f"conv{place}", conversation.ended_by(*ambient())))
    if not named:
        raise ConfigurationError("run was given no conversation")
    told = _options(
        options,
        devices=devices,
        out_dir=out_dir,
        resume=resume,
        batched=batched,
        max_batch_size=max_batch_size,
    )
    return await _carry_out(lambda index: plan_of(named, n, limit, index), told, [one for _, one in named])


def run_jobs(
    jobs: Iterable[tuple[str, Conversation]],
    devices: Any = None,
    out_dir: Path | str | None = None,
    resume: bool = False,
    batched: bool = True,
    max_batch_size: int | None = None,
    **options: Any,
) -> RunReport:
    """Hold ready `(job id, conversation)` pairs. Any iterable does; they are drawn as there is a place for them.

    Raises as `run` does. Ids that stand twice in a list are refused before anything runs, in another iterable when
    the second one is drawn.
    """
    return wait_for(lambda: arun_jobs(jobs, devices, out_dir, resume, batched, max_batch_size, **options))


async def arun_jobs(
    jobs: Iterable[tuple[str, Conversation]],
    devices: Any = None,
    out_dir: Path | str | None = None,
    resume: bool = False,
    batched: bool = True,
    max_batch_size: int | None = None,
    **options: Any,
) -> RunReport:
    """`run_jobs`, to be awaited."""
    told = _options(
        options,
        devices=devices,
        out_dir=out_dir,
        resume=resume,
        batched=batched,
        max_batch_size=max_batch_size,
    )
    held_to = ambient()

    def with_conditions(pair: Any) -> Any:
        if (
            held_to
            and isinstance(pair, tuple | list)
            and len(pair) == 2
            and isinstance(pair[1], Conversation)
        ):
            return pair[0], pair[1].ended_by(*held_to)
        return pair

    known: list[Conversation] = []
    if isinstance(jobs, Sequence):
        jobs = [with_conditions(pair) for pair in jobs]
        known = [pair[1] for pair in jobs if isinstance(pair, tuple | list) and len(pair) == 2]
    else:
        jobs = map(with_conditions, jobs)
    return await _carry_out(lambda index: plan_of_jobs(jobs), told, known)


async def roll_out(
    conversation: Conversation, n: int | None, *, limit: int | None = None, **options: Any
) -> RunReport:
    """The rollouts of one conversation. See `Conversation.rollout`."""
    held = conversation.ended_by(*ambient())
    name = conversation._name or "conversation"
    told = _options(options)
    return await _carry_out(lambda index: plan_of([(name, held)], n, limit, index, alone=True), told, [held])


def _options(options: Mapping[str, Any], **named: Any) -> Options:
    values = {**named, **options}
    unknown = values.keys() - set(Options.__struct_fields__)
    if unknown:
        raise ConfigurationError(
            f"there is no option {min(unknown)!r}; there are n, limit, {', '.join(Options.__struct_fields__)}"
        )
    return Options(**values)


async def _carry_out(
    make_plan: Callable[[JobIndex], Plan], options: Options, known: Sequence[Conversation]
) -> RunReport:
    for conversation in known:
        _check_ends(conversation)
    devices = chosen_devices(options.devices, known)
    workers = len(devices) > 1
    if workers:
        for conversation in known:
            check_crossing(conversation)
    index = JobIndex()
    plan = make_plan(index)
    progress = options.progress or Progress(options.on_event or log_events)
    async with AsyncExitStack() as stack:
        directory = None
        if options.out_dir is not None:
            directory = _opened(plan, options, known, progress)
            stack.push_async_callback(directory.close)
        run = ConversationRun(plan, index=index, progress=progress, directory=directory)
        await run.recall()
        folder = directory.path / "workspaces" if directory is not None else None
        hands: Hands = await stack.enter_async_context(
            _workers(devices, options, known, directory, progress, folder)
            if workers
            else _own_hands(devices[0], options, directory, progress, folder)
        )
        return await run.carry_out(hands)


def _check_ends(conversation: Conversation) -> None:
    lineup = conversation.lineup
    if lineup.turns is None and lineup.until is None and conversation._also is None:
        raise ConfigurationError(
            "nothing would end this conversation: say how many turns it has, .turns(6), or when it is over, "
            ".run_until(…)"
        )


def _opened(plan: Plan, options: Options, known: Sequence[Conversation], progress: Progress) -> RunDirectory:
    """The run's directory, taken for writing. What can't be saved is refused before anything is made."""
    assert options.out_dir is not None
    recipes = {name: conversation.recipe() for name, conversation in (plan.recipes or {}).items()}
    if plan.recipes is None:
        for conversation in known:
            conversation.recipe()
    directory = RunDirectory(options.out_dir, sync=options.sync)
    stored = directory.read_config()
    if stored is not None and stored.get("kind") != KIND:
        raise RunChangedError(
            f"the run in {str(directory.path)!r} is of another kind: choose another out_dir"
        )
    # A run may be extended by other conversations; those that both have must be the same.
    merged = {**(stored or {}).get("recipes", {}), **recipes} if options.resume else recipes
    config = {"kind": KIND, "jobs": "given" if plan.recipes is None else "planned", "recipes": merged}
    if options.resume and stored is not None:
        known_before = stored["recipes"].keys()
        directory.check_start(
            {**config, "recipes": {name: merged[name] for name in known_before}}, resume=True
        )
        opened = directory.open_for_writing(config, resume=True, policy_fields=frozenset({"recipes"}))
    else:
        opened = directory.open_for_writing(config, resume=options.resume)
    for repair in opened.repairs:
        progress.tell("warning", message=str(repair))
    return directory


class OwnHands:
    """Jobs are held in this process."""

    def __init__(self, around: Surroundings, window: int) -> None:
        self._around = around
        self.window = window
        self.exhausted: Exception | None = None
        self._under_way: dict[str, Holding] = {}

    async def hold(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Held:
        """See `Hands`."""
        holding = Holding(
            job.conversation,
            self._around,
            key=job.key,
            job_id=job.id,
            name=job.recipe,
            recipe=recipe,
            attempt=attempt,
        )
        self._under_way[job.key] = holding
        held = await holding.run()
        del self._under_way[job.key]
        return held

    def cut(self, job: Job, attempt: int, recipe: Mapping[str, Any] | None) -> Held | None:
        """See `Hands`."""
        holding = self._under_way.pop(job.key, None)
        return None if holding is None else holding.record()


@asynccontextmanager
async def _own_hands(
    device: str,
    options: Options,
    directory: RunDirectory | None,
    progress: Progress,
    folder: Path | None,
) -> AsyncIterator[Hands]:
    models = OpenModels(device, batched=options.batched, max_batch_size=options.max_batch_size)

    def heard(key: str, message: Message) -> None:
        progress.heard(message.n_tokens, rows=models.rows_running)

    try:
        async with _sandboxes(folder, progress) as make:
            around = Surroundings(
                models=models.of,
                sandbox=make,
                journal=None if directory is None else directory.journal,
                device=device,
                heard=heard,
            )
            yield OwnHands(around, options.window)
    finally:
        await models.close()


@asynccontextmanager
async def _sandboxes(folder: Path | None, progress: Progress) -> AsyncIterator[Callable[[str], Any]]:
    """What makes the sandboxes of participants' tools, in the run's folder or a temporary one."""
    async with AsyncExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taskmill-")))
        source = SandboxSource("auto", folder, lambda event, message: progress.tell(event, message=message))
        await source.sweep()
        stack.callback(source.close)
        yield lambda id: source.make(id, TaskData(idx=0, prompt="conversation"))


@asynccontextmanager
async def _workers(
    devices: Sequence[str],
    options: Options,
    known: Sequence[Conversation],
    directory: RunDirectory | None,
    progress: Progress,
    folder: Path | None,
) -> AsyncIterator[Hands]:
    async with AsyncExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taskmill-")))
        hands = WorkerHands(
            devices,
            known,
            folder=folder,
            batched=options.batched,
            max_batch_size=options.max_batch_size,
            places=options.window,
            initializer=options.initializer,
            journal=None if directory is None else directory.journal,
            progress=progress,
        )
        yield await stack.enter_async_context(hands)
