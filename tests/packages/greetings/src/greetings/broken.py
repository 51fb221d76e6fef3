"""A taskset whose package needs another one that is not installed."""

import a_package_nobody_has  # noqa: F401

from taskmill.tasks import Taskset


class BrokenTaskset(Taskset):
    """Never there."""
