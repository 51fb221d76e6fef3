"""Real processes, really killed."""

from __future__ import annotations

from pathlib import Path

from tests.crash.campaign import Tasksets, campaign

KILLS = 100


async def test_a_batch_killed_at_any_moment_loses_nothing_and_pays_for_nothing_twice(tmp_path: Path) -> None:
    result = await campaign(tmp_path, kills=KILLS, seed=20261)

    assert result.faults == []
    assert result.kills >= KILLS
    assert result.torn > KILLS // 10, "too few kills in the middle of a write to mean anything"
    assert result.acknowledged_rows > 0
    assert result.acknowledged_calls > 0


async def test_a_run_of_a_taskset_killed_at_any_moment_loses_nothing_and_pays_for_nothing_twice(
    tmp_path: Path,
) -> None:
    result = await campaign(tmp_path, kills=KILLS // 2, seed=20262, kind=Tasksets())

    assert result.faults == []
    assert result.kills >= KILLS // 2
    assert result.torn > KILLS // 20, "too few kills in the middle of a write to mean anything"
    assert result.acknowledged_rows > 0
    assert result.acknowledged_calls > 0
