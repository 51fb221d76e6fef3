"""`python -m taskmill.serve TASKSET …`, the same as `taskmill serve`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from importlib import import_module

    # By name: the command line stands above this package, which is started here and not imported from.
    sys.exit(import_module("taskmill.cli").main(["serve", *sys.argv[1:]]))
