"""`taskmill eval`, `compare`, `tasksets`, and `status` of a taskset's run, as they are called."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from taskmill.cli.eval import GRAMMAR, HELP
from taskmill.testing.endpoint import answer
from tests.batch.serving import LONGEST, serving
from tests.cli.conftest import Place, Said, ended

TASKS = """
from pydantic import Field
from taskmill import Task, TaskData, Taskset, Trace, metric, reward
from taskmill.tasks import TaskConfig, TasksetConfig


class SumData(TaskData):
    answer: int


class SumTaskConfig(TaskConfig):
    bonus: float = 0.0
    label: str = ""


class SumConfig(TasksetConfig):
    task: SumTaskConfig = Field(default_factory=SumTaskConfig)
    start: int = 0
    size: int = 6


class SumTask(Task[SumData]):
    @reward
    def right(self, trace: Trace) -> float:
        said = trace.messages[-1].content
        if said == "confused":
            raise ValueError("that is no number")
        return float(said == str(self.data.answer)) + self.config.bonus

    @metric
    def length(self, trace: Trace) -> int:
        return len(trace.messages[-1].content)


class SumsTaskset(Taskset[SumTask]):
    '''Sums of one digit.'''

    Config = SumConfig

    def load(self):
        for idx in range(self.config.size):
            first = self.config.start + idx
            yield SumTask(SumData(idx=idx, prompt=f"{first}+1=", answer=first + 1), self.config.task)
