"""One rollout, step by step: everything that is said, asked and returned, as events."""

from __future__ import annotations

import asyncio
import functools
import inspect
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from reprlib import Repr
from typing import Any

import msgspec

from taskmill.engine.sandboxes import SandboxSource
from taskmill.evaluation.solving import Solver
from taskmill.models.base import Completion, Model, Request
from taskmill.programs.agent import error_record
from taskmill.records import DONE_STATES, Message, Trace
from taskmill.sandbox.choose import Kind
from taskmill.store.files import remove_tree
from taskmill.tasks.groups import has_group_rewards, score_group
from taskmill.tasks.limits import Limits, Spent
from taskmill.tasks.rollout import RolloutSettings, TaskRollout
from taskmill.tasks.scoring import Kind as ScorerKind
from taskmill.tasks.scoring import scorers
from taskmill.tasks.task import Task

Tell = Callable[[Mapping[str, Any]], None]
"""Takes an event: a mapping with `event` and what belongs to it, fit for JSON. It may come from any thread."""

PARTS = ("setup", "user", "finalize")
MARKED: tuple[ScorerKind, ...] = ("stop", "reward", "metric", "group_reward")

_repr = Repr()
_repr.maxstring = _repr.maxother = 160
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 8


class Answers:
    """A model that says what it is given, text by text. `ended` once there is no more of it."""

    def __init__(self, texts: Sequence[str], name: str = "scripted") -> None:
        self.name = name
        self._texts = list(texts)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to say."""
        return not self._texts

    async def complete(self, request: Request) -> Completion:
        """Say the next text."""
        return Completion(Message("assistant", self._texts.pop(0)), model=self.name, cost=0.0)

    async def close(self) -> None:
        """Nothing to let go of."""


class Typist:
    """A model whose answers somebody types. `read` gives the next one, and `None` at the end of the input."""

    def __init__(self, read: Callable[[], Any], name: str = "typed") -> None:
        self.name = name
        self.ended = False
        self._read = read

    async def complete(self, request: Request) -> Completion:
        """Wait for an answer. The end of the input is an empty one, and the last."""
        typed = await self._read()
        self.ended = typed is None
        return Completion(Message("assistant", typed or ""), model=self.name, cost=0.0)

    async def close(self) -> None:
        """Nothing to let go of."""


async def debug_task(
    task: Task[Any],
    model: Model,
    tell: Tell,
    *,
    settings: RolloutSettings | None = None,
    judges: Mapping[str, Model] | None = None,
    sandbox: Kind = "auto",
) -> Trace:
    """Roll out `task` with `model` and tell every step of it; nothing is stored.

    A model with an attribute `ended` that is true ends the conversation before its next call, and the rollout is
    scored. Group rewards are given to this rollout alone. The events:

    - `task`: its data, its tools, what the model is called;
    - `sent`: what is new in a call of the model (messages, and at the first the tools and the sampling);
    - `answered`, or `model_failed`;
    - `called`: a function of the task, with the inputs it asked for (as short texts), and its value or error;
    - `said`: what came after the model's last answer;
    - `judged`: a judge's grade and words;
    - `ended`: how the rollout came out.
    """
    folder = Path(tempfile.mkdtemp(prefix="taskmill-"))
    sandboxes = SandboxSource(
        sandbox, folder / "workspaces", lambda kind, text: tell({"event": kind, "message": text})
    )
    watched = _Watched(model, tell)
    _watch(task, tell)
    try:
        rollout = TaskRollout(
            task,
            rollout_id="debug-0",
            model=watched,
            make_sandbox=sandboxes.make,
            settings=settings,
            judges=judges or {},
            spent=_Until(lambda: bool(getattr(model, "ended", False))),
        )
        if isinstance(model, Solver):
            model.rollout = rollout
        begun = rollout.trace()
        tell(
            {
                "event": "task",
                "idx": task.data.idx,
                "data": dict(begun.task),
                "class": type(task).__name__,
                "tools": [tool.name for tool in begun.tools],
                "model": model.name,
            }
        )
        await rollout.run()
        trace = rollout.trace()
        if rest := trace.messages[watched.seen :]:
            tell({"event": "said", "messages": msgspec.to_builtins(rest)})
        for said in trace.judgements:
            tell(
                {
                    "event": "judged",
                    "judge": said.judge,
                    "model": said.model,
                    "score": said.score,
                    "said": said.said,
                }
            )
        if has_group_rewards(task) and trace.state in DONE_STATES:
            (trace,) = await score_group(task, [trace])
        tell(_ended(trace))
        return trace
    finally:
        _unwatch(task)
        sandboxes.close()
        await asyncio.to_thread(remove_tree, folder)


def _ended(trace: Trace) -> dict[str, Any]:
    return {
        "event": "ended",
        "state": trace.state,
        "stop_reason": trace.stop_reason,
        "reward": trace.reward,
        "rewards": dict(trace.rewards),
        "metrics": dict(trace.metrics),
        "errors": msgspec.to_builtins(trace.errors),
        "turns": len(trace.calls),
        "usage": msgspec.to_builtins(trace.usage),
        "cost": trace.cost,
        "task_state": dict(trace.task_state),
    }


class _Until(Spent):
    """No limit but the end of what there is to say."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        super().__init__(Limits())
        self._ended = ended

    def reached(self) -> str | None:
        """Say so when it is over."""
        return "no_more_answers" if self._ended() else None


