"""Stands in for docker's command line: logs what it is asked for and runs commands on this machine.

As with the real one, what `exec` starts is no child of the client and lives on when the client is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_DOCKER"])


def main(arguments: list[str]) -> int:
    with open(HOME / "log", "a") as log:
        log.write(json.dumps(arguments) + "\n")
    verb, *rest = arguments
    if verb == "run":
        return run(rest)
    if verb == "exec":
        return execute(rest)
    if verb == "rm":
        for name in rest[2:]:
            (HOME / name).unlink(missing_ok=True)
        return 0
    if verb == "ps":
        wanted = rest[-1].removeprefix("label=")
        for file in HOME.glob("taskmill-*"):
            if json.loads(file.read_text())["label"] == wanted:
                print(file.name)
        return 0
    return 1


def run(rest: list[str]) -> int:
    *options, image, _ = rest
    while (HOME / "pulling").exists():
        time.sleep(0.01)
    if image != "good:1":
        print(f"Unable to find image '{image}' locally", file=sys.stderr)
        print(f"docker: Error response from daemon: pull access denied for {image}.", file=sys.stderr)
        return 125
    values = dict(itertools.pairwise(options))
    state = {"label": values["--label"], "workspace": values["-v"].removesuffix(":/workspace")}
    (HOME / values["--name"]).write_text(json.dumps(state))
    print("0123456789ab")
    return 0


def execute(rest: list[str]) -> int:
    directory, environment, stdin = "/", {"PATH": os.environ["PATH"]}, subprocess.DEVNULL
    while rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-i":
            stdin = None
        elif option == "-w":
            directory = rest.pop(0)
        elif option == "-e":
            name, _, value = rest.pop(0).partition("=")
            environment[name] = value
    name, *command = rest
    if not (HOME / name).exists():
        print(f"Error response from daemon: No such container: {name}", file=sys.stderr)
        return 1
    workspace = json.loads((HOME / name).read_text())["workspace"]

    def local(path: str) -> str:
        return workspace + path[len("/workspace") :] if path.startswith("/workspace") else path

    process = subprocess.Popen(
        [local(argument) for argument in command],
        cwd=local(directory),
        env=environment,
        stdin=stdin,
        start_new_session=True,
    )
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