"""

Run = Callable[..., Said]


def adds(body: dict[str, Any]) -> Any:
    """An endpoint that can add."""
    return answer(str(int(body["messages"][-1]["content"].partition("+")[0]) + 1))


class Confused:
    """Can add, but for one prompt the first times it is asked."""

    def __init__(self, prompt: str, times: int) -> None:
        self._prompt = prompt
        self._left = times

    def __call__(self, body: dict[str, Any]) -> Any:
        if self._left and body["messages"][-1]["content"] == self._prompt:
            self._left -= 1
            return answer("confused")
        return adds(body)


@pytest.fixture
def sums(place: Place) -> str:
    (place.folder / "sums.py").write_text(TASKS)
    return "sums.py"


def run_in(place: Place) -> Path:
    (found,) = (place.folder / "runs").iterdir()
    return found


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (run / "traces.jsonl").read_bytes().splitlines()]


def asked(url: str, *words: str) -> list[str]:
    return ["eval", "sums.py", "-m", "m", "--base-url", url, *words]


def test_a_taskset_is_rolled_out_scored_and_summed_up(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        said = taskmill(*asked(endpoint.url, "-n", "3", "-r", "2"))
    assert said.code == 0
    run = run_in(place)
    assert sorted(row["id"].rpartition("-")[2] for row in rows_of(run)) == ["0", "0", "0", "1", "1", "1"]
    assert said.out.splitlines()[-2:] == [
        "rollouts      6 planned: 6 completed, 0 partial, 0 failed, 0 cancelled, 0 missing",
        f"run: {run.relative_to(place.folder)}",
    ]
    assert "total reward  1.0000 ± 0.0000" in said.out
    assert "pass@1 1.0000 (3 tasks), pass@2 1.0000 (3 tasks)" in said.out
    assert msgspec.json.decode((run / "summary.json").read_bytes())["reward"]["mean"] == 1.0


def test_a_rollout_that_fails_is_exit_code_1_and_the_command_that_is_shown_goes_on(
    place: Place, sums: str
) -> None:
    with serving(Confused("2+1=", times=1)) as endpoint:
        said = place.finish(*asked(endpoint.url, "--api-key", "sk-secret", "-v"))
        assert said.code == 1
        assert (
            "error         1 × RewardError: reward 'right' failed: ValueError: that is no number" in said.out
        )
        assert "task 2 rollout 0: failed (RewardError), no reward, 1 call, " in said.err
        assert "1 rollouts are left. To go on, with --api-key as before:" in said.err
        command = said.err.strip().splitlines()[-1].split()
        assert command == ["taskmill", "eval", "--resume", str(run_in(place).relative_to(place.folder))]
        (place.folder / "sums.py").write_text(
            TASKS.replace('raise ValueError("that is no number")', "return 0.0")
        )
        said = place.finish(*command[1:])
        assert endpoint.calls == 6, "the answer was paid for, and is scored again"
    assert said.code == 0
    assert "6 completed, 0 partial, 0 failed" in said.out
    assert "1 attempt that a later one took the place of" in said.out


SECRETS = "sk-in-file|sk-on-line|pass-word"


def test_no_key_stands_in_a_file_of_the_run(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        (place.folder / "s.toml").write_text(
            f"model = 'm'\nbase_url = '{endpoint.url}'\napi_key = 'sk-in-file'\nnum_tasks = 1\n"
        )
        url = endpoint.url.replace("http://", "http://me:pass-word@")
        for words in (
            ["eval", "sums.py", "@", "s.toml"],
            ["eval", "sums.py", "@", "s.toml", "--api-key", "sk-on-line"],
            asked(url, "-n", "1"),
        ):
            said = taskmill(*words)
            assert said.code == 0
            assert not re.search(SECRETS, said.out + said.err)
    sent = {request.headers["Authorization"] for request in endpoint.requests}
    assert {"Bearer sk-in-file", "Bearer sk-on-line"} <= sent
    files = [file for file in (place.folder / "runs").rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        assert not re.search(SECRETS.encode(), file.read_bytes()), file.name


def test_options_reach_the_settings_the_taskset_and_its_tasks(taskmill: Run, place: Place, sums: str) -> None:
    (place.folder / "s.toml").write_text(
        "num_tasks = 5\n[taskset]\nname = 'sums.py'\nstart = 3\n[task]\nbonus = 1\nlabel = 'x'\n[sampling]\nseed = 1\n"
    )
    with serving(adds) as endpoint:
        said = taskmill(
            "eval", "@", "s.toml", "-m", "m", f"--base-url={endpoint.url}", "-n", "2", "--sampling.max-tokens", "9",
            "--task.label", "007", "--pass-reward", "2",
        )  # fmt: skip
    assert said.code == 0
    rows = rows_of(run_in(place))
    assert sorted(row["task"]["prompt"] for row in rows) == ["3+1=", "4+1="]
    assert [row["reward"] for row in rows] == [2.0, 2.0]
    assert {request.body["max_tokens"] for request in endpoint.requests} == {9}
    config = tomllib.loads((run_in(place) / "config.toml").read_text())
    assert config["taskset"]["task"] == {"judges": {}, "bonus": 1.0, "label": "007"}
    assert config["num_tasks"] == 2
    assert (config["sampling"]["max_tokens"], config["sampling"]["seed"]) == (9, 1)
    assert "pass@1 1.0000" in said.out


def test_the_configuration_of_a_run_is_taken_for_another(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        assert (
            taskmill(*asked(endpoint.url, "-n", "2", "--taskset.start", "4", "--shuffle", "--seed", "3")).code
            == 0
        )
        first = run_in(place)
        assert taskmill("eval", "@", str(first / "config.toml"), "--run-name", "again").code == 0
    (second,) = (path for path in first.parent.iterdir() if path != first)
    assert second.name.startswith("again--")
    assert (second / "config.toml").read_text() == (first / "config.toml").read_text()
    assert {row["task"]["prompt"] for row in rows_of(second)} == {
        row["task"]["prompt"] for row in rows_of(first)
    }


def test_a_dry_run_shows_what_would_be_done_and_does_nothing(taskmill: Run, place: Place, sums: str) -> None:
    words = asked("http://localhost:1/v1", "-n", "3", "-r", "2", "--sampling.temperature", "0", "--dry-run")
    said = taskmill(*words, "--api-key", "sk-1")
    assert said.code == 0
    config = tomllib.loads(said.out)
    assert config["sampling"]["temperature"] == 0
    assert config["taskset"] == {
        "name": str(place.folder / "sums.py"), "start": 0, "size": 6, "task": {"judges": {}, "bonus": 0.0, "label": ""}
    }  # fmt: skip
    assert "# plan: at most 3 tasks, 2 rollouts each, 16 at once" in said.out
    assert "sk-1" not in said.out + said.err
    told = json.loads(taskmill(*words, "--json").out)
    assert told["plan"]["model"] == "m at http://localhost:1/v1"
    assert told["config"]["num_rollouts"] == 2
    assert not (place.folder / "runs").exists()
    (place.folder / "again.toml").write_text(said.out)
    assert tomllib.loads(taskmill("eval", "@", "again.toml", "--dry-run").out) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sums.py", "-n", "-1"], "num_tasks=-1: Input should be greater than or equal to 1"),
        (["sums.py", "-n", "0"], "num_tasks=0: Input should be greater than or equal to 1"),
        (["sums.py", "-r", "0"], "num_rollouts=0: Input should be greater than or equal to 1"),
        (["sums.py", "-n", "many"], "num_tasks='many': Input should be a valid integer"),
        (
            ["alphabet_sort"],
            "AlphabetSortTaskset is infinite - select a bounded subset with num_tasks (-n on the CLI)",
        ),
        (["sums.py", "--taskset.sizes", "3"], "unknown field 'sizes'; did you mean 'size'?"),
        (["sums.py", "--task.bonuses", "3"], "unknown field 'task.bonuses'; did you mean 'task.bonus'?"),
        (
            ["sums.py", "--limits.max-turn", "3"],
            "unknown field 'limits.max_turn'; did you mean 'limits.max_turns'?",
        ),
        (["sums.py", "--max-failure", "1"], "unknown option --max-failure; did you mean --max-failures?"),
        (
            ["sums.py", "--task.judges.tone.weight", "1"],
            "judge 'tone' has no model: set task.judges.tone.model",
        ),
        (["sumz.py"], "there is no taskset file 'sumz.py'"),
        (["revers_text"], "there is no taskset 'revers_text'; did you mean 'reverse_text'?"),
        ([], "name a taskset: taskmill eval TASKSET"),
        (["--resume", "nowhere"], "there is no run in 'nowhere'"),
        (["sums.py", "-m", "gpt"], "model='gpt' without base_url"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    taskmill: Run, place: Place, sums: str, words: list[str], message: str
) -> None:
    said = taskmill("eval", *words)
    assert said.code == 2
    assert message in said.err
    assert said.out == ""
    assert not (place.folder / "runs").exists()


@pytest.mark.parametrize("command", ["eval", "validate"])
def test_a_taskset_that_fails_at_once_leaves_no_directory(taskmill: Run, place: Place, command: str) -> None:
    (place.folder / "bad.py").write_text(TASKS.replace("for idx", "import no_such_package\n        for idx"))
    said = taskmill(command, "bad.py")
    assert said.code == 2
    assert "needs the package 'no_such_package', which is not installed" in said.err
    assert "reward" not in said.out
    assert not (place.folder / "runs").exists()


def test_a_reward_that_changed_is_warned_of_at_a_resume(taskmill: Run, place: Place, sums: str) -> None:
    assert place.finish("eval", sums, "-n", "2").code == 0
    run = run_in(place)
    assert "scoring = " in (run / "config.toml").read_text()
    (place.folder / sums).write_text(TASKS.replace("+ self.config.bonus", "+ 1"))
    said = place.finish("eval", "--resume", str(run))
    assert (said.code, "code changed since this run began" in said.err) == (0, True)
    assert taskmill("eval", sums, "@", str(run / "config.toml"), "--dry-run").code == 0
    assert place.finish("replay", str(run)).code == 0


def test_a_run_is_extended_and_never_made_smaller(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        assert taskmill(*asked(endpoint.url, "-n", "2")).code == 0
        run = str(run_in(place))
        said = taskmill("eval", "--resume", run, "-n", "4", "-r", "2")
        assert said.code == 0
        assert endpoint.calls == 8
        assert "8 planned: 8 completed" in said.out
        said = taskmill("eval", "--resume", run, "-n", "2")
        assert said.code == 2
        assert "the run has num_tasks=4, now 2: a resume can extend a run, not make it smaller" in said.err
        said = taskmill("eval", "--resume", run, "--sampling.temperature", "0.5", "--concurrency", "2")
        assert said.code == 2
        assert "sampling.temperature: stored None, now 0.5" in said.err
        assert "concurrency" not in said.err
        assert endpoint.calls == 8


def test_the_file_of_a_taskset_is_found_from_another_folder(
    taskmill: Run, place: Place, sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(adds) as endpoint:
        assert taskmill(*asked(endpoint.url, "-n", "1")).code == 0
        run = run_in(place)
        elsewhere = place.folder / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        assert taskmill("eval", "--resume", str(run), "-n", "2").code == 0
    assert len(rows_of(run)) == 2


def test_events_for_programs(taskmill: Run, place: Place, sums: str) -> None:
    with serving(Confused("1+1=", times=1)) as endpoint:
        said = taskmill(*asked(endpoint.url, "-n", "2", "--json"))
    assert said.code == 1
    assert said.err == ""
    events = said.events()
    recorded = {event["idx"]: event for event in events if event["event"] == "recorded"}
    assert (recorded[0]["reward"], recorded[0]["state"]) == (1.0, "completed")
    assert (recorded[1]["reward"], recorded[1]["error"]) == (None, "RewardError")
    last = events[-1]
    assert (last["event"], last["exit"], last["states"]) == ("ended", 1, {"completed": 1, "failed": 1})
    assert last["summary"] == msgspec.json.decode((place.folder / last["path"] / "summary.json").read_bytes())
    assert last["resume"] == f"taskmill eval --resume {last['path']}"


class Held:
    """Answers the first calls at once, and holds the rest until the end."""

    def __init__(self, answered: int) -> None:
        self.reached = threading.Event()
        self._left = answered

    def answers_all(self) -> None:
        self._left = 1_000_000

    def __call__(self, body: dict[str, Any]) -> Any:
        if self._left:
            self._left -= 1
            return adds(body)
        self.reached.set()
        return answer("late", latency=3600)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(
    place: Place, sums: str, number: signal.Signals, code: int
) -> None:
    script = Held(2)
    with serving(script) as endpoint:
        process = place.start(*asked(endpoint.url, "-c", "1"))
        assert script.reached.wait(LONGEST)
        process.send_signal(number)
        said = ended(process)
        assert said.code == code
        assert "interrupted: taking no more rollouts" in said.err
        assert "Traceback" not in said.err
        assert "2 completed, 0 partial, 0 failed, 1 cancelled" in said.out
        status = place.finish("status", str(run_in(place)))
        assert status.code == 1
        assert "state     cancelled" in status.out
        assert "2 completed" in status.out
        command = said.err.strip().splitlines()[-1].split()
        script.answers_all()
        calls = endpoint.calls
        assert place.finish(*command[1:]).code == 0
        assert endpoint.calls == calls + 4
    assert len(rows_of(run_in(place))) == 6


def test_a_second_interrupt_leaves_at_once(place: Place, sums: str) -> None:
    (place.folder / "sums.py").write_text(
        TASKS + "\n    async def finalize(self):\n        import asyncio\n        await asyncio.sleep(0)\n"
    )
    script = Held(0)
    with serving(script) as endpoint:
        process = place.start(*asked(endpoint.url, "-n", "1"), program=STUBBORN)
        assert script.reached.wait(LONGEST)
        process.send_signal(signal.SIGINT)
        line_with(process, "interrupted")
        process.send_signal(signal.SIGINT)
        assert ended(process).code == 130


STUBBORN = """
import asyncio, sys
from taskmill.cli import main
from taskmill.evaluation.runner import Evaluation

