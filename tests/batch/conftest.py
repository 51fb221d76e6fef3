from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.batch.mill import Mill
from tests.sandbox.test_docker import FakeDocker


@pytest.fixture
def mill(tmp_path: Path) -> Mill:
    return Mill(tmp_path)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """A stand-in for docker's command line."""
    fake = FakeDocker(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(fake.home))
    return fake
