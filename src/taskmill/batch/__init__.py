"""Batches: a file of prompts goes through the agent loop and becomes trajectories."""

from taskmill.batch.runner import BatchRunner

__all__ = ["BatchRunner"]
