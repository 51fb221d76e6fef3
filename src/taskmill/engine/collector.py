"""Less work for the cyclic garbage collector while a run goes on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (20_000, 20, 50)
"""New objects between two looks at the youngest, and looks before older ones are looked at too.

A run makes a few hundred short-lived objects for each model call and almost no cycles; with Python's own
numbers the collector goes over the whole heap for nothing several times a second.
"""


@contextmanager
def patient_collector() -> Iterator[None]:
    """Set what exists now aside, and look at the rest less often; as before when the block ends."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
