"""`taskmill eval`: roll out a taskset, score it, sum up."""

from __future__ import annotations

import asyncio
import json as json_module
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from taskmill.cli import EXIT_INTERRUPTED, EXIT_OK
from taskmill.cli.display import json_events, say
from taskmill.cli.options import Grammar, Parsed, Resolved, parse, read_file, resolve
from taskmill.cli.places import place_of
from taskmill.cli.running import Job, Listener, people_events, run_to_the_end
from taskmill.errors import ConfigurationError, TasksetError
from taskmill.evaluation.runner import Evaluation, as_toml, stored_config
from taskmill.evaluation.served import infinite_message
from taskmill.evaluation.settings import EvalSettings
from taskmill.evaluation.summary import summary_table
from taskmill.evaluation.told import event_line
from taskmill.models.families import public_url
from taskmill.records import DONE_STATES
from taskmill.tasks.words import counted

SERVER_OPTIONS = ("server_url", "server_token_file", "workers")
GRAMMAR = Grammar(
    "eval",
    EvalSettings,
    options=("output_dir", "run_name", "resume", *SERVER_OPTIONS),
    flags=("dry_run", "json", "verbose", "server"),
)

HELP = """\
Usage: taskmill eval TASKSET [OPTIONS] [@ FILE.toml]

Roll out the tasks of a taskset, score every rollout, and sum up. Each run has a directory of its own.

TASKSET is a name ('taskmill tasksets' lists them), a file (my_tasks.py, my_tasks.py:Class) or a module
(package.tasks:Class).

  -m, --model NAME           The model at the endpoint, or 'embedded'.
      --base-url URL         Address of an OpenAI-style endpoint, up to and with /v1.
      --api-key KEY          Its key. Better given by MODEL_API_KEY: a command line can be seen by others.
      --api-key-env NAME     The variable with the key.
  -n, --num-tasks N          Only the first N tasks; needed where the taskset is infinite.
  -r, --num-rollouts R       Rollouts of each task. [default: 1]
  -c, --concurrency C        Rollouts under way at once. [default: 16]
      --shuffle              Draw the tasks from the whole taskset instead of taking the first.
      --seed S               Decides the shuffle. [default: 0]
      --sampling.NAME VALUE  temperature, top_p, max_tokens, seed, stop, logprobs.
      --reasoning.NAME VALUE enabled, effort (none, minimal, low, medium, high, xhigh, max).
      --provider.NAME VALUE  only, ignore, order, sort: for endpoints that route.
      --limits.NAME VALUE    What one rollout may spend: max_turns [default: 100], max_input_tokens,
                             max_output_tokens, max_seconds, max_working_seconds, max_cost.
      --run-limits.NAME VALUE   The same for the run. What is under way then is scored all the same.
      --pass-reward REWARD   The reward from which on a rollout counts as passed. [default: 1]
      --tool-result-limit N  Characters of one tool result that the model sees. [default: 50000]
      --sandbox KIND         What confines commands: auto, bubblewrap, plain or docker. [default: auto]
      --max-failures SHARE   Give up when the model failed in more of the rollouts; 1 never. [default: 0.5]
      --call-timeout S       Seconds for one attempt at a model call. [default: 600]
      --total-timeout S      Seconds for a model call with all its attempts. [default: 3600]
      --max-attempts N       Attempts at a model call before its rollout fails. [default: 6]
      --sync WHEN            Force stored rows to the disk: each, group or none. [default: group]
      --taskset.NAME VALUE   The taskset's own fields ('taskmill tasksets NAME' shows them).
      --task.NAME VALUE      The fields of its tasks, such as --task.judges.tone.model NAME.
  @ FILE.toml                Settings from a file, several if need be; the command line wins. The config.toml of
                             a run is such a file.

      --output-dir DIR       Where the directories of runs stand. [default: runs]
      --run-name NAME        What the directory is called, with the time. [default: the taskset and the model]
      --resume DIR           Go on with a run, by its own configuration: do what is missing or failed.
                             A larger -n or -r extends it.
      --server               Have the rollouts made by an environment server of its own, in worker processes.
      --workers N            How many of them. [default: 1]
      --server-url URL       Have them made by the environment server there, which serves the same taskset.
      --server-token-file FILE   A file with that server's token.
      --dry-run              Show the configuration and the plan, and do nothing.
      --json                 Write events as JSON lines instead of a display.
  -v, --verbose              A line for each rollout as it ends.

Dashes and underscores in names are alike, and --NAME=VALUE is the same as --NAME VALUE. Model, endpoint and key come
from the options, else from MODEL_ID, MODEL_BASE_URL, MODEL_API_KEY (or OPENAI_BASE_URL, OPENAI_API_KEY), else from
the file; where none names a model, the embedded one answers.

Exit code 0 when every rollout was done, 1 when some were not, 2 when it could not be started as asked, 130 when it
was interrupted.
"""


