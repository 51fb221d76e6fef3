"""`BatchRunner`: what a batch is told, and the order in which its run is set up and taken down."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

from taskmill.batch.run import BatchRun
from taskmill.batch.settings import POLICY_FIELDS, BatchSettings, check_settings
from taskmill.batch.told import log_events
from taskmill.batch.toolkit import OWN, Toolkit, chances_of
from taskmill.engine.dataset import FileStamp, Indexed, SkippedLine, index_rows, require_file
from taskmill.engine.progress import Progress
from taskmill.engine.sessions import last_write
from taskmill.errors import ConfigurationError, EmptyDatasetError, RunAbortedError, StoreError
from taskmill.models.base import Model
from taskmill.models.choose import is_embedded, open_model
from taskmill.models.endpoint import Timeouts
from taskmill.models.families import public_url
from taskmill.models.retry import RetryPolicy
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import describe, open_sandboxes
from taskmill.sandbox.leftovers import sweep_leftovers
from taskmill.store.ledger import Ledger
from taskmill.store.run import RunDirectory
from taskmill.tools.base import Tool

YIELD_EVERY = 500
"""Rows read between two looks at the event loop, so that an interrupt is answered at once."""

SHOWN_SKIPS = 20


class BatchRunner:
    """Runs a JSONL file of prompts through the agent loop and stores what comes of it.

    Files stand under `<output_dir>/<run_name>/`: shards `batch_<k>.jsonl`, `trajectories.jsonl`,
    `checkpoint.json`, `statistics.json`; `docs/reference/files.md` tells their fields. The constructor checks
    its arguments and touches nothing.

    The positional arguments are those of the field's batch runners. `model` is a name at the endpoint, or a
    model object; `None` is the embedded model. Keyword-only: every other field of
    `taskmill.batch.settings.BatchSettings`, and

    Args:
        tools: own tools, offered to every row besides the drawn toolsets.
        mcp_servers: MCP servers by name, whose tools are offered to every row.
        prices: US dollars per million tokens by model, for what the price table doesn't know.
        sandbox_limits: what a row's processes may use.
        on_event: called with a mapping for each thing that happens, once it is on disk. Without it, warnings and
            the first failure are logged as warnings of the logger `taskmill.batch`, and with `verbose` each row
            as information. What it raises ends the run.

    Raises:
        ConfigurationError: naming the argument, and what would do.
    """

    def __init__(
        self,
        dataset_file: str | Path,
        batch_size: int,
        run_name: str,
        distribution: str = "default",
        max_iterations: int = 10,
        base_url: str | None = None,
        api_key: str | None = None,
        model: str | Model | None = None,
        num_workers: int = 4,
        verbose: bool = False,
        ephemeral_system_prompt: str | None = None,
        log_prefix_chars: int = 100,
        providers_allowed: Sequence[str] | None = None,
        providers_ignored: Sequence[str] | None = None,
        providers_order: Sequence[str] | None = None,
        provider_sort: str | None = None,
        max_tokens: int | None = None,
        reasoning_config: Mapping[str, Any] | None = None,
        prefill_messages: Sequence[Mapping[str, Any]] | None = None,
        max_samples: int | None = None,
        *,
        tools: Sequence[Tool] = (),
        mcp_servers: Mapping[str, Any] | None = None,
        prices: Mapping[str, Mapping[str, float]] | None = None,
        sandbox_limits: SandboxLimits | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        **settings: Any,
    ) -> None:
        self.settings: BatchSettings = check_settings(
            {
                "dataset_file": dataset_file,
                "batch_size": batch_size,
                "run_name": run_name,
                "distribution": distribution,
                "max_iterations": max_iterations,
                "num_workers": num_workers,
                "verbose": verbose,
                "ephemeral_system_prompt": ephemeral_system_prompt,
                "log_prefix_chars": log_prefix_chars,
                "providers_allowed": providers_allowed,
                "providers_ignored": providers_ignored,
                "providers_order": providers_order,
                "provider_sort": provider_sort,
                "max_tokens": max_tokens,
                "reasoning_config": reasoning_config,
                "prefill_messages": prefill_messages,
                "max_samples": max_samples,
                **settings,
            }
        )
        chances_of(distribution)
        self._model = model
        self._base_url = base_url
        self._api_key = api_key
        self._prices = prices
        self._tools = tuple(tools)
        self._mcp_servers = dict(mcp_servers or {})
        self._limits = sandbox_limits
        self._busy = False
        self.progress = Progress(on_event or log_events(verbose=self.settings.verbose))
        self.path = self.settings.output_dir / run_name
        if not is_embedded(model, base_url):  # that one is looked for on the disk, which is for `run` to do
            self._open_model()

    async def run(self, resume: bool = False) -> None:
        """Run every row that has no recorded end. The result is the files.

        Rows of a batch run in order, batches side by side. Cancelling leaves a run that resumes.

        Raises:
            FileNotFoundError: no dataset there.
            EmptyDatasetError: no usable row in it.
            RunExistsError: the run has rows and `resume` is false.
            RunChangedError: the stored run was made with settings that give other results.
            RunLockedError: another process is at work on it.
            StorageFullError: nothing more can be written; what was acknowledged is intact.
            RunAbortedError: too many rows failed; those not run are left for a resume.
        """
        if self._busy:
            raise RunAbortedError(f"run {self.settings.run_name!r} is already under way in this process")
        self._busy = True
        try:
            with ExitStack() as cleanup:
                ledger = Ledger()
                cleanup.callback(ledger.close)
                indexed = await self.plan(ledger)
                await self._run_planned(ledger, indexed, resume)
        finally:
            self._busy = False

    async def plan(self, ledger: Ledger) -> Indexed:
        """Put every usable row of the dataset into the ledger.

        The first lines that are skipped are told one by one. Raises as `run` does for the dataset.
        """
        require_file(self.settings.dataset_file)
        stamp = FileStamp.of(self.settings.dataset_file)
        skipped = 0

        def skip(line: SkippedLine) -> None:
            nonlocal skipped
            skipped += 1
            if skipped <= SHOWN_SKIPS:
                self.progress.tell("warning", message=f"line {line.line} is skipped: {line.reason}")

        rows = index_rows(self.settings.dataset_file, limit=self.settings.max_samples, on_skip=skip)
        while chunk := list(itertools.islice(rows, YIELD_EVERY)):
            ledger.plan(row for row in chunk if row is not None)
            await asyncio.sleep(0)
        if skipped > SHOWN_SKIPS:
            self.progress.tell("warning", message=f"{skipped - SHOWN_SKIPS:,} more lines are skipped")
        if not ledger.total:
            raise EmptyDatasetError(
                f"no usable row in {str(self.settings.dataset_file)!r}: each line needs an object with a "
                "non-blank string 'prompt'"
            )
        return Indexed(skipped, stamp)

    def toolkit(self, mcp_tools: Mapping[str, Sequence[Tool]]) -> Toolkit:
        """The tools of the run, those of its MCP servers by server name among them."""
        return Toolkit(self.settings.distribution, {OWN: self._tools, **mcp_tools}, self.settings.seed)

    @property
    def model_name(self) -> str:
        """The model's name, as records will show it."""
        if self._model is None:
            return "embedded"
        return self._model if isinstance(self._model, str) else self._model.name

    def stored(self, model: str) -> dict[str, Any]:
        """The configuration that the run's folder keeps, for a model of that name."""
        return self.settings.stored(
            model=model,
            chances=dict(chances_of(self.settings.distribution)),
            own_tools=[tool.spec.name for tool in self._tools],
            mcp_servers=sorted(self._mcp_servers),
            base_url=None if self._base_url is None else public_url(self._base_url),
        )

    async def refusal(self, resume: bool) -> str:
        """Why `run(resume)` would refuse to start over what is stored, in words; empty where it would start."""
        directory = RunDirectory(self.path)
        try:
            model = self._open_model()
            if model is not self._model:
                await model.close()
            directory.check_start(self.stored(model.name), resume=resume, policy_fields=POLICY_FIELDS)
            directory.check_lock()
        except (ConfigurationError, StoreError) as problem:
            return str(problem)
        return ""

    async def _run_planned(self, ledger: Ledger, indexed: Indexed, resume: bool) -> None:
        settings = self.settings
        async with AsyncExitStack() as stack:
            model = self._open_model()
            if model is not self._model:
                stack.push_async_callback(model.close)
            directory = RunDirectory(self.path, sync=settings.sync)
            stored = self.stored(model.name)
            # All that can refuse the start comes before anything is made, so that nothing is left of one.
            directory.check_start(stored, resume=resume, policy_fields=POLICY_FIELDS)
            workspaces = self.path / "workspaces"
            sandboxes = open_sandboxes(settings.sandbox, directory=workspaces, limits=self._sandbox_limits())
            toolkit = self.toolkit(await self._open_mcp(stack))
            written = last_write(self.path)
            opened = directory.open_for_writing(stored, resume=resume, policy_fields=POLICY_FIELDS)
            stack.push_async_callback(directory.close)
            for repair in opened.repairs:
                self.progress.tell("warning", message=str(repair))
            for toolset, lacks in toolkit.missing.items():
                self.progress.tell("note", message=f"toolset {toolset!r} is left out: {lacks}")
            if workspaces.exists() and (left := await asyncio.to_thread(sweep_leftovers, workspaces)):
                self.progress.tell("note", message=f"{left} leftovers of a killed session were removed")
            stack.callback(_remove_empty, workspaces)
            confinement = describe(settings.sandbox)
            self.progress.tell("note", message=f"sandbox: {confinement}")
            run = BatchRun(
                settings,
                ledger=ledger,
                directory=directory,
                progress=self.progress,
                toolkit=toolkit,
                model=model,
                sandboxes=sandboxes,
                confinement=confinement,
                indexed=indexed,
                last_write=written,
            )
            await run.carry_out()

    def _open_model(self) -> Model:
        settings = self.settings
        return open_model(
            self._model,
            base_url=self._base_url,
            api_key=self._api_key,
            timeouts=Timeouts(attempt=settings.call_timeout, total=settings.total_timeout),
            policy=RetryPolicy(attempts=settings.max_attempts),
            prices=self._prices,
            tell=lambda message: self.progress.tell("warning", message=message),
        )

    async def _open_mcp(self, stack: AsyncExitStack) -> dict[str, list[Tool]]:
        if not self._mcp_servers:
            return {}
        from taskmill.tools.mcp import open_mcp

        return {
            name: await stack.enter_async_context(open_mcp({name: server}))
            for name, server in self._mcp_servers.items()
        }

    def _sandbox_limits(self) -> SandboxLimits:
        return self._limits or SandboxLimits(network=self.settings.network)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
