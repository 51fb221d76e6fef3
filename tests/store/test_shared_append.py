"""Appending to one file from several processes at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WRITER = """
import sys
from pathlib import Path
from taskmill.store.files import append_shared
for number in range(40):
    line = b'{"by": %d, "n": %d, "pad": "%b"}\\n' % (int(sys.argv[2]), number, b"x" * 20_000)
    append_shared(Path(sys.argv[1]), line)
"""


def test_rows_of_several_processes_are_all_there_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(by)]) for by in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    for by in range(3):
        assert [row["n"] for row in rows if row["by"] == by] == list(range(40))