def evaluate(*words: str) -> int:
    """Roll out the tasks of a taskset, score every rollout, and sum up."""
    if wants_help(words):
        print(HELP, end="")
        return EXIT_OK
    parsed = parse(words, GRAMMAR)
    resumed = resumed_place(parsed)
    stored = None if resumed is None else stored_config(resumed)
    resolved = resolve(parsed, GRAMMAR, stored=stored)
    options, endpoint = resolved.options, resolved.endpoint
    quiet = options.get("json", False)
    server, token = _server(resolved)
    evaluation = Evaluation(
        resolved.taskset,
        server=server,
        server_token=token,
        model=endpoint.model,
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        prices=resolved.prices,
        **{name: options[name] for name in ("output_dir", "run_name", "resume") if name in options},
        reference=resolved.reference,
        on_event=listener(event_line, quiet=quiet, verbose=options.get("verbose", False)),
        **resolved.settings,
    )
    if options.get("dry_run"):
        tell_plan(evaluation, resolved, as_json=quiet)
        return EXIT_OK
    job = EvalJob(evaluation, secrets=Secrets(parsed, resolved))
    return carry_out(job, model=endpoint.source, quiet=quiet)


def _server(resolved: Resolved) -> tuple[Any, str | None]:
    """The environment server that makes the rollouts: an address, one of its own, or none; and its token."""
    options = resolved.options
    url, own = options.get("server_url"), options.get("server", False)
    if url is not None and own:
        raise ConfigurationError("--server starts a server and --server-url names one: give one of them")
    if url is None and "server_token_file" in options:
        raise ConfigurationError("--server-token-file goes with --server-url")
    if not own and "workers" in options:
        raise ConfigurationError("--workers goes with --server")
    if url is not None:
        from taskmill.serve.address import read_token

        file = options.get("server_token_file")
        return str(url), None if file is None else read_token(Path(file))
    if not own:
        return None, None
    from taskmill.serve import EnvServer

    if resolved.taskset.INFINITE and resolved.settings.get("num_tasks") is None:
        raise ConfigurationError(infinite_message(resolved.taskset.name))
    workers, sandbox = options.get("workers", 1), resolved.settings.get("sandbox", "auto")
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise ConfigurationError(f"workers={workers!r} must be a number")
    return EnvServer(resolved.taskset, workers=workers, sandbox=sandbox), None


class Secrets:
    """What of a command stands in no file of its run, so that a resume needs it again."""

    def __init__(self, parsed: Parsed, resolved: Resolved) -> None:
        url = resolved.endpoint.base_url
        self.removed = [
            option
            for option, is_secret in (
                ("--api-key", "api_key" in parsed.given),
                ("--base-url", "base_url" in parsed.given and url is not None and public_url(url) != url),
            )
            if is_secret
        ]
        self.words: list[str] = []
        if "api_key_env" in parsed.given:
            self.words += ["--api-key-env", parsed.given["api_key_env"]]
        for name in ("server", *SERVER_OPTIONS):
            value = resolved.options.get(name)
            if value not in (None, False):
                self.words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        for path in parsed.files:
            if read_file(path, GRAMMAR).keys() & {"api_key", "api_key_env", "prices"}:
                self.words += ["@", str(path)]


class Beginning(Protocol):
    """A run that builds its first task before anything else."""

    def begin(self) -> object: ...


