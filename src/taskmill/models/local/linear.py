"""Linear layers of a float32 model on the CPU, computed by oneDNN where it is faster than what torch takes by itself.

For float32 torch calls MKL, which on many processors makes less of a batch of a few dozen rows. Both are torch's own
libraries and read the same weights; their results differ in the last digits, as those of two batches do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = 256
"""Rows that a layer is given at once, up to which it may be faster so; for the many of a long prompt it is not."""

_ROWS = 16
"""Rows that the two are compared with."""

_TRIES = 3


class FasterLinears:
    """The linear layers of `module`, and whether oneDNN is faster with them on this machine."""

    def __init__(self, module: nn.Module) -> None:
        parts = [part for part in module.modules() if type(part) is nn.Linear]
        fit = parts and all(
            part.weight.dtype == torch.float32 and part.weight.device.type == "cpu" for part in parts
        )
        largest = max(parts, key=lambda part: part.weight.numel()) if fit else None
        self._parts = parts if largest is not None and _is_faster(largest) else []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute by oneDNN within this block. A layer whose `forward` somebody has replaced is left alone."""
        changed = [part for part in self._parts if "forward" not in vars(part)]
        for part in changed:
            vars(part)["forward"] = partial(_linear, part)
        try:
            yield
        finally:
            for part in changed:
                vars(part).pop("forward", None)


def _linear(part: nn.Linear, given: Tensor) -> Tensor:
    # The weights are looked up each time: they are the module's, and may be exchanged, for others of another kind too.
    weight = part.weight
    if given.numel() > FEW * part.in_features or weight.dtype != torch.float32 or not weight.is_cpu:
        return functional.linear(given, weight, part.bias)
    made: Tensor = torch.ops.mkldnn._linear_pointwise(given, weight, part.bias, "none", [], "")
    return made


def _is_faster(part: nn.Linear) -> bool:
    """Whether oneDNN is there, gives the same, and takes less time."""
    given = torch.linspace(-1.0, 1.0, _ROWS * part.in_features).reshape(_ROWS, part.in_features)
    with torch.no_grad():
        plain, plain_seconds = _timed(partial(part.forward, given))
        try:
            other, other_seconds = _timed(partial(_linear, part, given))
        except (AttributeError, RuntimeError):  # a build of torch without it
            return False
    return bool(torch.allclose(plain, other, rtol=1e-4, atol=1e-4)) and other_seconds < plain_seconds


def _timed(work: Callable[[], Any]) -> tuple[Tensor, float]:
    seconds = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        made = work()
        seconds.append(time.perf_counter() - started)
    return made, min(seconds)
