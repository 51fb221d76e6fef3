"""`taskmill init`: a small taskset to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from taskmill.cli import EXIT_OK
from taskmill.tasks.scaffold import write_taskset


def init(name: str, /, *, dir: Annotated[Path | None, Parameter(name="--dir")] = None) -> int:
    """Write a small taskset that runs, with its test. Nothing is overwritten.

    Parameters
    ----------
    name
        What it is called: the name of the Python file.
    dir
        The folder to write to, made where it is missing. [default: this one]
    """
    taskset, test = write_taskset(name, Path() if dir is None else dir)
    quoted = shlex.quote(str(taskset))
    print(f"wrote {taskset} and {test}. What to do next:")
    print(f"  taskmill validate {quoted} -n 3     # its solutions pass, without a model")
    print(f"  taskmill debug {quoted} --solve     # one task, step by step")
    print(f"  taskmill eval {quoted} -n 3         # with a model")
    print(f"  pytest {shlex.quote(str(test))}")
    return EXIT_OK