class EvalJob(Job):
    """A run of `Evaluation`."""

    noun = "rollouts"

    def __init__(self, evaluation: Evaluation, secrets: Secrets) -> None:
        self._evaluation = evaluation
        self._secrets = secrets
        self._is_done = False
        self.progress = evaluation.progress

    async def run(self) -> None:
        """Make the rollouts."""
        begin(self._evaluation)
        self._is_done = (await self._evaluation.run()).complete

    def is_done(self) -> bool:
        """Whether every rollout that was asked for is done."""
        return self._is_done

    def results(self, *, done: bool) -> list[str]:
        """The summary, and where the run is."""
        summary, path = self._evaluation.summary, self._evaluation.path
        told = [] if summary is None else summary_table(summary).split("\n")
        return told if path is None else [*told, f"run: {path}"]

    def ended(self) -> Mapping[str, Any]:
        """The summary, and where the run is."""
        path = self._evaluation.path
        return {"path": None if path is None else str(path), "summary": self._evaluation.summary}

    def go_on(self) -> tuple[str, list[str]]:
        """The command that resumes it: its directory says the rest."""
        words = ["taskmill", "eval", "--resume", str(self._evaluation.path), *self._secrets.words]
        return shlex.join(words), self._secrets.removed


def tell_plan(evaluation: Evaluation, resolved: Resolved, *, as_json: bool) -> None:
    """Print the resolved configuration, as TOML or JSON, and what a run by it would do."""
    settings, taskset = evaluation.settings, evaluation.taskset
    config = evaluation.config(evaluation.model_name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = taskset.draw(settings.num_tasks, settings.shuffle, settings.seed).total
    plan: dict[str, Any] = {
        "tasks": total,
        "rollouts": None if total is None else total * settings.num_rollouts,
        "done": None if evaluation.path is None else _done_in(evaluation.path),
        "model": resolved.endpoint.source,
        "directory": str(evaluation.path or Path(resolved.options.get("output_dir", "runs"))),
        "warnings": [str(warning.message) for warning in caught],
    }
    if as_json:
        print(json_module.dumps({"config": config, "plan": plan}))
        return
    print(as_toml(config).decode(), end="")
    if total is not None:
        tasks = counted(total, "task")
    elif settings.num_tasks is not None:
        tasks = f"at most {counted(settings.num_tasks, 'task')}"
    else:
        tasks = "every task of the taskset"
    print(
        f"\n# plan: {tasks}, {counted(settings.num_rollouts, 'rollout')} each, {settings.concurrency:,} at once"
    )
    print(f"# model: {plan['model']}")
    if evaluation.path is None:
        print(f"# a new directory in {plan['directory']}")
    else:
        print(f"# going on in {plan['directory']}, {counted(plan['done'], 'rollout')} done so far")
    for warning in plan["warnings"]:
        print(f"# warning: {warning}")


def _done_in(path: Path) -> int:
    from taskmill.engine.traces import read_traces
    from taskmill.store.run import RunDirectory

    return sum(trace.state in DONE_STATES for trace in read_traces(RunDirectory(path).read_traces()))


# -- what the commands for tasksets share ---------------------------------------------------------------------


def wants_help(words: Sequence[str]) -> bool:
    """Whether the words of a command ask what it takes."""
    return "--help" in words or "-h" in words


def resumed_place(parsed: Parsed) -> Path | None:
    """Which run is to be resumed, found by its folder or name; `None` for a new one."""
    named = parsed.given.get("resume")
    if named is None:
        return None
    path = place_of(named)
    parsed.given["resume"] = str(path)
    return path


def listener(line_of: Callable[..., str | None], *, quiet: bool, verbose: bool) -> Listener:
    """Who hears of a run's events: programs, on standard output, or people."""
    return json_events if quiet else people_events(line_of, verbose)


def begin(run: Beginning) -> None:
    """Have the first task built. Raises `ConfigurationError` where it can't be: nothing was made by then."""
    try:
        run.begin()
    except TasksetError as problem:
        raise ConfigurationError(str(problem)) from problem


def carry_out(job: Job, *, model: str | None, quiet: bool) -> int:
    """Run a job and return its exit code."""
    try:
        # An interrupt in this very moment is answered below; Python's own word on it would only follow that.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
        return asyncio.run(run_to_the_end(job, model=model, quiet=quiet))
    except KeyboardInterrupt:  # in the moment before the run listens to signals itself
        say("interrupted before anything was begun")
        return EXIT_INTERRUPTED
