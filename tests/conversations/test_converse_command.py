"""`taskmill converse`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taskmill.cli import main
from taskmill.conversations import RunReport
from taskmill.conversations.lineup_file import read_lineup
from taskmill.errors import ConfigurationError

LINEUP = """
turns = 4
shared_context = ["The claim: ", { field = "claim" }]
shared_system_prompt = { function = "lineup_helpers:manners" }
data = "claims.jsonl"
analyzer = "lineup_helpers:grade"
reasoning_visibility = "speaker"

[until]
pattern = "AGREED"
tokens_per_turn = 50

[context]
policy = "sliding_window"
turns = 6

[[participants]]
name = "for"
answers = ["It is so.", "It still is."]
system_prompt = "Argue for it."
tools = ["todo", "lineup_helpers:look_up"]

[[participants]]
name = "against"
function = "lineup_helpers:deny"
"""

PROGRAM = "import sys; from taskmill.cli import main; sys.exit(main())"

HELPERS = '''
import os, time
def manners(row): return f"Be polite about {row['claim']}."
def grade(conversation): return len(conversation.transcript)
def deny(request):
    if os.environ.get("SLOW"): time.sleep(0.1)
    return f"No: {request.messages[-1].content}"
def look_up(word: str) -> str:
    """Look it up.

    Args:
        word: what.
    """
    return word
'''


@pytest.fixture
def lineup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "debate.toml").write_text(LINEUP)
    (tmp_path / "lineup_helpers.py").write_text(HELPERS)
    (tmp_path / "claims.jsonl").write_text(
        "".join(json.dumps({"claim": f"claim {n}"}) + "\n" for n in range(3))
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("lineup_helpers", None)
    return tmp_path / "debate.toml"


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_lineup_is_run_stored_and_extended(lineup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["converse", str(lineup), "--limit", "2"]) == 0
    said = capsys.readouterr()
    assert "2 conversations, 0 of them from before, 0 failed" in said.out
    assert "participants: for (scripted), against (deny)" in said.err

    assert main(["converse", str(lineup), "-n", "2", "--resume", "--json"]) == 0
    told = events(capsys.readouterr().out)
    assert told[0] == {"event": "started", "total": 6, "reused": 2}
    assert told[-1]["event"] == "ended"
    assert (told[-1]["exit"], told[-1]["conversations"], told[-1]["failed"]) == (0, 6, 0)
    assert told[-1]["health"]["for"]["turns"] == 12

    report = RunReport.read(lineup.parent / "runs" / "debate")
    assert set(report.analyses().values()) == {4}
    assert main(["converse", str(lineup)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_failures_are_an_exit_code_and_a_command_to_go_on_with(
    lineup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lineup.write_text(LINEUP.replace('"It still is."', ""))

    assert main(["converse", str(lineup), "--limit", "1", "--out-dir", "here"]) == 1
    said = capsys.readouterr()
    assert "'for' has no answer left" in said.err
    assert "--out-dir here --resume" in said.err


def test_status_tells_how_a_run_stands(lineup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["converse", str(lineup), "--limit", "2"])
    capsys.readouterr()

    assert main(["status", "runs/debate"]) == 0
    assert "2 planned: 2 completed" in capsys.readouterr().out

    lineup.write_text(LINEUP.replace('"It still is."', ""))
    assert main(["converse", str(lineup), "--limit", "1", "--out-dir", "here"]) == 1
    capsys.readouterr()
    assert main(["status", "here", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["summary"]["outcomes"], told["done"], told["in_flight"]) == ({"failed": 1}, False, 1)


def test_there_is_no_assistant_to_export(lineup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["converse", str(lineup), "--limit", "1"])

    assert main(["export", "runs/debate", "--to", "sharegpt"]) == 2
    assert "RunReport.read" in capsys.readouterr().err


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    lineup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["converse", str(lineup), "-n", "2", "--dry-run", "--json"]) == 0

    plan = json.loads(capsys.readouterr().out)
    assert plan["conversations"] == 6
    assert plan["recipe"]["lineup"]["turns"] == 4
    assert not (lineup.parent / "runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("turns = 4", "turns = ", "not TOML"),
        ("turns = 4", "turn = 4", "did you mean 'turns'"),
        ('"claims.jsonl"', '"gone.jsonl"', "no file of data"),
        ("lineup_helpers:grade", "lineup_helpers:gone", "no 'gone' in the module"),
        ("lineup_helpers:grade", "helpers_gone:grade", "No module named 'helpers_gone'"),
        ('function = "lineup_helpers:deny"', "", "one of model, answers, function and person"),
        ('policy = "sliding_window"\nturns = 6', 'policy = "sliding_window"', "needs turns"),
        ('name = "against"', 'name = "for"', "two participants are called 'for'"),
    ],
)
def test_what_is_wrong_in_a_lineup_is_named(
    old: str, new: str, message: str, lineup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in LINEUP
    lineup.write_text(LINEUP.replace(old, new))

    assert main(["converse", str(lineup)]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=message):
        read_lineup(lineup)


def test_a_row_that_is_no_json_is_named(lineup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lineup.parent / "claims.jsonl").write_text('{"claim": "a"}\n{"claim": \n')

    assert main(["converse", str(lineup)]) == 1
    assert "claims.jsonl', line 2: not JSON" in capsys.readouterr().err


def test_an_interrupt_keeps_what_is_recorded_and_says_how_to_go_on(lineup: Path) -> None:
    (lineup.parent / "claims.jsonl").write_text(
        "".join(json.dumps({"claim": f"claim {n}"}) + "\n" for n in range(500))
    )
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "converse", str(lineup), "--one-by-one", "-v"],
        cwd=lineup.parent,
        env={**os.environ, "SLOW": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "completed" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "against: " in out, "what is recorded is summed up"
    assert "interrupted" in err
    assert "--resume" in err
    report = RunReport.read(lineup.parent / "runs" / "debate")
    assert len(report.analyses()) >= 1
