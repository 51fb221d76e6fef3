from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the local model is not installed: pip install 'taskmill[local]'")

from taskmill.models.local import LocalModel  # noqa: E402
from tests.models.local.tiny import tiny_folder  # noqa: E402

# Beside other busy processes, threads that compute together wait for each other most of the time.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def model(tiny: Path) -> AsyncIterator[LocalModel]:
    opened = LocalModel(tiny)
    yield opened
    await opened.close()
