"""Forks children that run real conversations, so that a kill costs milliseconds and not an interpreter's start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import taskmill.models.endpoint  # noqa: F401  imported before the fork, for all children
from taskmill.conversations import run
from tests.conversations.cast import echo, lengths, pair, rows, seat
from tests.crash.zygote import die_at


def child(job: dict[str, object]) -> None:
    if job["die_at"]:
        die_at(int(str(job["die_at"])), float(str(job["torn"])))
    talk = pair(analyzer=lengths).set(
        participants=[seat("ann", "m", base_url=str(job["base_url"])), seat("bob", echo)], name="talk"
    )
    run(
        [talk.data(rows(6))],
        n=2,
        out_dir=Path(str(job["directory"])),
        resume=True,
        batched=bool(job["batched"]),
        sync=str(job["sync"]),
    )


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(json.loads(line))
                code = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
