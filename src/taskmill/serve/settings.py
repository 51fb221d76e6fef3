"""What `taskmill serve` can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from taskmill.sandbox.choose import Kind
from taskmill.serve.server import DRAIN, MAX_BODY
from taskmill.tasks.limits import Count


class ServeSettings(BaseModel):
    """The settings of a server. Field names are those of the options and of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    address: str = "127.0.0.1:8400"
    """`HOST:PORT`; `:0` takes a free port of this machine."""
    workers: Count = 1
    """Worker processes there may be."""
    min_workers: Count | None = None
    """Worker processes that are started at once; all of them where nothing is said."""
    token_file: Path | None = None
    """A file with the token that clients must give. Needed on any address but this machine's own."""
    places: Count = 256
    """Requests that one worker has under way at once."""
    queue: Annotated[int, Field(ge=0, strict=True)] = 10_000
    """Requests that wait for a worker; others are turned away."""
    max_body: Count = MAX_BODY
    """Bytes of a request that are read."""
    drain: Annotated[float, Field(ge=0)] = DRAIN
    """Seconds that requests under way have when the server is told to stop."""
    sandbox: Kind = "auto"
    """What confines the commands a model runs."""
