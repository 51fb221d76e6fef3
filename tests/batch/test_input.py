"""What a file of prompts may hold, and that each of its rows is alone in the world."""

from __future__ import annotations

import json
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from taskmill.errors import EmptyDatasetError, StoreError
from taskmill.models.base import Request
from tests.batch.mill import Mill, answering, asks, echo, prompt_of, prompts_of, says, turn_of

ODD = (b"123", b'"a prompt string"', b'["prompt"]', b'{"prompt": null}', b'{"prompt": 123}')


async def test_only_a_newline_byte_ends_a_line_and_the_text_reaches_model_and_record_unchanged(
    mill: Mill,
) -> None:
    text = "a\u2028b\u2029c\u0085d\re\x0bf"
    line = json.dumps({"prompt": text}, ensure_ascii=False).replace("\\r", "\\r").encode()
    mill.prompts(line, "next")
    model = answering()

    stored = await mill.run(model)

    assert [prompt_of(request) for request in model.requests] == [text, "next"]
    assert prompts_of(stored.rows) == [text, "next"]
    assert prompts_of(stored.trajectories) == [text, "next"]


async def test_a_byte_order_mark_is_tolerated_and_blank_lines_are_nothing(mill: Mill) -> None:
    mill.prompts(b'\xef\xbb\xbf{"prompt": "a"}', b"", b" \t", b'{"prompt": "b"}\r')

    stored = await mill.run()

    assert prompts_of(stored.rows) == ["a", "b"]
    assert mill.warnings() == []
    assert stored.statistics["skipped_lines"] == 0


async def test_other_keys_are_kept_with_the_rows_record(mill: Mill) -> None:
    extra = {"id": 7, "tags": ["a", {"b": None}], "text": "ü\u2028"}
    mill.prompts({"prompt": "p", **extra}, {"prompt": "q", "id": "seven"})

    stored = await mill.run()

    assert [json.loads(row["row"]) for row in stored.trajectories] == [extra, {"id": "seven"}]


async def test_odd_rows_are_skipped_with_a_warning_each_and_the_rest_runs_and_resumes(mill: Mill) -> None:
    mill.prompts("first", *ODD, "last")
    model = answering()

    stored = await mill.run(model)
    warnings = mill.warnings()

    assert prompts_of(stored.rows) == ["first", "last"]
    assert stored.statistics["skipped_lines"] == 5
    assert stored.statistics["total_prompts"] == 2
    for number, warning in zip(range(2, 7), warnings, strict=True):
        assert f"line {number} " in warning
    assert "not an object but a number" in warnings[0]
    assert "'prompt' is null" in warnings[3]

    await mill.run(model, resume=True)
    assert model.calls == 2
    assert len(mill.warnings()) == 5


async def test_the_first_twenty_skipped_rows_are_shown_and_then_a_count(mill: Mill) -> None:
    mill.prompts("good", *[b"{"] * 33)

    stored = await mill.run()

    assert len(mill.warnings()) == 21
    assert mill.warnings()[19].startswith("line 21 ")
    assert "13 more" in mill.warnings()[20]
    assert stored.statistics["skipped_lines"] == 33


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' stands twice"),
        (b'{"prompt": "a", "score": NaN}', "NaN"),
        (b'{"prompt": "a", "score": 1e999}', "1e999"),
        (b'{"prompt": "\\ud83d"}', "unpaired surrogate"),
        (b'{"prompt": "a", "x": "\\udc00"}', "unpaired surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, "nested"),
        (b'{"prompt": " \\n\\u3000"}', "blank"),
    ],
)
async def test_what_json_has_no_word_for_is_said_and_never_a_crash(
    mill: Mill, line: bytes, reason: str
) -> None:
    mill.prompts(line, "good")

    stored = await mill.run()

    assert prompts_of(stored.rows) == ["good"]
    (warning,) = mill.warnings()
    assert "line 1 " in warning
    assert reason in warning


async def test_a_file_without_a_usable_row_is_an_error_that_names_it(mill: Mill) -> None:
    mill.prompts(*ODD)
    with pytest.raises(EmptyDatasetError, match=r"no usable row in '.*prompts\.jsonl'"):
        await mill.run()
    assert not (mill.folder / "data").exists()

    mill.prompts()
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        await mill.run()


async def test_a_file_that_is_not_there_is_an_error_that_names_it(mill: Mill) -> None:
    with pytest.raises(FileNotFoundError, match=r"prompts\.jsonl"):
        await mill.run()
    assert not (mill.folder / "data").exists()


async def test_rows_are_read_when_their_turn_comes(mill: Mill) -> None:
    """A row that is not yet due may still be changed under the run, which notices and says so."""
    prompts = [letter * 50_000 for letter in "abcd"]
    path = mill.prompts(*prompts)

    def script(request: Request) -> Any:
        if prompt_of(request) == prompts[1]:
            path.write_bytes(path.read_bytes().replace(b"d" * 50_000, b"e" * 50_000))
        return echo(request)

    with pytest.raises(StoreError, match="was changed while the run read it"):
        await mill.run(answering(script), batch_size=4)
    assert prompts_of(mill.stored.rows) == prompts[:3]


