"""The models that clients name, kept for a while so that their connections are used again."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from taskmill.engine.environment import EndpointChoice
from taskmill.models.base import Model
from taskmill.models.choose import open_model
from taskmill.models.endpoint import Timeouts
from taskmill.models.retry import RetryPolicy

KEPT = 32
"""Models that nobody uses at the moment and that are kept all the same, at most."""

IDLE = 60.0
"""Seconds after which a model that nobody uses is closed."""


class _Kept:
    __slots__ = ("model", "since", "users")

    def __init__(self, model: Model) -> None:
        self.model = model
        self.users = 0
        self.since = 0.0


class ModelPool:
    """One model object for each endpoint, key and timeout that clients give. A key never leaves its own object."""

    def __init__(self) -> None:
        self._kept: dict[bytes, _Kept] = {}
        self._pepper = os.urandom(16)

    @asynccontextmanager
    async def lease(self, choice: EndpointChoice) -> AsyncIterator[Model]:
        """The model of that choice, for one request. Raises `ConfigurationError` for what can't be meant."""
        name = hashlib.blake2b(choice.model_dump_json().encode(), key=self._pepper, digest_size=16).digest()
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept(_opened(choice))
        kept.users += 1
        try:
            yield kept.model
        finally:
            kept.users -= 1
            kept.since = asyncio.get_running_loop().time()
            await self._close_some()

    async def run(self) -> None:
        """Close what is idle for long. Runs as long as the worker."""
        while True:
            await asyncio.sleep(IDLE / 4)
            await self._close_some()

    async def close(self) -> None:
        """Close all of them."""
        kept, self._kept = self._kept, {}
        for entry in kept.values():
            await entry.model.close()

    async def _close_some(self) -> None:
        now = asyncio.get_running_loop().time()
        idle = sorted(
            ((entry.since, name) for name, entry in self._kept.items() if not entry.users), reverse=True
        )
        for place, (since, name) in enumerate(idle):
            if place >= KEPT or now - since > IDLE:
                await self._kept.pop(name).model.close()


def _opened(choice: EndpointChoice) -> Model:
    return open_model(
        choice.name,
        base_url=choice.base_url,
        api_key=None if choice.api_key is None else choice.api_key.get_secret_value(),
        timeouts=Timeouts(attempt=choice.call_timeout, total=choice.total_timeout),
        policy=RetryPolicy(attempts=choice.max_attempts),
        prices=choice.prices,
    )
