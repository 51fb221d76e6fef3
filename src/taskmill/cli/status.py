"""`taskmill status`: what a run has done, read from its files while anyone may be writing them."""

from __future__ import annotations

import json as json_module
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from taskmill.cli import EXIT_INCOMPLETE, EXIT_OK
from taskmill.cli.display import money

FLAG = Parameter(negative="")
