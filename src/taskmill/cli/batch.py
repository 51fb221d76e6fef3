"""`taskmill batch`: a file of prompts into trajectories."""

from __future__ import annotations

import asyncio
import json as json_module
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from taskmill.cli import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, command_words
from taskmill.cli.config import ENDPOINT_FIELDS, TABLES, read_config, read_prefill
from taskmill.cli.display import json_events, say
from taskmill.cli.endpoint import Endpoint, choose_endpoint
from taskmill.cli.running import Job, people_events, resume_command, run_to_the_end
from taskmill.errors import ConfigurationError

FLAG = Parameter(negative="")
LIST = Parameter(negative="")


def batch(
    prompts: Path | None = None,
    /,
    *,
    config: Path | None = None,
    run_name: str | None = None,
    batch_size: Annotated[int | None, Parameter(alias="-b")] = None,
    num_workers: Annotated[int | None, Parameter(alias="-c")] = None,
    distribution: Annotated[str | None, Parameter(alias="-d")] = None,
    model: Annotated[str | None, Parameter(alias="-m")] = None,
    base_url: str | None = None,
    api_key: str | None = None,
    max_iterations: int | None = None,
    max_samples: Annotated[int | None, Parameter(alias="-n")] = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    sampling_seed: int | None = None,
    reasoning_effort: str | None = None,
    no_reasoning: Annotated[bool, FLAG] = False,
    system_prompt: str | None = None,
    prefill: Path | None = None,
    providers_allowed: Annotated[list[str] | None, LIST] = None,
    providers_ignored: Annotated[list[str] | None, LIST] = None,
    providers_order: Annotated[list[str] | None, LIST] = None,
    provider_sort: str | None = None,
    sandbox: str | None = None,
    network: bool | None = None,
    seed: int | None = None,
    keep_without_reasoning: Annotated[bool, FLAG] = False,
    max_failures: float | None = None,
    call_timeout: float | None = None,
    total_timeout: float | None = None,
    max_attempts: int | None = None,
    tool_result_limit: int | None = None,
    sync: str | None = None,
    output_dir: Path | None = None,
    verbose: Annotated[bool, Parameter(alias="-v", negative="")] = False,
    log_prefix_chars: int | None = None,
    resume: Annotated[bool, FLAG] = False,
    dry_run: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Run a file of prompts into trajectories.

    Settings may stand in the TOML file as well, under the names they have in Python (`batch_size = 8`);
    the command line wins. Model, endpoint and key come from the options, else from
    MODEL_ID, MODEL_BASE_URL, MODEL_API_KEY (or OPENAI_BASE_URL, OPENAI_API_KEY), else from the file; where
    none names a model, the embedded one answers.

    Parameters
    ----------
    prompts
        JSONL file, one object with a 'prompt' a line.
    config
        TOML file with settings.
    run_name
        Folder of the run under --output-dir. [default: the name of the prompts file]
    batch_size
        Rows of a batch; they run in order and share a shard. [default: 8]
    num_workers
        Batches under way at once. [default: 4]
    distribution
        Which toolsets are offered, and how often: see 'taskmill distributions'.
    model
        Name of the model at the endpoint, or 'embedded'.
    base_url
        Address of an OpenAI-style endpoint, up to and with /v1.
    api_key
        Its key. Better given by MODEL_API_KEY: a command line can be seen by others.
    max_iterations
        Model calls of a row before it is asked for its answer. [default: 10]
    max_samples
        Only the first so many usable rows.
    max_tokens
        Tokens of one answer.
    temperature
        How freely the model samples; 0 is greedy, unset is the model's own way.
    top_p
        Sample from the likeliest tokens of so much probability; unset is the model's own way.
    sampling_seed
        Sample with a seed, another for each row, made of this one; unset sends none.
    reasoning_effort
        none, minimal, low, medium, high, xhigh or max.
    no_reasoning
        Ask the model not to think.
    system_prompt
        Sent with every call, recorded nowhere.
    prefill
        JSON file with messages to send before every prompt, recorded nowhere.
    providers_allowed
        Providers a routing endpoint may use, separated by commas.
    providers_ignored
        Providers it must not use, separated by commas.
    providers_order
        Providers to try, in this order, separated by commas.
    provider_sort
        price, throughput or latency.
    sandbox
        auto, bubblewrap, plain or docker. [default: auto]
    network
        Let the commands a model runs use the network.
    seed
        Decides the draw of toolsets. [default: 0]
    keep_without_reasoning
        Keep samples in which no turn has reasoning.
    max_failures
        Give up when a larger fraction of the finished rows failed; 1 never. [default: 0.5]
    call_timeout
        Seconds for one attempt at a model call. [default: 600]
    total_timeout
        Seconds for a model call with all its attempts and the waiting between them. [default: 3600]
    max_attempts
        Attempts at a model call before its row fails. [default: 6]
    tool_result_limit
        Characters of one tool result that the model sees. [default: 50000]
    sync
        Force stored rows to the disk: each, group or none. [default: group]
    output_dir
        Where the run's folder stands. [default: data]
    verbose
        A line for each row as it ends.
    log_prefix_chars
        Characters of a prompt that such a line shows. [default: 100]
    resume
        Go on with a run: do what is missing or failed, pay for nothing twice.
    dry_run
        Show the plan, an estimate, and whether the run would be refused, and do nothing.
    json
        Write events as JSON lines instead of a display.
    """
    file = read_config(config)
    given: dict[str, Any] = {
        "dataset_file": prompts,
        "run_name": run_name,
        "batch_size": batch_size,
        "num_workers": num_workers,
        "distribution": distribution,
        "max_iterations": max_iterations,
        "max_samples": max_samples,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "sampling_seed": sampling_seed,
        "reasoning_config": _reasoning(reasoning_effort, no_reasoning),
        "ephemeral_system_prompt": system_prompt,
        "prefill_messages": read_prefill(prefill),
        "providers_allowed": _split(providers_allowed),
        "providers_ignored": _split(providers_ignored),
        "providers_order": _split(providers_order),
        "provider_sort": provider_sort,
        "sandbox": sandbox,
        "network": network,
        "seed": seed,
        "discard_without_reasoning": False if keep_without_reasoning else None,
        "max_failures": max_failures,
        "call_timeout": call_timeout,
        "total_timeout": total_timeout,
        "max_attempts": max_attempts,
        "tool_result_limit": tool_result_limit,
        "sync": sync,
        "output_dir": output_dir,
        "verbose": verbose or None,
        "log_prefix_chars": log_prefix_chars,
    }
    settings = {"batch_size": 8} | {k: v for k, v in file.items() if k not in (*ENDPOINT_FIELDS, *TABLES)}
    settings |= {name: value for name, value in given.items() if value is not None}
    if "dataset_file" not in settings:
        raise ConfigurationError("name a file of prompts: taskmill batch PROMPTS.jsonl")
    settings.setdefault("run_name", Path(settings["dataset_file"]).stem)
    endpoint = choose_endpoint(model, base_url, api_key, file)
    _register_distributions(file.get("distributions"))
    runner = _build(settings, endpoint, file, json)
    if dry_run:
        from taskmill.batch.plan import plan_of

        plan = asyncio.run(plan_of(runner, resume=resume))
        print(json_module.dumps(plan.as_json()) if json else plan.as_text())
        return EXIT_USAGE if plan.refused else EXIT_OK
    try:
        # An interrupt in this very moment is answered below; Python's own word on it would only follow that.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
        return asyncio.run(run_to_the_end(BatchJob(runner, resume), model=endpoint.source, quiet=json))
    except KeyboardInterrupt:  # in the moment before the run listens to signals itself
        say(f"interrupted before anything was begun. To go on:\n  {resume_command(command_words())[0]}")
        return EXIT_INTERRUPTED


def _build(settings: Mapping[str, Any], endpoint: Endpoint, file: Mapping[str, Any], json: bool) -> Any:
    from taskmill.batch import BatchRunner
    from taskmill.batch.told import event_line

    return BatchRunner(
        **settings,
        model=endpoint.model,
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        prices=file.get("prices"),
        mcp_servers=file.get("mcp"),
        on_event=json_events if json else people_events(event_line, bool(settings.get("verbose"))),
    )


class BatchJob(Job):
    """A run of `BatchRunner`."""

    def __init__(self, runner: Any, resume: bool) -> None:
        self._runner = runner
        self._resume = resume
        self.progress = runner.progress

    async def run(self) -> None:
        """Run the batches."""
        await self._runner.run(resume=self._resume)

    def results(self, *, done: bool) -> list[str]:
        """Where the trajectories are."""
        return [f"trajectories: {self._runner.path / 'trajectories.jsonl'}"] if done else []

    def ended(self) -> Mapping[str, Any]:
        """Where the run is."""
        return {"path": str(self._runner.path)}

    def go_on(self) -> tuple[str, list[str]]:
        """The same command with `--resume`."""
        return resume_command(command_words())


def _reasoning(effort: str | None, off: bool) -> dict[str, Any] | None:
    if off:
        return {"enabled": False}
    return None if effort is None else {"enabled": effort != "none", "effort": effort}


def _split(values: list[str] | None) -> list[str] | None:
    return (
        None
        if values is None
        else [part.strip() for value in values for part in value.split(",") if part.strip()]
    )


def _register_distributions(tables: Any) -> None:
    if tables is None:
        return
    from taskmill.tools import register_distribution

    for name, chances in tables.items():
        register_distribution(name, chances)
