"""`gsm8k`: word problems of grade school, from the hub or from a small sample that comes along."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, cast

import msgspec

from taskmill.errors import TasksetError
from taskmill.records import Trace
from taskmill.tasks.builtin._shared import bundled_text, last_answer, needed_package, number_in
from taskmill.tasks.scoring import reward
from taskmill.tasks.task import Task, TaskData
from taskmill.tasks.taskset import Taskset, TasksetConfig

DATASET = "openai/gsm8k"
REACH_SECONDS = 10.0
"""How long `source="auto"` waits for the hub before it takes the sample."""

_SYSTEM = (
    "Solve the problem step by step. End with a line of its own that has #### and the number alone, like this:\n"
    "#### 42"
)


class Gsm8kConfig(TasksetConfig):
    """Where the problems are from."""

    source: Literal["auto", "hub", "sample"] = "auto"
    """`hub` is the dataset, `sample` the problems that come along. `auto` is the hub where it can be reached.

    `auto` is decided once, when the taskset is made, and what came of it stands in the taskset's configuration from
    then on, so that whoever is given that configuration has the same tasks.
    """
    split: Literal["train", "test"] = "test"
    """Which part of the dataset; the sample has only one."""


class Gsm8kData(TaskData):
    """A problem, and its solution, which ends with `#### <number>`."""

    answer: str


class Gsm8kTask(Task[Gsm8kData]):
    """Reward: 1 for the right number, else 0."""

    @reward
    def correct(self, trace: Trace) -> float:
        said = number_in(last_answer(trace.messages))
        return float(said is not None and said == number_in(self.data.answer))

    def solve(self) -> str:
        return self.data.answer


class Gsm8kTaskset(Taskset[Gsm8kTask]):
    """Word problems of grade-school arithmetic: the dataset, or a small sample that comes along."""

    Config: ClassVar[type[TasksetConfig]] = Gsm8kConfig

    def __init__(self, config: TasksetConfig | Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        super().__init__(config, **fields)
        chosen = cast("Gsm8kConfig", self.config)
        if chosen.source == "auto":
            lacks = _lacking()
            if lacks is not None:
                told = f"gsm8k: {lacks}; its small sample is used instead of the dataset"
                warnings.warn(told, stacklevel=2)
            self.config = chosen.model_copy(update={"source": "hub" if lacks is None else "sample"})

    def load(self) -> Iterator[Gsm8kTask]:
        config = cast("Gsm8kConfig", self.config)
        rows = _sample() if config.source == "sample" else _from_hub(config.split)
        for idx, row in enumerate(rows):
            question, answer = row["question"], row["answer"]
            data = Gsm8kData(idx=idx, prompt=question, system_prompt=_SYSTEM, answer=answer)
            yield Gsm8kTask(data, self.config.task)


def _sample() -> Iterator[dict[str, str]]:
    for line in bundled_text("gsm8k_sample.jsonl").splitlines():
        yield msgspec.json.decode(line, type=dict[str, str])


def _from_hub(split: str) -> Iterable[Any]:
    datasets: Any = needed_package("datasets", "gsm8k", "hub")
    try:
        return cast("Iterable[Any]", datasets.load_dataset(DATASET, "main", split=split))
    except Exception as error:
        raise TasksetError(
            f"taskset 'gsm8k' can't have {DATASET!r} from the hub ({type(error).__name__}: {error}); "
            "its small sample is source='sample'"
        ) from error


@cache
def _lacking() -> str | None:
    """Why the dataset can't be had here, `None` if it can. Asked once a process, so that all of it agrees."""
    try:
        needed_package("datasets", "gsm8k", "hub")
    except TasksetError as error:
        return str(error)
    said: list[str | None] = [f"the hub did not answer within {REACH_SECONDS:g} s"]

    def look() -> None:
        said[0] = _unreachable()

    # Not every wait of the hub's client can be bounded from here, so it has a thread that nobody joins for good.
    asking = threading.Thread(target=look, name="taskmill-hub", daemon=True)
    asking.start()
    asking.join(REACH_SECONDS)
    return said[0]


def _unreachable() -> str | None:
    hub: Any = needed_package("huggingface_hub", "gsm8k", "hub")
    files = [f"main/{split}-00000-of-00001.parquet" for split in ("train", "test")]
    if all(isinstance(hub.try_to_load_from_cache(DATASET, file, repo_type="dataset"), str) for file in files):
        return None
    try:
        hub.HfApi().dataset_info(DATASET, timeout=REACH_SECONDS)
    except Exception as error:
        return f"the hub can't be reached ({type(error).__name__}: {error})"
    return None