async def test_a_dataset_larger_than_what_is_kept_of_it_is_run(mill: Mill) -> None:
    size, count = 400_000, 60
    mill.prompts(*[f"{number:0{size}d}" for number in range(count)])
    model = answering(lambda _: says("short"))
    model.requests = deque(maxlen=1)
    tracemalloc.start()
    try:
        await mill.run(model, num_workers=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(mill.told("recorded")) == count
    assert peak < count * size / 2, f"{peak:,} bytes at the peak for a file of {count * size:,}"


async def test_no_context_file_and_no_memory_reaches_a_batch(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mill.folder / "AGENTS.md").write_text("CONTEXT-OF-THE-PROJECT")
    (mill.folder / "home" / "memory").mkdir(parents=True)
    for path in (mill.folder / "home" / "memory.md", mill.folder / "home" / "memory" / "notes.md"):
        path.write_text("NOTES-OF-OLD")
    monkeypatch.chdir(mill.folder)
    monkeypatch.setenv("TASKMILL_HOME", str(mill.folder / "home"))
    mill.prompts("p")
    model = answering()

    stored = await mill.run(model, distribution="default")

    (request,) = model.requests
    sent = str(request)
    assert [message.role for message in request.messages] == ["user"]
    assert "CONTEXT-OF-THE-PROJECT" not in sent
    assert "NOTES-OF-OLD" not in sent
    assert "memory" not in [spec.name for spec in request.tools]
    assert all(b"CONTEXT-OF-THE-PROJECT" not in content for content in stored.content().values())


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_file_or_variable_of_one_row_is_seen_by_another(mill: Mill, workers: int) -> None:
    mill.prompts("write", "read")
    commands = {
        "write": "echo 1 > x; export Y=2; sleep 300 & echo started $!; ls; echo $Y",
        "read": "cat x; echo Y=$Y; jobs; ls | wc -l",
    }
    answered: dict[str, str] = {}

    def script(request: Request) -> Any:
        prompt = prompt_of(request)
        if turn_of(request) == 0:
            return asks("terminal", {"command": commands[prompt]})
        answered[prompt] = request.messages[-1].content
        return says()

    stored = await mill.run(
        answering(script), distribution="terminal_only", batch_size=2 // workers, num_workers=workers
    )

    assert stored.outcome_counts() == {"completed": 2}
    assert "started" in answered["write"]
    assert "No such file" in answered["read"]
    assert "Y=\\n" in answered["read"] or "Y=\n" in answered["read"]
    assert "sleep" not in answered["read"]


def commanding(commands: dict[str, str], answered: dict[str, str]) -> Any:
    """A script that runs a row's command and keeps what came of it."""

    def script(request: Request) -> Any:
        prompt = prompt_of(request)
        if turn_of(request) == 0:
            return asks("terminal", {"command": commands[prompt]})
        answered[prompt] = request.messages[-1].content
        return says()

    return script


async def test_a_relative_cwd_is_a_folder_of_the_workspace(mill: Mill) -> None:
    mill.prompts({"prompt": "p", "cwd": "deep/er"})
    answered: dict[str, str] = {}

    await mill.run(answering(commanding({"p": "pwd"}, answered)), distribution="minimal")

    assert "/deep/er" in answered["p"]


async def test_an_absolute_cwd_is_copied_so_that_rows_share_no_file_and_the_original_stays(
    mill: Mill, tmp_path: Path
) -> None:
    source = tmp_path / "project"
    source.mkdir()
    (source / "main.py").write_text("original")
    mill.prompts({"prompt": "p", "cwd": str(source)}, {"prompt": "q", "cwd": str(source)})
    answered: dict[str, str] = {}
    commands = {"p": "cat main.py; echo changed > main.py", "q": "cat main.py"}

    await mill.run(answering(commanding(commands, answered)), distribution="minimal")

    assert "original" in answered["p"]
    assert "original" in answered["q"]
    assert (source / "main.py").read_text() == "original"


async def test_a_cwd_that_leaves_the_workspace_fails_its_row_and_no_other(mill: Mill) -> None:
    mill.prompts({"prompt": "p", "cwd": "../.."}, "q")

    stored = await mill.run(answering(commanding({"p": "pwd", "q": "pwd"}, {})), distribution="minimal")

    assert stored.outcome_counts() == {"completed": 1, "failed": 1}
    (failed,) = stored.outcomes
    assert failed["error"]["type"] == "SandboxError"
    assert "'../..'" in failed["error"]["message"]
    assert prompts_of(stored.rows) == ["q"]


async def test_a_row_with_an_image_runs_in_its_container_and_the_others_do_not(
    mill: Mill, docker: Any
) -> None:
    mill.prompts({"prompt": "p", "image": "good:1"}, {"prompt": "q", "docker_image": "good:1"}, "r")
    answered: dict[str, str] = {}

    stored = await mill.run(
        answering(commanding(dict.fromkeys("pqr", "echo hello from $0"), answered)), distribution="minimal"
    )

    assert stored.outcome_counts() == {"completed": 3}
    assert all("hello" in text for text in answered.values())
    assert [line[-2] for line in docker.calls("run")] == ["good:1", "good:1"]
    assert docker.containers() == []
    assert stored.rows[0]["task_key"] != stored.rows[2]["task_key"]