real = Evaluation.run

async def run(self):
    try:
        return await real(self)
    finally:
        await asyncio.Event().wait()

Evaluation.run = run
sys.exit(main())
"""
"""A run that does not end when it is cancelled."""


def line_with(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said")


def test_status_of_a_run_that_is_done(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        assert taskmill(*asked(endpoint.url, "-n", "2")).code == 0
    said = taskmill("status", str(run_in(place)))
    assert said.code == 0
    assert f"taskset   {place.folder / 'sums.py'}, m" in said.out
    assert re.search(r"state     finished 20\d\d", said.out)
    assert "2 planned: 2 completed" in said.out
    told = json.loads(taskmill("status", str(run_in(place)), "--json").out)
    assert (told["done"], told["planned"], told["summary"]["reward"]["mean"]) == (True, 2, 1.0)


def test_status_of_a_run_that_was_killed_tells_the_plan_and_what_is_kept(place: Place, sums: str) -> None:
    script = Held(2)
    with serving(script) as endpoint:
        process = place.start(*asked(endpoint.url, "-n", "4", "-c", "1"))
        assert script.reached.wait(LONGEST)
        running = place.finish("status", str(run_in(place)))
        process.kill()
        ended(process)
    assert f"running: pid {process.pid}" in running.out
    said = place.finish("status", str(run_in(place)))
    assert said.code == 1
    assert "its last session was killed" in said.out
    assert "4 planned: 2 completed, 0 partial, 0 failed, 0 cancelled, 2 missing" in said.out


def test_two_runs_are_compared(taskmill: Run, place: Place, sums: str) -> None:
    def careless(body: dict[str, Any]) -> Any:
        return answer("0") if body["messages"][-1]["content"] == "3+1=" else adds(body)

    for name, script in (("a", adds), ("b", careless)):
        with serving(script) as endpoint:
            assert taskmill(*asked(endpoint.url, "--output-dir", name)).code == 0
    (a,), (b,) = ((place.folder / name).iterdir() for name in "ab")
    said = taskmill("compare", str(a), str(b))
    assert said.code == 0
    assert "in both: 6 tasks; 0 only in A, 0 only in B" in said.out
    assert "B is better  on 0 tasks, worse on 1, the same on 5" in said.out
    assert "only A has" not in said.out
    assert "  task 3: A 1, B 0" in said.out
    told = json.loads(taskmill("compare", str(a), str(b), "--json").out)
    assert told["reward"]["difference"] == pytest.approx(-1 / 6)
    assert taskmill("compare", str(a), "nowhere").code == 2


def test_runs_without_a_task_in_common_can_not_be_compared(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        for start in ("0", "20"):
            words = asked(endpoint.url, "--taskset.start", start, "--output-dir", f"from{start}")
            assert taskmill(*words).code == 0
    a, b = (next((place.folder / name).iterdir()) for name in ("from0", "from20"))
    said = taskmill("compare", str(a), str(b))
    assert said.code == 1
    assert "no task was scored in both" in said.out


def test_a_run_is_found_by_its_name(taskmill: Run, place: Place, sums: str) -> None:
    with serving(adds) as endpoint:
        assert taskmill(*asked(endpoint.url, "-n", "1", "--run-name", "mine")).code == 0
        assert taskmill("eval", "--resume", "mine", "-n", "2", "--api-key", "k").code == 0
        assert len(rows_of(run_in(place))) == 2
        whole = run_in(place).name
        for words in (["status", whole], ["status", "mine"], ["compare", "mine", whole], ["replay", "mine"]):
            assert taskmill(*words).code == 0, words
        assert taskmill("export", "mine", "--to", "messages").code == 0
        missed = taskmill("status", "mime")
        assert missed.code == 2
        assert (
            f"there is no run in 'mime', nor one of that name in 'data' or 'runs'; did you mean 'runs/{whole}'?"
            in missed.err
        )
        assert taskmill(*asked(endpoint.url, "-n", "1", "--run-name", "mine-too")).code == 0
    several = taskmill("status", "mine")
    assert several.code == 2
    assert "2 runs in 'runs' begin with 'mine'" in several.err
    data = place.folder / "data" / "prompts"
    data.mkdir(parents=True)
    (data / "run.json").write_text("{}")
    assert "did you mean 'data/prompts'?" in taskmill("status", "promts").err


def test_answers_that_are_empty_because_they_were_cut_are_counted(
    taskmill: Run, place: Place, sums: str
) -> None:
    def cut(body: dict[str, Any]) -> Any:
        return answer("1" if body["messages"][-1]["content"] == "0+1=" else "", finish_reason="length")

    with serving(cut) as endpoint:
        said = taskmill(*asked(endpoint.url, "-n", "3"))
    assert "3 rollouts with a turn cut at the token limit; 2 answers are empty" in said.out
    summary = json.loads((run_in(place) / "summary.json").read_text())
    assert (summary["truncated"], summary["empty_answers"]) == (3, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sums.py", "--model="], "--model needs a value, and it is empty"),
        (["sums.py", "@", "nope.toml"], "there is no settings file 'nope.toml'"),
        (["sums.py", "@", "c.toml"], "the settings file 'c.toml': unknown setting 'x'"),
        (["none.py"], "taskset 'none.py': no class of tasksets (a subclass of Taskset) is defined there"),
        (["two.py"], "there are A, B; add ':A'"),
        (
            ["old"],
            "'old' is the directory of a run, not a taskset; to go on with it: taskmill eval --resume old",
        ),
    ],
)
def test_mistakes_are_told_plainly(
    taskmill: Run, place: Place, sums: str, words: list[str], message: str
) -> None:
    (place.folder / "c.toml").write_text("x = 1")
    (place.folder / "none.py").write_text("x = 1")
    classes = "class A(Taskset):\n    pass\nclass B(Taskset):\n    pass\n"
    (place.folder / "two.py").write_text("from taskmill.tasks import Taskset\n" + classes)
    (place.folder / "old").mkdir()
    (place.folder / "old" / "run.json").write_text("{}")
    said = taskmill("eval", *words)
    assert said.code == 2
    assert message in said.err


def test_a_tasksets_own_fields_come_first_and_judges_last(taskmill: Run, sums: str) -> None:
    said = taskmill("tasksets", sums)
    options = re.findall(r"--\S+", said.out)
    judges = [option for option in options if option.startswith("--task.judges.")]
    assert options[:4] == ["--taskset.start", "--taskset.size", "--task.bonus", "--task.label"]
    assert options[4:] == judges
    assert re.search(r"--taskset.start +whole number, default 0", said.out)
    assert re.search(r"--task.judges.NAME.base_url +text or none, default none", said.out)


def test_tasksets_are_listed_with_what_is_missing(taskmill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = taskmill("tasksets")
    assert said.code == 0
    assert re.search(r"^reverse_text +Write a text backwards", said.out, re.MULTILINE)
    assert re.search(r"^alphabet_sort +infinite: Sort names", said.out, re.MULTILINE)
    monkeypatch.setattr("taskmill.cli.tasksets.find_spec", lambda name: None if name == "textarena" else True)
    rows = {row["name"]: row for row in json.loads(taskmill("tasksets", "--json").out)}
    assert rows["wordle"]["missing"] == "the package 'textarena'"
    assert rows["reasoning_gym"]["missing"] is None
    assert "get it with: pip install 'taskmill[games]'" in taskmill("tasksets").out


def test_the_fields_of_a_taskset_are_shown_as_options(taskmill: Run, place: Place, sums: str) -> None:
    said = taskmill("tasksets", "sums.py")
    assert "Sums of one digit." in said.out
    assert re.search(r"--taskset\.size +whole number, default 6", said.out)
    assert re.search(r"--task\.bonus +number, default 0\.0", said.out)
    assert re.search(r"--task\.judges\.NAME\.model ", said.out)
    assert re.search(r"--taskset\.path +text, required", taskmill("tasksets", "jsonl").out)
    assert taskmill("tasksets", "nothing").code == 2


def test_help_tells_every_option(taskmill: Run) -> None:
    assert taskmill("eval", "--help").out == HELP
    assert taskmill("eval", "reverse_text", "-h").out == HELP
    for name in {*GRAMMAR.names} - {"taskset", "task", "prices"}:
        assert re.search(rf"--{name.replace('_', '-')}\b", HELP), name
    for letter, name in GRAMMAR.short.items():
        assert f"-{letter}, --{name.replace('_', '-')}" in HELP


def test_the_function_has_the_name_of_no_module() -> None:
    code = "import taskmill.evaluation.runner; from taskmill import evaluate; print(callable(evaluate))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
