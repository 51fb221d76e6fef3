"""Every exception taskmill raises on purpose, as one tree.

The tree is meant to be read as a table of contents: whoever catches `TaskmillError` catches all of it, and
each branch says which room it comes from. Messages follow one pattern: what happened, where, what to do.
"""

from __future__ import annotations


class TaskmillError(Exception):
    """Base of everything below."""


# -- what the user asked for ----------------------------------------------------------------------------------


class ConfigurationError(TaskmillError, ValueError):
    """An argument, option or file that can't be meant: names the field and what would do."""


class EmptyDatasetError(ConfigurationError):
    """A dataset in which not one row is usable."""


# -- the store ------------------------------------------------------------------------------------------------


class StoreError(TaskmillError):
    """A file of a run could not be read or written."""


class StorageFullError(StoreError):
    """No more can be written (disk full, read-only, folder gone). What was acknowledged is intact."""


class RunExistsError(StoreError):
    """A fresh start was asked for on a run that already has rows."""


class RunLockedError(StoreError):
    """Another living process writes this run."""


class RunChangedError(StoreError, ValueError):
    """A resume asks for settings that would change the results of a stored run."""


class RunNotFoundError(StoreError):
    """There is no run at that path."""


# -- models ---------------------------------------------------------------------------------------------------


class ModelError(TaskmillError):
    """A model call that did not yield an answer.

    `retryable` says whether the same call may succeed later. `status` is the HTTP status where there was one,
    `body` the first part of the raw answer (secrets removed), `retry_after` the seconds the endpoint asked for,
    `attempts` how often it was tried, `waiting` the seconds spent in queues and back-off meanwhile.
    """

    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.retry_after = retry_after
        self.attempts = 1
        self.waiting = 0.0


class TransientModelError(ModelError):
    """The endpoint is away, silent, overloaded or answered nonsense: worth another try."""

    retryable = True


class RateLimitedError(TransientModelError):
    """The endpoint said 429 (or its like): slow down."""


class ModelTimeoutError(TransientModelError):
    """No answer within the time allowed."""


class MalformedAnswerError(TransientModelError):
    """An answer arrived that is not a chat completion."""


class AuthenticationError(ModelError):
    """The key is missing, wrong or not allowed (401, 403)."""


class BadRequestError(ModelError):
    """The endpoint understood the request and refuses it (400, 422)."""


class ContextWindowError(BadRequestError):
    """The conversation no longer fits the model's window."""


class ModelMemoryError(ModelError):
    """A local model, or one turn of it, does not fit the memory of its device."""


class ModelNotFoundError(ModelError):
    """The endpoint knows no model of that name (404)."""


# -- tools and their sandbox ----------------------------------------------------------------------------------


class ToolError(TaskmillError):
    """A tool call that ended as a failure; its text is shown to the model."""


class UnknownToolError(ToolError):
    """The model named a tool that was not offered."""


class ToolArgumentsError(ToolError):
    """The arguments are not JSON, or not what the tool takes."""


class ToolTimeoutError(ToolError):
    """The tool did not end in time and was abandoned or killed."""


class ToolRefusedError(ToolError):
    """The tool will not do that: a path outside the workspace, a limit reached."""


class ToolNotRunError(ToolError):
    """The call was never run: the turn that asked for it was cut off, or the rollout ended first."""


class SandboxError(TaskmillError):
    """A workspace or its confinement could not be set up."""


# -- tasksets -------------------------------------------------------------------------------------------------


class TasksetError(TaskmillError):
    """A taskset can't be found or loaded, or its `load` gave what is no task."""


class TaskIndexError(TasksetError, IndexError):
    """There is no task of that number."""


class TaskError(TaskmillError):
    """A function of a task (setup, user, reward, …) failed; the message names it."""


class RewardError(TaskError):
    """A reward or metric raised, gave no finite number, or asked for what is not there."""


class GroupRewardError(RewardError):
    """A group reward could not be given to the rollouts of a task."""


class JudgeError(TaskError):
    """A judge gave no grade: its model failed, or said nothing that is one."""


# -- runs -----------------------------------------------------------------------------------------------------


class RunAbortedError(TaskmillError):
    """A run gave up before its work was done; what was recorded stays."""


# -- worker processes and servers -----------------------------------------------------------------------------


class WorkerError(TaskmillError):
    """A worker process could not do what it was asked."""


class WorkerDied(WorkerError):  # noqa: N818 - what it is called in traces and answers
    """The process that worked on a request died, and so did those that tried it again."""


class WorkerStartError(WorkerError):
    """A worker process could not be started; the message says why."""


class ServerError(TaskmillError):
    """An environment server refused a request, gave no answer, or can't be reached."""


class ServerBusyError(ServerError):
    """The server has as much waiting as it takes, or is stopping: try again after `retry_after` seconds."""

    retry_after: float = 1.0


class ServerTokenError(ServerError):
    """The server wants a token, or another one."""
