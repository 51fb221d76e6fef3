"""Linear layers by another library of torch's: the same numbers, within a pass of the batch and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from taskmill.models.local import linear
from taskmill.models.local.cache import Slots
from taskmill.models.local.linear import FEW, FasterLinears
from taskmill.models.local.loading import load, settle

HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch is without oneDNN")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 8, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.relu(self.first(given)))
        return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows given to oneDNN, call by call, on a machine where it is the faster one."""
    made: list[int] = []
    plain = linear._linear

    def counted(part: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        made.append(given.numel() // part.in_features)
        return plain(part, given)

    monkeypatch.setattr(linear, "_is_faster", lambda part: True)
    monkeypatch.setattr(linear, "_linear", counted)
    return made


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (5, 1, 24), (FEW, 24), (FEW + 1, 24)])
def test_within_the_block_it_computes_the_same(calls: list[int], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    net, given = Net(), torch.randn(*shape)
    with torch.no_grad():
        plain = net(given)
        faster = FasterLinears(net)
        assert calls == []
        with faster.used():
            other = net(given)
        assert calls == [given.numel() // 24] * 2
        assert torch.equal(net(given), plain)
    assert other.shape == plain.shape
    assert torch.allclose(other, plain, atol=1e-5)
    assert len(calls) == 2


@needs_onednn
def test_exchanged_weights_and_hooks_count_and_the_module_is_left_as_it_was(calls: list[int]) -> None:
    net, seen = Net(), []
    faster = FasterLinears(net)
    net.first.register_forward_hook(lambda part, given, made: seen.append(made.shape))
    net.second.weight = nn.Parameter(torch.zeros(8, 40))
    with torch.no_grad(), faster.used():
        assert not net(torch.randn(3, 24)).any()
    assert seen == [(3, 40)]
    assert len(calls) == 2
    assert not any("forward" in vars(part) for part in net.modules())


def test_a_layer_with_a_forward_of_somebody_s_own_keeps_it(calls: list[int]) -> None:
    net = Net()
    vars(net.second)["forward"] = lambda given: given.sum()
    with torch.no_grad(), FasterLinears(net).used():
        assert net(torch.randn(3, 24)).shape == ()
    assert "forward" in vars(net.second)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_left_alone(calls: list[int], dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    with torch.no_grad(), FasterLinears(net).used():
        net(torch.randn(3, 24, dtype=dtype))
    assert calls == []


def test_a_module_without_linear_layers_is_fine(calls: list[int]) -> None:
    with FasterLinears(nn.Sequential(nn.ReLU())).used():
        pass
    assert calls == []


def test_it_is_used_only_where_it_is_there_gives_the_same_and_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = nn.Linear(24, 40)
    times = {"plain": 1.0, "other": 2.0}
    made: dict[str, Any] = {}

    def timed(work: Any) -> tuple[Any, float]:
        name = "other" if work.func is linear._linear else "plain"
        result = made.get(name)
        if isinstance(result, Exception):
            raise result
        return (part(torch.zeros(1, 24)) if result is None else result), times[name]

    monkeypatch.setattr(linear, "_timed", timed)
    assert not linear._is_faster(part)
    times["other"] = 0.5
    assert linear._is_faster(part)
    made["other"] = torch.full((1, 40), 7.0)
    assert not linear._is_faster(part)
    made["other"] = AttributeError("no such operator")
    assert not linear._is_faster(part)


@needs_onednn
def test_what_decides_alone_is_computed_plainly(calls: list[int], tiny: Path) -> None:
    loaded = load(settle(str(tiny), "cpu", "float32", ()))
    tokens, positions = torch.tensor([[5, 6, 7]]), torch.arange(3)[None]
    alone = loaded.forward(tokens, None, None, None)
    assert calls == []
    in_a_batch = loaded.forward(tokens, None, positions, Slots(loaded.layers, rows=1, columns=3))
    assert calls
    assert torch.allclose(in_a_batch, alone, atol=1e-4)
