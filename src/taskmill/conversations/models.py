"""The models of conversations, opened when somebody first speaks: one for each recipe, shared by all who name it."""

from __future__ import annotations

import os
from typing import Any

from taskmill.models.base import Model
from taskmill.programs.conversation.participant import Participant


class OpenModels:
    """The models of one process on one `device`. `max_batch_size` bounds the rows of a local model's forward pass."""

    def __init__(
        self, device: str | None = None, *, batched: bool = True, max_batch_size: int | None = None
    ) -> None:
        self.device = device
        self._batched = batched
        self._max_batch_size = max_batch_size
        self._open: dict[Any, Model] = {}
        self._not_ours: set[int] = set()
        self._has_local = False

    @property
    def rows_running(self) -> int | None:
        """Rows in the running batch of this process; `None` where no local model was opened."""
        if not self._has_local:
            return None
        from taskmill.models.local.engine import rows_running

        return rows_running()

    async def of(self, participant: Participant) -> Model:
        """The model of a participant. Raises `ConfigurationError` or `ModelError` where it can't be had."""
        key = _key(participant)
        model = self._open.get(key)
        if model is not None:
            return model
        model = self._open[key] = self._make(participant)
        return model

    def _make(self, participant: Participant) -> Model:
        own = participant.open()
        if own is not None:
            return own
        kind = participant.kind
        if kind == "model":
            model: Model = participant.model
            self._not_ours.add(id(model))
            return model
        if kind == "local":
            return self._local(participant)
        from taskmill.models.choose import open_model

        key = os.environ.get(participant.api_key_env) if kind == "endpoint" else None
        name = None if participant.model == "embedded" else os.fspath(participant.model)
        return open_model(name, base_url=participant.base_url, api_key=key)

    def _local(self, participant: Participant) -> Model:
        # Here, because most conversations do without torch.
        from taskmill.models.local import LocalModel

        self._has_local = True
        size: Any = self._max_batch_size if self._batched else 1
        bound: dict[str, Any] = {} if size is None else {"max_batch_size": size}
        return LocalModel(
            participant.model,
            device=self.device,
            dtype=participant.dtype,
            adapters=participant.adapters,
            context=participant.context_window,
            card_sampling=participant.card_sampling,
            **bound,
        )

    async def close(self) -> None:
        """Let go of the models that were opened here. May be called twice."""
        models, self._open = self._open, {}
        for model in models.values():
            if id(model) not in self._not_ours:
                await model.close()


def _key(participant: Participant) -> Any:
    if participant.kind == "model":
        return id(participant.model)
    if participant.brings_model:
        return id(participant)
    named = os.fspath(participant.model)
    if participant.kind != "local":
        return (participant.kind, named, participant.base_url, participant.api_key_env)
    window = participant.context_window
    return ("local", named, participant.dtype, participant.adapters, participant.card_sampling, window)
