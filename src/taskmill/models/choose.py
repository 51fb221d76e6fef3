"""From what a user names to a model that answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from taskmill.errors import ConfigurationError
from taskmill.models.base import Model
from taskmill.models.catalog import MODEL_NAME, embedded_weights, is_model_folder
from taskmill.models.endpoint import EndpointModel, Timeouts
from taskmill.models.families import public_url
from taskmill.models.pricing import Table, price_list
from taskmill.models.retry import Retrying, RetryPolicy

EMBEDDED = "embedded"
LOCAL = "local"


def is_embedded(model: str | Model | None, base_url: str | None) -> bool:
    """Whether `open_model` would take these for the embedded model."""
    if base_url is not None:
        return False
    if not isinstance(model, str):
        return model is None
    if model in (EMBEDDED, MODEL_NAME) or model.endswith(".gguf"):
        return True
    weights = embedded_weights()
    return weights is not None and model == weights.stem  # what records call it


def is_local(model: str | Model | None, base_url: str | None) -> bool:
    """Whether `open_model` would load these into this process, with torch."""
    if base_url is not None or not isinstance(model, str):
        return False
    return model == LOCAL or model.startswith(f"{LOCAL}:") or is_model_folder(Path(model).expanduser())


def open_model(
    model: str | Model | None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    timeouts: Timeouts | None = None,
    prices: Table | None = None,
    policy: RetryPolicy | None = None,
    tell: Callable[[str], None] | None = None,
) -> Model:
    """A model ready to be asked; no connection is made before the first call.

    - A name with a `base_url` is a model at that endpoint, with retries, rate control and cost.
    - `None`, "embedded" or a path ending in `.gguf` is the embedded model; it needs no endpoint.
    - "local:PATH", "local:HUB_ID" or a folder with a `config.json` is a Hugging Face model inside this process, and
      "local" alone the small one that `taskmill models fetch local` makes.
    - Anything that is a model already is taken as it is.

    `tell` gets lines for people, such as that the endpoint asks for a long wait; without it they are logged.

    Raises `ConfigurationError`, saying what to set, for what is none of these.
    """
    if model is not None and not isinstance(model, str):
        if base_url is not None:
            raise ConfigurationError(
                f"base_url={public_url(base_url)!r} goes with a model's name, not with a model object"
            )
        return model
    if is_embedded(model, base_url):
        # Here, because it pulls in a llama.cpp build that most runs do without.
        from taskmill.models.embedded import EmbeddedModel

        return EmbeddedModel(model if model is not None and model.endswith(".gguf") else None)
    if model is not None and is_local(model, base_url):
        # Here, because it is an extra of its own.
        from taskmill.models.local import LocalModel

        return LocalModel(model)
    if model is None or not model.strip():
        raise ConfigurationError(
            f"base_url={public_url(base_url or '')!r} without a model: set model to a name that endpoint serves"
        )
    if base_url is None:
        raise ConfigurationError(
            f"model={model!r} without base_url: set base_url to the endpoint that serves it "
            "(such as 'https://openrouter.ai/api/v1' or 'http://localhost:8000/v1'), "
            f"or use model={EMBEDDED!r}, which needs none, or a Hugging Face folder or id as 'local:PATH'"
        )
    timeouts = timeouts or Timeouts()
    return Retrying(
        EndpointModel(model, base_url=base_url, api_key=api_key, timeout=timeouts),
        policy=policy,
        price=price_list(base_url=base_url, table=prices),
        total=timeouts.total,
        tell=tell,
    )