class _Watched:
    """`model`, with each call told. `seen` counts the messages of the conversation that were told."""

    def __init__(self, model: Model, tell: Tell) -> None:
        self._model = model
        self._tell = tell
        self._calls = 0
        self.seen = 0

    @property
    def name(self) -> str:
        return self._model.name

    async def complete(self, request: Request) -> Completion:
        self._calls += 1
        fresh = request.messages[self.seen :]
        event = {
            "event": "sent",
            "call": self._calls,
            "messages_before": self.seen,
            "messages": msgspec.to_builtins(fresh),
        }
        if self._calls == 1:
            event["tools"] = [msgspec.json.decode(msgspec.json.encode(tool)) for tool in request.tools]
            event["sampling"] = msgspec.to_builtins(request.sampling)
        self._tell(event)
        try:
            completion = await self._model.complete(request)
        except Exception as error:
            record = error_record(error)
            self._tell({"event": "model_failed", "type": record.type, "message": record.message})
            raise
        self.seen = len(request.messages) + 1
        self._tell(
            {
                "event": "answered",
                "message": msgspec.to_builtins(completion.message),
                "finish_reason": completion.finish_reason,
                "usage": msgspec.to_builtins(completion.usage),
                "cost": completion.cost,
                "seconds": completion.seconds,
            }
        )
        return completion

    async def close(self) -> None:
        """The model is closed by whoever opened it."""


# -- the functions of the task --------------------------------------------------------------------------------


def _watch(task: Task[Any], tell: Tell) -> None:
    """Stand before each function of the task, and tell of its calls."""
    for name in PARTS:
        if (function := getattr(task, name)) is not None:
            vars(task)[name] = _watched(function, name, name, 1.0, tell)
    for kind in MARKED:
        for scorer in scorers(type(task), kind):
            function = getattr(task, scorer.name)
            vars(task)[scorer.name] = _watched(function, kind, scorer.name, scorer.weight, tell)


def _unwatch(task: Task[Any]) -> None:
    for name, value in list(vars(task).items()):
        if getattr(value, "is_watched", False):
            del vars(task)[name]


def _watched(
    function: Callable[..., Any], kind: str, name: str, weight: float, tell: Tell
) -> Callable[..., Any]:
    def told(inputs: Mapping[str, str], started: float, **outcome: Any) -> None:
        tell(
            {
                "event": "called",
                "kind": kind,
                "name": name,
                "weight": weight,
                "inputs": inputs,
                "seconds": round(time.monotonic() - started, 6),
                **outcome,
            }
        )

    async def awaited(value: Any, inputs: Mapping[str, str], started: float) -> Any:
        try:
            value = await value
        except Exception as error:
            told(inputs, started, error=f"{type(error).__name__}: {error}")
            raise
        told(inputs, started, value=_short(value))
        return value

    @functools.wraps(function)
    async def asynchronous(**inputs: Any) -> Any:
        return await awaited(function(**inputs), _shown(inputs), time.monotonic())

    @functools.wraps(function)
    def synchronous(**inputs: Any) -> Any:
        started, shown = time.monotonic(), _shown(inputs)
        try:
            value = function(**inputs)
        except Exception as error:
            told(shown, started, error=f"{type(error).__name__}: {error}")
            raise
        if inspect.isawaitable(value):
            return awaited(value, shown, started)
        told(shown, started, value=_short(value))
        return value

    made: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    made.is_watched = True
    return made  # type: ignore[no-any-return]


def _shown(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Inputs as they are before the call, which may change them."""
    return {name: _short(value) for name, value in inputs.items()}


def _short(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Trace):
        return f"<trace: {len(value.messages)} messages, {value.stop_reason or value.state}>"
    if isinstance(value, Task):
        return f"<{type(value).__name__} {value.data.idx}>"
    if isinstance(value, list | tuple) and value and isinstance(value[0], Message | Trace):
        return f"<{len(value)} {'messages' if isinstance(value[0], Message) else 'traces'}>"
    if hasattr(value, "run") and hasattr(value, "read_bytes"):
        return f"<sandbox: {getattr(value, 'kind', '?')}>"
    return _repr.repr(value)


__all__ = ["Answers", "Typist", "debug_task"]
