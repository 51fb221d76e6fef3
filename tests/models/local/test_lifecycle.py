"""Loading, sharing and letting go of weights, and what is left alone meanwhile."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from taskmill.errors import ConfigurationError, ModelError
from taskmill.models import open_model
from taskmill.models.local import LocalModel
from tests.models.local.tiny import asking, tiny_folder


def test_making_a_model_loads_nothing(tiny: Path) -> None:
    code = (
        "import sys\nfrom taskmill.models import open_model\n"
        f"model = open_model('local:{tiny}')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_the_last_model_closed_lets_the_weights_go(tiny: Path) -> None:
    one, two, other = LocalModel(tiny), LocalModel(tiny), LocalModel(tiny, dtype="bfloat16")
    weights = weakref.ref(one.module())
    assert two.module() is weights()
    assert other.module() is not weights()
    await other.close()
    await one.close()
    await one.close()
    gc.collect()
    assert weights() is not None
    assert (await two.complete(asking("tea"))).message.role == "assistant"
    await two.close()
    gc.collect()
    assert weights() is None
    assert (await one.complete(asking("tea"))).message.role == "assistant"  # loads again
    await one.close()


async def test_a_model_that_is_dropped_lets_go_too(tiny: Path) -> None:
    dropped = LocalModel(tiny)
    weights = weakref.ref(dropped.module())
    thread = dropped._used.engine._thread
    del dropped
    gc.collect()
    await asyncio.to_thread(thread.join, 60)
    gc.collect()
    assert weights() is None


async def test_a_turn_under_way_when_the_model_closes_is_told_so(tiny: Path) -> None:
    model = LocalModel(tiny)
    await model.complete(asking("tea"))
    running = asyncio.ensure_future(model.complete(asking("story", max_tokens=400, seed=1)))
    await model.count_tokens(asking("tea"))  # behind the prompt of the turn that runs
    await model.close()
    with pytest.raises(ModelError, match="was closed"):
        await running


async def test_random_state_device_and_dtype_of_the_process_are_left_alone(tiny: Path) -> None:
    state, dtype, device = torch.get_rng_state(), torch.get_default_dtype(), torch.get_default_device()
    model = LocalModel(tiny, dtype="bfloat16")
    await asyncio.gather(*(model.complete(asking("tea", temperature=1.0)) for _ in range(3)))
    await model.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_default_dtype(), torch.get_default_device()) == (dtype, device)
    assert torch.is_grad_enabled()


async def test_what_can_not_be_loaded_is_said_and_tried_again(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "m")
    shutil.move(folder / "model.safetensors", tmp_path / "aside")
    model = LocalModel(folder)
    with pytest.raises(ModelError, match=r"could not be loaded on 'cpu'.*model.safetensors"):
        await model.complete(asking("tea"))
    shutil.move(tmp_path / "aside", folder / "model.safetensors")
    assert (await model.complete(asking("tea"))).message.role == "assistant"
    await model.close()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"device": "cqu"}, "device='cqu'"),
        ({"dtype": "float13"}, "dtype='float13'"),
        ({"device": "cuda:77"}, "cuda:77"),
    ],
)
async def test_devices_and_dtypes_nobody_has_are_named(tiny: Path, fields: dict[str, str], says: str) -> None:
    model = LocalModel(tiny, **fields)
    with pytest.raises(ModelError, match=says):
        await model.complete(asking("tea"))
    await model.close()


@pytest.mark.parametrize("field", ["max_batch_size", "context", "memory"])
def test_numbers_below_one_are_refused(tiny: Path, field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        LocalModel(tiny, **{field: 0})


def test_folders_and_ids_are_told_from_endpoints(tiny: Path, tmp_path: Path) -> None:
    for named in (f"local:{tiny}", str(tiny)):
        opened = open_model(named)
        assert isinstance(opened, LocalModel)
        assert opened.path == str(tiny)
    assert open_model("local:Qwen/Qwen3-0.6B").name == "Qwen3-0.6B"
    for wrong in (f"local:{tmp_path / 'none'}", "local:../x y"):
        with pytest.raises(ConfigurationError, match="there is no model folder"):
            open_model(wrong)


def test_the_small_model_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="taskmill models fetch local"):
        open_model("local")


def test_without_torch_the_message_says_what_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from taskmill.models.local import model as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"taskmill\[local\]"):
        LocalModel(tiny)


async def test_adapters_without_peft_are_a_model_error(tiny: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    model = LocalModel(tiny, adapters=[adapter])
    with pytest.raises(ModelError, match="could not be loaded"):
        await model.complete(asking("tea"))
    await model.close()


async def test_the_card_s_sampling_holds_only_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": 1, "temperature": 1.5}')
    own, card = LocalModel(folder), LocalModel(folder, card_sampling=True)
    request = [asking("story", seed=seed) for seed in range(4)]
    assert len({(await own.complete(r)).message.content for r in request}) == 4
    assert len({(await card.complete(r)).message.content for r in request}) == 1
    await own.close()
    await card.close()
