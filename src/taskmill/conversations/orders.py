"""What a run and its workers say to each other."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from taskmill.programs.conversation.transcript import Message


class Settings(Struct, frozen=True):
    """What a worker is told when it starts."""

    device: str
    folder: str
    batched: bool
    max_batch_size: int | None
    modules: list[str]
    initializer: str | None


class KeptCall(Struct, frozen=True, array_like=True):
    """A finished call, on its way to a worker or from one."""

    rollout: str
    number: int
    digest: str
    completion: bytes
    attempt: int
    void: bool = False


class Order(Struct, frozen=True):
    """A job on its way to a worker."""

    key: str
    job_id: str
    name: str | None
    attempt: int
    recipe: Any
    keep_recipe: bool
    row: Any
    place: str
    seed: int | None
    stream: str
    calls: list[KeptCall]


class Heard(Struct, frozen=True):
    """What a worker says of a job under way: a finished call, or a message that became part of the conversation.

    With a message come the rows in the worker's running batch, if it has one.
    """

    call: KeptCall | None = None
    message: Message | None = None
    rows: int | None = None


encode_order = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
encode_heard = msgspec.msgpack.Encoder().encode
decode_heard = msgspec.msgpack.Decoder(Heard).decode
