"""A package that brings a taskset by entry point, built and installed for real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from taskmill.testing.endpoint import answer
from tests.batch.serving import serving
from tests.cli.conftest import Place

PACKAGE = Path(__file__).parents[1] / "packages" / "greetings"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder to put on the path of a process that has the package installed."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    shutil.copytree(PACKAGE, source)
    target = folder / "packages"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*command, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr
    return str(target)


def test_it_is_listed(place: Place, installed: str) -> None:
    said = place.finish("tasksets", PYTHONPATH=installed)
    assert said.code == 0, said.err
    assert re.search(r"^greetings\b", said.out, re.MULTILINE)
    assert "greetings" not in place.finish("tasksets").out


def test_it_is_validated(place: Place, installed: str) -> None:
    said = place.finish("validate", "greetings", PYTHONPATH=installed)
    assert said.code == 0, said.err
    assert "3 tasks: 3 valid, 0 invalid, 0 missing" in said.out


def test_it_is_evaluated_and_exported(place: Place, installed: str) -> None:
    with serving(answer("Ciao, Bonjour!")) as endpoint:
        said = place.finish(
            "eval", "greetings", "-m", "m", "--base-url", endpoint.url, "--json", PYTHONPATH=installed
        )
    assert said.code == 0, said.err
    last = said.events()[-1]
    assert last["summary"]["outcomes"]["completed"] == 3
    assert last["summary"]["reward"]["mean"] == pytest.approx(2 / 3)
    config = (Path(last["path"]) / "config.toml").read_text()
    assert 'name = "greetings"' in config

    # What is stored is read where the package is not.
    exported = place.finish("export", last["path"], "--to", "messages")
    assert exported.code == 0, exported.err
    assert "3 samples" in exported.out
    replayed = place.finish("replay", last["path"], PYTHONPATH=installed)
    assert replayed.code == 0, replayed.err
    without = place.finish("replay", last["path"])
    assert without.code == 2
    assert "there is no taskset 'greetings'" in without.err


def test_a_package_that_it_needs_is_named_as_missing(place: Place, installed: str) -> None:
    said = place.finish("validate", "broken_greetings", "-n", "1", PYTHONPATH=installed)
    assert said.code == 2
    assert "needs the package 'a_package_nobody_has', which is not installed" in said.err
