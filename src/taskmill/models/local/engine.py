"""One copy of a model, the thread that computes with it, and the registry of copies in this process.

All that touches torch happens in the engine's thread, one thing after another; event loops hand rows over and are told
when they have ended. A copy lives while a model that uses it is open.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from taskmill.errors import ModelError
from taskmill.models.local.batcher import Batcher
from taskmill.models.local.loading import Loaded, Recipe, load
from taskmill.models.local.row import Row

STOP_SECONDS = 30.0
"""How long the end of a thread is waited for: a forward pass can't be broken off."""

MOMENT, GATHERED = 0.005, 0.1
"""Seconds: how long the rows of a batch that begins wait for one more, and how long for all of them."""

T = TypeVar("T")

_log = logging.getLogger("taskmill.models.local")


class Engine:
    """A loaded model and its running batch, of `running` rows. Made by `engine_for` only."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.users: dict[int, tuple[int, int | None]] = {}
        self.running = 0
        self.loaded: Future[Loaded] = _promise()
        # One thread, because tokenizers are not made for several.
        self.prompts = ThreadPoolExecutor(1, thread_name_prefix="taskmill prompts")
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._ended: BaseException | None = None
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._main, name=f"taskmill {recipe.path}", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def submit(self, row: Row) -> None:
        """Let `row` join the batch."""
        self._put(_Item(lambda batcher: batcher.add(row), row.fail))

    def run(self, function: Callable[[Batcher], T]) -> Future[T]:
        """Call `function` in the engine's thread, between two steps."""
        done: Future[T] = _promise()

        def call(batcher: Batcher) -> None:
            try:
                done.set_result(function(batcher))
            except BaseException as problem:
                done.set_exception(problem)

        self._put(_Item(call, done.set_exception))
        return done

    def settle(self) -> None:
        """Take over the bounds of the models that use this copy."""
        bounds = list(self.users.values())
        if not bounds:
            return
        rows = min(rows for rows, _ in bounds)
        memory = min((size for _, size in bounds if size is not None), default=None)

        def take(batcher: Batcher) -> None:
            batcher.max_rows = rows
            if memory is not None:
                batcher.bound_memory(memory)

        self._put(_Item(take, lambda problem: None))

    def stop(self) -> None:
        """End the thread and let the weights go. Rows that are under way fail."""
        self._closing.set()
        self._inbox.put(None)
        self.prompts.shutdown(wait=False)

    def join(self) -> None:
        """Wait until the thread has ended and the weights are gone, for a while; at once where others use them."""
        if self._closing.is_set():
            self._thread.join(STOP_SECONDS)

    def _put(self, item: _Item) -> None:
        with self._ending:
            if self._ended is None:
                self._inbox.put(item)
                return
        item.fail(self._ended)

    def _main(self) -> None:
        try:
            self._serve()
        finally:
            with _lock:
                _threads.discard(threading.current_thread())

    def _serve(self) -> None:
        try:
            loaded = load(self.recipe)
            batcher = Batcher(loaded, memory=loaded.free_memory() // 2)
        except BaseException as problem:
            _forget(self)
            self.loaded.set_exception(problem)
            self._refuse(problem)
            return
        self.loaded.set_result(loaded)
        while not self._closing.is_set():
            self._take(batcher)
            try:
                batcher.step()
            except Exception as problem:
                _log.exception("the batch of %r failed", self.recipe.path)
                said = f"{type(problem).__name__}: {problem}"
                batcher.fail_all(ModelError(f"the batch of {self.recipe.path!r} failed: {said}"))
            self.running = batcher.running
        closed = ModelError(f"the model {self.recipe.path!r} was closed while this turn was under way")
        batcher.fail_all(closed)
        self._refuse(closed)

    def _take(self, batcher: Batcher) -> None:
        """Take what has come in; wait for it when there is nothing else to do.

        Rows that come together, one prompt made after another, should begin together: where none is running, the first
        waits a moment for the others.
        """
        gathered = not batcher.running
        until: float | None = None
        while not self._closing.is_set():
            now = time.monotonic()
            if batcher.idle:
                wait = until = None
            elif gathered and batcher.waiting < batcher.max_rows and now < (until := until or now + GATHERED):
                wait = MOMENT
            else:
                wait = 0.0
            try:
                item = self._inbox.get(block=wait != 0.0, timeout=wait)
            except queue.Empty:
                return
            if item is not None:
                item.do(batcher)

    def _refuse(self, problem: BaseException) -> None:
        """From here on nothing is taken; what was sent too late is told so."""
        with self._ending:
            self._ended = problem
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item.fail(problem)


class _Item(NamedTuple):
    """Something for the engine's thread: to be done there, or told why it was not."""

    do: Callable[[Batcher], None]
    fail: Callable[[BaseException], None]


def _promise() -> Future[Any]:
    """A future that who waits for it can't cancel: the thread will fulfil it whoever has gone."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


# -- the registry ---------------------------------------------------------------------------------------------

_engines: dict[Recipe, Engine] = {}
_threads: set[threading.Thread] = set()
_lock = threading.RLock()


def engine_for(recipe: Recipe, user: int, *, max_rows: int, memory: int | None) -> Engine:
    """This process' engine for `recipe`, started if need be; `user` holds it until `leave`."""
    with _lock:
        engine = _engines.get(recipe)
        if engine is None:
            engine = _engines[recipe] = Engine(recipe)
        engine.users[user] = (max_rows, memory)
        engine.settle()
        return engine


def leave(engine: Engine, user: int) -> None:
    """`user` needs the engine no more; the last one ends it. `Engine.join` waits for that."""
    with _lock:
        engine.users.pop(user, None)
        if engine.users:
            engine.settle()
            return
        if _engines.get(engine.recipe) is engine:
            del _engines[engine.recipe]
    engine.stop()


def rows_running() -> int:
    """Rows in the running batches of all engines of this process."""
    with _lock:
        return sum(engine.running for engine in _engines.values())


def _forget(engine: Engine) -> None:
    """Take out an engine that could not load, so that the next try starts afresh."""
    with _lock:
        if _engines.get(engine.recipe) is engine:
            del _engines[engine.recipe]


@atexit.register
def _stop_all() -> None:
    # A thread that is inside torch while the interpreter goes down takes the process with it.
    with _lock:
        engines, threads = list(_engines.values()), list(_threads)
        _engines.clear()
    for engine in engines:
        engine.stop()
    for thread in threads:
        thread.join(STOP_SECONDS)
