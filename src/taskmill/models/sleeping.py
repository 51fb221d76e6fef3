"""Libraries that compute with OpenMP, imported so that their threads sleep while they wait for each other."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

_VARIABLE = "OMP_WAIT_POLICY"


def import_sleeping(name: str) -> Any:
    """Import `name` with threads that sleep while they wait for each other.

    OpenMP's threads spin by default, which is a little faster alone and ten times slower on a machine that has
    anything else to do. The variable is read once, when the library is loaded, and is not left to child processes. What
    the user has set in it holds.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = before or "passive"
    try:
        return import_module(name)
    finally:
        if before is None:
            del os.environ[_VARIABLE]
