"""From what a user names to a model that answers."""

from __future__ import annotations

from taskmill.errors import ConfigurationError
from taskmill.models.base import Model
from taskmill.models.catalog import MODEL_NAME
from taskmill.models.endpoint import EndpointModel, Timeouts
from taskmill.models.families import public_url
from taskmill.models.pricing import Table, price_list
from taskmill.models.retry import Retrying, RetryPolicy

EMBEDDED = "embedded"


def is_embedded(model: str | Model | None, base_url: str | None) -> bool:
    """Whether `open_model` would take these for the embedded model."""
    if base_url is not None:
        return False
    return model is None or (
        isinstance(model, str) and (model in (EMBEDDED, MODEL_NAME) or model.endswith(".gguf"))
    )


def open_model(
    model: str | Model | None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    timeouts: Timeouts | None = None,
    prices: Table | None = None,
    policy: RetryPolicy | None = None,
) -> Model:
    """A model ready to be asked; no connection is made before the first call.

    - A name with a `base_url` is a model at that endpoint, with retries, rate control and cost.
    - `None`, "embedded" or a path ending in `.gguf` is the embedded model; it needs no endpoint.
    - Anything that is a model already is taken as it is.

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
    if model is None or not model.strip():
        raise ConfigurationError(
            f"base_url={public_url(base_url or '')!r} without a model: set model to a name that endpoint serves"
        )
    if base_url is None:
        raise ConfigurationError(
            f"model={model!r} without base_url: set base_url to the endpoint that serves it "
            "(such as 'https://openrouter.ai/api/v1' or 'http://localhost:8000/v1'), "
            f"or use model={EMBEDDED!r}, which needs none"
        )
    timeouts = timeouts or Timeouts()
    return Retrying(
        EndpointModel(model, base_url=base_url, api_key=api_key, timeout=timeouts),
        policy=policy,
        price=price_list(base_url=base_url, table=prices),
        total=timeouts.total,
    )
