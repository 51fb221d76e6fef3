"""`taskmill debug`: one task, step by step, on the terminal."""

from __future__ import annotations

import asyncio
import itertools
import json as json_module
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from taskmill.cli import EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_OK
from taskmill.cli.display import json_events, say, say_result
from taskmill.cli.eval import wants_help
from taskmill.cli.options import Grammar, Parsed, Resolved, parse, resolve
from taskmill.errors import ConfigurationError
from taskmill.evaluation.debugging import Answers, Typist, debug_task
from taskmill.evaluation.settings import EvalSettings, check_settings
from taskmill.evaluation.solving import Solver
from taskmill.models.base import Model
from taskmill.models.choose import open_model
from taskmill.models.endpoint import Timeouts
from taskmill.models.retry import RetryPolicy
from taskmill.records import DONE_STATES
from taskmill.tasks.task import Task
from taskmill.tasks.taskset import Taskset
from taskmill.tasks.words import counted
from taskmill.tools.threads import THREADS

GRAMMAR = Grammar(
    "debug",
    EvalSettings,
    options=("idx", "answer"),
    flags=("json", "solve", "type"),
    short={"m": "model", "n": "num_tasks"},
)

SHOWN = 4000
"""Characters of one text that are shown; `--json` has all of them."""

HELP = """\
Usage: taskmill debug TASKSET [OPTIONS] [@ FILE.toml]

One task, step by step: what the model is sent, what it answers, each tool call, each function of the task with its
inputs. Nothing is stored.

  -n, --num-tasks N          So many tasks, one after the other. [default: 1]
      --idx I                The task with this number instead of the first.
  -m, --model NAME           The model at the endpoint, or 'embedded'.
      --base-url URL         Address of an OpenAI-style endpoint, up to and with /v1.
      --api-key KEY          Its key. Better given by MODEL_API_KEY: a command line can be seen by others.
      --api-key-env NAME     The variable with the key.
      --solve                Instead of a model: the task's reference solution.
      --answer TEXT          Instead of a model: this answer. Given several times, one after the other.
      --type                 Instead of a model: you. An answer is a line; one that ends with a backslash goes on in
                             the next. The end of the input (Ctrl-D) ends the conversation.
      --sampling.NAME VALUE  temperature, top_p, max_tokens, seed, stop.
      --reasoning.NAME VALUE enabled, effort (none, minimal, low, medium, high, xhigh, max).
      --limits.NAME VALUE    What the rollout may spend: max_turns [default: 100], max_seconds, …
      --sandbox KIND         What confines commands: auto, bubblewrap, plain or docker. [default: auto]
      --taskset.NAME VALUE   The taskset's own fields ('taskmill tasksets NAME' shows them).
      --task.NAME VALUE      The fields of its tasks.
  @ FILE.toml                Settings from a file, several if need be; the command line wins.
      --json                 Write every step as a JSON line, with all of each text.

Exit code 0 when each rollout has a reward, 1 when one has none, 2 when it could not be started as asked, 130 when it
was interrupted.
"""

STAND_INS = ("solve", "answer", "type")


def debug(*words: str) -> int:
    """One task, step by step."""
    if wants_help(words):
        print(HELP, end="")
        return EXIT_OK
    kept, answers = _answers(words)
    parsed = parse(kept, GRAMMAR)
    chosen = [f"--{name}" for name in STAND_INS if (parsed.has(name) if name != "answer" else answers)]
    if "model" in parsed.given:
        chosen.append("--model")
    if len(chosen) > 1:
        raise ConfigurationError(f"one of {' and '.join(chosen)} can answer, not both")
    resolved = resolve(parsed, GRAMMAR)
    tasks = _tasks(resolved)
    quiet = parsed.has("json")
    try:
        done = asyncio.run(_debug(tasks, resolved, _stand_in(parsed, answers, quiet), quiet))
    except KeyboardInterrupt:
        say("\ninterrupted")
        return EXIT_INTERRUPTED
    return EXIT_OK if done else EXIT_INCOMPLETE


