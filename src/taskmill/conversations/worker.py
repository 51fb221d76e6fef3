"""A worker process from the inside: it holds the conversations it is given, side by side, on one device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from inspect import isawaitable
from pathlib import Path

import msgspec

from taskmill.conversations.conversation import Conversation
from taskmill.conversations.models import OpenModels
from taskmill.conversations.orders import Heard, KeptCall, Settings, decode_order, encode_heard
from taskmill.conversations.record import Holding, Surroundings, encoded
from taskmill.engine.sandboxes import SandboxSource
from taskmill.engine.worker import note
from taskmill.errors import WorkerStartError
from taskmill.programs.conversation.recipes import imported
from taskmill.programs.conversation.transcript import Message
from taskmill.store.journal import JournalEntry
from taskmill.tasks.task import TaskData


@asynccontextmanager
async def make(settings: bytes) -> AsyncIterator[ConversationWorker]:
    """The worker of one device. Raises `WorkerStartError` naming the module or function that it failed at."""
    told = msgspec.msgpack.decode(settings, type=Settings)
    for module in told.modules:
        try:
            import_module(module)
        except Exception as error:
            raise WorkerStartError(
                f"the module {module!r} can't be imported: {type(error).__name__}: {error}"
            ) from error
    if told.initializer is not None:
        await _initialize(told.initializer)
    models = OpenModels(told.device, batched=told.batched, max_batch_size=told.max_batch_size)
    sandboxes = SandboxSource("auto", Path(told.folder), lambda event, message: None)
    try:
        yield ConversationWorker(told.device, models, sandboxes)
    finally:
        sandboxes.close()
        await models.close()


async def _initialize(path: str) -> None:
    try:
        said = imported(path, "initializer")()
        if isawaitable(said):
            await said
    except (Exception, SystemExit) as error:
        raise WorkerStartError(f"the initializer {path!r} failed: {type(error).__name__}: {error}") from error


class RemoteJournal:
    """The run's journal as one job in a worker has it: calls come with the job, and go back as they are made."""

    def __init__(self, calls: list[KeptCall], send: Callable[[KeptCall], None]) -> None:
        self._calls = calls
        self._send = send

    def recall(self, rollout_id: str) -> list[JournalEntry]:
        """See `CallJournal`."""
        return self._entries(rollout_id, void=False)

    def void(self, rollout_id: str) -> list[JournalEntry]:
        """See `CallJournal`."""
        return self._entries(rollout_id, void=True)

    def _entries(self, rollout_id: str, *, void: bool) -> list[JournalEntry]:
        mine = [call for call in self._calls if call.rollout == rollout_id and call.void == void]
        return [
            JournalEntry(call.number, call.digest, call.completion, call.attempt)
            for call in sorted(mine, key=lambda call: call.number)
        ]

    def record(self, rollout_id: str, number: int, digest: str, completion: bytes, attempt: int = 1) -> None:
        """See `CallJournal`; kept as soon as the run's process has it."""
        self._send(KeptCall(rollout_id, number, digest, completion, attempt))


class ConversationWorker:
    """Answers requests to hold a conversation, many at once."""

    told = b""

    def __init__(self, device: str, models: OpenModels, sandboxes: SandboxSource) -> None:
        self._device = device
        self._models = models
        self._sandboxes = sandboxes

    async def answer(self, kind: str, body: bytes) -> bytes:
        """Hold one conversation; gives its encoded record."""
        order = decode_order(body)
        send = note.get()
        around = Surroundings(
            models=self._models.of,
            sandbox=lambda id: self._sandboxes.make(id, TaskData(idx=0, prompt="conversation")),
            journal=RemoteJournal(order.calls, lambda call: send(encode_heard(Heard(call=call)))),
            device=self._device,
            heard=lambda key, message: send(_encoded(message, self._models.rows_running)),
        )
        conversation = Conversation.from_recipe(order.recipe).about(
            order.row, place=order.place, stream=order.stream, seed=order.seed
        )
        holding = Holding(
            conversation,
            around,
            key=order.key,
            job_id=order.job_id,
            name=order.name,
            recipe=order.recipe if order.keep_recipe else None,
            attempt=order.attempt,
        )
        return encoded(await holding.run())[1]


def _encoded(message: Message, rows: int | None) -> bytes:
    try:
        return encode_heard(Heard(message=message, rows=rows))
    except (TypeError, UnicodeEncodeError):
        return encode_heard(Heard(message=Message(message.author, repr(message.content)), rows=rows))
