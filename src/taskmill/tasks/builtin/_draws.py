"""A random state of one's own for code that draws from the generators of the whole process."""

from __future__ import annotations

import random
import sys
import threading
from types import TracebackType
from typing import Any

_LOCK = threading.Lock()


class Draws:
    """`with draws:` puts its random state in the place of the process's, and puts that back afterwards.

    What is drawn inside goes on where the last time ended, whoever drew in between. Only one thread of the process
    is inside at a time, since there is one such generator; a thread that draws from it without asking is not kept
    out. Covers `random`, and the old generator of `numpy` where that is loaded.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**32
        self._random = random.Random(seed).getstate()
        self._numpy: Any = None
        self._outer: Any = None
        self._outer_numpy: Any = None

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._outer = random.getstate()
        random.setstate(self._random)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if self._numpy is None:
                self._numpy = numpy.random.MT19937(self._seed)
            # Exchanged rather than copied, which takes a hundredth of the time.
            self._outer_numpy = numpy.random.get_bit_generator()
            numpy.random.set_bit_generator(self._numpy)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._random = random.getstate()
        random.setstate(self._outer)
        # Where numpy was first loaded inside, there is no earlier state of it to go back to.
        if self._outer_numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self._outer_numpy)
            self._outer_numpy = None
        _LOCK.release()