def _answers(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without `--answer`, and what was given by it: of other options only the last counts."""
    kept, answers = [], []
    waiting = iter(words)
    for word in waiting:
        option, equals, value = word.partition("=")
        if option != "--answer":
            kept.append(word)
            continue
        given = value if equals else next(waiting, None)
        if given is None:
            raise ConfigurationError("--answer needs a value")
        answers.append(given)
    return kept, answers


def _tasks(resolved: Resolved) -> Iterator[Task[Any]]:
    """The tasks to look at, built as they are asked for. Raises `ConfigurationError` for what can't be meant."""
    idx = resolved.options.get("idx")
    number = resolved.settings.setdefault("num_tasks", 1)
    settings = check_settings(resolved.settings)
    if idx is None:
        return resolved.taskset.draw(number, settings.shuffle, settings.seed)
    if not isinstance(idx, int) or idx < 0:
        raise ConfigurationError(f"--idx {idx}: the number of a task is needed, from 0")
    return itertools.islice(_from(resolved.taskset, idx), number)


def _from(taskset: Taskset[Any], idx: int) -> Iterator[Task[Any]]:
    found = False
    for task in taskset.checked():
        if task.data.idx >= idx:
            if not found and task.data.idx != idx:
                break
            found = True
            yield task
    if not found:
        raise ConfigurationError(f"taskset {taskset.name!r} has no task {idx}")


StandIn = Callable[[Task[Any]], Model] | None
"""Makes what answers in the place of a model, task by task."""


def _stand_in(parsed: Parsed, answers: list[str], quiet: bool) -> StandIn:
    if answers:
        return lambda task: Answers(answers)
    if parsed.has("type"):
        return lambda task: Typist(lambda: _typed(quiet))
    if parsed.has("solve"):
        return _solver
    return None


def _solver(task: Task[Any]) -> Model:
    if task.solve is None:
        raise ConfigurationError(f"task {task.data.idx} has no reference solution")
    return Solver(task)


async def _typed(quiet: bool) -> str | None:
    """What somebody types as one answer; `None` at the end of the input."""
    if not quiet:
        print("you answer> ", end="", file=sys.stderr, flush=True)
    lines: list[str] = []
    while True:
        line = await THREADS.run(sys.stdin.readline)
        if not line and not lines:
            return None
        text = line.rstrip("\n")
        if not line or not text.endswith("\\"):
            return "\n".join([*lines, text])
        lines.append(text[:-1])


async def _debug(tasks: Iterator[Task[Any]], resolved: Resolved, stand_in: StandIn, quiet: bool) -> bool:
    settings = check_settings(resolved.settings)
    endpoint = resolved.endpoint
    limits = Timeouts(attempt=settings.call_timeout, total=settings.total_timeout)
    policy = RetryPolicy(attempts=settings.max_attempts)
    tell = json_events if quiet else _say_event
    done = True
    async with AsyncExitStack() as stack:

        def opened(model: Any, base_url: str | None, key: str | None) -> Model:
            found = open_model(
                model, base_url=base_url, api_key=key, timeouts=limits, policy=policy, prices=resolved.prices
            )
            stack.push_async_callback(found.close)
            return found

        for name, judge in resolved.taskset.config.task.judges.items():
            if judge.model is None:
                raise ConfigurationError(f"judge {name!r} has no model: set task.judges.{name}.model")
        judges = {
            name: opened(judge.model, judge.base_url, os.environ.get(judge.api_key_env))
            for name, judge in resolved.taskset.config.task.judges.items()
        }
        model = None
        if stand_in is None:
            model = opened(endpoint.model, endpoint.base_url, endpoint.api_key)
        for task in tasks:
            trace = await debug_task(
                task,
                stand_in(task) if stand_in is not None else model,  # type: ignore[arg-type]
                tell,
                settings=settings.rollout(),
                judges=judges,
                sandbox=settings.sandbox,
            )
            done = done and trace.state in DONE_STATES
    return done


# -- for people -----------------------------------------------------------------------------------------------


def _say_event(event: Mapping[str, Any]) -> None:
    say_result("\n".join(lines_of(event)))


def lines_of(event: Mapping[str, Any]) -> list[str]:
    """An event for people. Control characters are for whoever writes the lines to take out."""
    match event["event"]:
        case "task":
            lines = [f"== task {event['idx']} ({event['class']}), answered by {event['model']} =="]
            lines += _fields(
                {k: v for k, v in event["data"].items() if k not in ("idx", "prompt", "system_prompt")}
            )
            return [*lines, *([f"  tools: {', '.join(event['tools'])}"] if event["tools"] else [])]
        case "sent":
            lines = [f"\n-- call {event['call']}: the model is sent{_before(event)} --"]
            for tool in event.get("tools", ()):
                lines += _block(
                    f"tool {tool['name']}", f"{tool['description']}\n{json_module.dumps(tool['parameters'])}"
                )
            if sampling := event.get("sampling"):
                lines.append(
                    "  sampling: " + ", ".join(f"{name}={value}" for name, value in sampling.items())
                )
            return [*lines, *itertools.chain.from_iterable(map(_message, event["messages"]))]
        case "answered":
            used = event["usage"]
            cost = "" if not event["cost"] else f", ${event['cost']:.4f}"
            tokens = f"{used.get('input_tokens', 0):,} tokens in, {used.get('output_tokens', 0):,} out"
            head = f"-- it answers ({event['finish_reason']}; {tokens}{cost}, {event['seconds']:.2f} s) --"
            return [head, *_message(event["message"])]
        case "model_failed":
            return [f"-- the model failed: {event['type']}: {_line(event['message'])} --"]
        case "said":
            return [
                "\n-- after its last answer --",
                *itertools.chain.from_iterable(map(_message, event["messages"])),
            ]
        case "called":
            return _called(event)
        case "judged":
            score = "no grade" if event["score"] is None else f"{event['score']:g}"
            return _block(f"judge {event['judge']} ({event['model']}): {score}", event["said"])
        case "ended":
            return _ending(event)
    return [f"{event['event']}: {event.get('message', '')}"]


def _before(event: Mapping[str, Any]) -> str:
    count = event["messages_before"]
    return f" ({count} messages as before, and)" if count else ""


def _message(message: Mapping[str, Any]) -> list[str]:
    role = message["role"]
    if role == "tool":
        went = " (failed)" if message.get("success") is False else ""
        return _block(f"result of {message.get('name', '?')}{went}", message.get("content", ""))
    lines = []
    if message.get("reasoning"):
        lines += _block("reasoning", message["reasoning"])
    calls = message.get("tool_calls", ())
    if message.get("content") or not calls:
        lines += _block(role, message.get("content", ""))
    for call in calls:
        lines += _block(f"calls {call['name']}", call.get("arguments", "{}"))
    return lines


def _called(event: Mapping[str, Any]) -> list[str]:
    kind, name = event["kind"], event["name"]
    what = name if kind == name else f"{kind.replace('_', ' ')} {name}"
    inputs = ", ".join(f"{name}={value}" for name, value in event["inputs"].items())
    weight = f" × {event['weight']:g}" if kind in ("reward", "group_reward") and event["weight"] != 1 else ""
    came = f"raised {_line(event['error'])}" if "error" in event else f"gave {event['value']}{weight}"
    return [f"* {what}({inputs}) {came}  [{event['seconds']:.3f} s]"]


def _ending(event: Mapping[str, Any]) -> list[str]:
    reward = "no reward" if event["reward"] is None else f"reward {event['reward']:g}"
    lines = [
        f"\n== {event['state']} ({event['stop_reason']}) after {counted(event['turns'], 'call')}: {reward} =="
    ]
    for title, values in (("reward", event["rewards"]), ("metric", event["metrics"])):
        lines += [f"  {title} {name}: {value:g}" for name, value in values.items()]
    if event["task_state"]:
        lines.append(f"  state: {_cut(json_module.dumps(event['task_state'], ensure_ascii=False))}")
    lines += [f"  error {error['type']}: {_line(error['message'])}" for error in event["errors"]]
    return lines


def _fields(values: Mapping[str, Any]) -> list[str]:
    return [
        f"  {name}: {_cut(json_module.dumps(value, ensure_ascii=False))}" for name, value in values.items()
    ]


def _block(title: str, text: str) -> list[str]:
    title = _line(title)
    lines = _cut(text).split("\n")
    if len(lines) == 1 and len(lines[0]) < 100:
        return [f"  {title}: {lines[0] or '(empty)'}"]
    return [f"  {title}:", *(f"    {line}" for line in lines)]


def _line(text: str) -> str:
    """On one line, so that what a model or a task says can't look like a step."""
    return " ".join(text.split())


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text) - SHOWN:,} characters more)"
