"""What a command may count on, in every kind of sandbox of this machine."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from taskmill.errors import SandboxError, ToolArgumentsError, ToolError, ToolRefusedError
from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.choose import open_sandboxes
from taskmill.sandbox.leftovers import sweep_leftovers
from taskmill.store import files


async def test_a_command_gives_its_output_its_exit_code_and_where_it_stood(sandbox):
    result = await sandbox.run("echo out; echo err >&2; mkdir -p a/b; cd a/b; exit 3", timeout=30)
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n", 3, False)
    assert result.cwd == f"{sandbox.root}/a/b"
    assert (await sandbox.run("pwd", timeout=30, cwd=result.cwd)).output == f"{sandbox.root}/a/b\n"
    assert (await sandbox.run("pwd", timeout=30, cwd="a")).output == f"{sandbox.root}/a\n"


async def test_a_program_is_run_without_a_shell(sandbox):
    result = await sandbox.run(["printf", "%s|", "a b", "$HOME", ";"], timeout=30)
    assert result.output == "a b|$HOME|;|"


async def test_a_program_there_is_not_reads_as_a_shell_says_it(sandbox):
    result = await sandbox.run(["no-such-program"], timeout=30)
    assert result.exit_code == 127
    assert "no-such-program" in result.output


async def test_a_directory_there_is_not_is_an_error_that_names_it(sandbox):
    with pytest.raises(ToolError, match="nowhere"):
        await sandbox.run("true", timeout=30, cwd=f"{sandbox.root}/nowhere")
    assert (await sandbox.run("echo still here", timeout=30)).output == "still here\n"


@pytest.mark.parametrize(
    ("command", "code"), [("kill -TERM $$", -15), ("kill -KILL $$", -9), ("exec sh -c 'exit 137'", 137)]
)
async def test_a_signal_is_told_from_an_exit_code(sandbox, command, code):
    assert (await sandbox.run(command, timeout=30)).exit_code == code


@pytest.mark.parametrize(
    "command",
    ["cd /usr; exec true", "cd /usr; kill -KILL $$", "if", "trap 'echo mine' EXIT; cd /usr"],
    ids=["exec", "killed", "syntax error", "own trap"],
)
async def test_where_the_shell_stood_is_unknown_when_it_could_not_say_it(sandbox, command):
    assert (await sandbox.run(command, timeout=30)).cwd is None


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (r"printf 'a\0b\n' >&87; cd sub", None),
        (r"printf 'a\n/usr\n' >&87; cd sub", None),
        (r"printf '/no/such\n' >&87; exec kill -9 $$", None),
        (r"exec 87>&-; cd sub", None),
        (r"exec 87</dev/null; cd sub", None),
        (r"head -c 300000 /dev/zero >&87; cd sub", None),
        (r"yes /usr 2>/dev/null >&87; cd sub", None),
        (r"(yes >/dev/fd/87 &); sleep 0.3; cd sub", None),
        (r"cd sub; echo text >&2", "sub"),
    ],
)
async def test_what_a_command_writes_where_its_shell_reports_breaks_nothing(sandbox, command, where):
    await sandbox.run("mkdir sub", timeout=30)
    result = await sandbox.run(command, timeout=20)
    assert not result.timed_out
    assert "descriptor" not in result.output
    assert result.cwd == (where and f"{sandbox.root}/{where}")
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


async def test_the_command_text_is_the_shells_own(sandbox):
    """Line numbers, here-documents, comments at the end, odd characters: nothing is wrapped around them."""
    lines = "echo one # comment\ncat <<'END'\n$x 'y' \"z\"\nEND\necho $LINENO\nnosuchcommand\n# end"
    result = await sandbox.run(lines, timeout=30)
    assert result.output.startswith("one\n$x 'y' \"z\"\n5\n")
    assert "line 6: nosuchcommand" in result.output
    assert result.exit_code == 127


async def test_a_command_longer_than_the_kernel_takes_as_an_argument(sandbox):
    text = "x" * 300_000
    result = await sandbox.run(
        f"cat > big <<'END'\n{text}\nEND\ncd /usr; wc -c < {sandbox.root}/big", timeout=30
    )
    assert result.output.split() == ["300001"]
    assert result.cwd == "/usr"


async def test_standard_input_is_empty_unless_given(sandbox):
    assert (await sandbox.run("cat; echo end", timeout=30)).output == "end\n"
    given = bytes(range(256)) * 4096
    result = await sandbox.run("md5sum", timeout=30, stdin=given)
    import hashlib

    assert result.output.split()[0] == hashlib.md5(given).hexdigest()


async def test_input_that_nobody_reads_is_no_trouble(sandbox):
    result = await sandbox.run("exec 0<&-; echo done", timeout=30, stdin=b"x" * 5_000_000)
    assert result.output == "done\n"


async def test_what_is_not_utf8_is_replaced(sandbox):
    result = await sandbox.run(r"printf 'a\377\355\240\275b\000c'", timeout=30)
    assert result.output == "a\ufffd\ufffd\ufffd\ufffdb\0c"
    result.output.encode()


async def test_long_output_keeps_head_and_tail_in_bounded_memory(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(output=10_000))
    await sandbox.run("true", timeout=30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await sandbox.run("echo first; yes | head -c 200M; echo; echo last", timeout=120)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert result.output.startswith("first\ny\n")
    assert result.output.endswith("\ny\n\nlast\n")
    assert "bytes dropped" in result.output
    assert result.dropped == len("first\n\nlast\n") + 200 * 1024**2 - 10_000
    assert len(result.output) < 10_100
    assert grown < 20 * 1024**2


async def test_the_cut_never_splits_a_character(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(output=1001))
    result = await sandbox.run("for i in $(seq 1000); do printf '€'; done", timeout=30)
    assert "\ufffd" not in result.output
    assert result.dropped + result.output.count("€") * 3 == 3000


async def test_several_commands_at_once(sandbox):
    results = await asyncio.gather(
        *(sandbox.run(f"sleep 0.0{n}; echo {n}; cd /usr", timeout=30) for n in range(9))
    )
    assert [result.output for result in results] == [f"{n}\n" for n in range(9)]


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 1e12])
async def test_every_wait_has_an_end(sandbox, timeout):
    with pytest.raises(ToolArgumentsError, match="timeout"):
        await sandbox.run("true", timeout=timeout)


@pytest.mark.parametrize("command", ["a\0b", ["echo", "a\0b"], [], [""]])
async def test_a_command_that_can_not_be_one_is_refused(sandbox, command):
    with pytest.raises(ToolArgumentsError):
        await sandbox.run(command, timeout=30)


async def test_a_command_with_a_lone_surrogate_runs(sandbox):
    assert (await sandbox.run("echo '\ud83d'", timeout=30)).output == "?\n"


async def test_an_enormous_command_is_refused(sandbox):
    with pytest.raises(ToolRefusedError, match="bytes"):
        await sandbox.run("#" * (9 * 1024**2), timeout=30)


async def test_variables_given_are_seen(sandbox):
    assert (await sandbox.run("echo $GIVEN", timeout=30, env={"GIVEN": "a=b c"})).output == "a=b c\n"


# -- the end of a command -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "sleep {0} & wait",
        "sleep {0}",
        "trap '' TERM INT HUP; while :; do sleep {0}; done",
        "setsid sh -c 'trap \"\" TERM; sleep {0}' & sleep {0}",
        "set -m; sleep {0} & sleep {0}",
        "kill -STOP $$; sleep {0}",
    ],
)
async def test_a_timeout_kills_all_of_it(sandbox, leftovers, command):
    result = await sandbox.run(command.format(leftovers.text), timeout=0.4)
    assert result.timed_out
    assert result.exit_code == -9
    assert leftovers.gone()
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


async def test_what_was_said_before_the_timeout_is_kept(sandbox):
    await sandbox.run("true", timeout=30)  # its first process is there from then on
    result = await sandbox.run("echo before; sleep 100", timeout=1.0)
    assert (result.output, result.timed_out) == ("before\n", True)


@pytest.mark.parametrize(
    "command",
    [
        "sleep {0} &",
        "nohup sleep {0} >/dev/null 2>&1 &",
        "setsid sleep {0} &",
        "setsid setsid sh -c 'setsid sleep {0} & setsid sleep {0} &' &",
        "(sleep {0} &) &",
        "(setsid sh -c 'trap \"\" TERM HUP; sleep {0}; :' &)",
        "env -i setsid sleep {0} &",
        "python3 -c 'import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        'os.execv("/bin/sleep", ["sleep", "{0}"])\'',
    ],
)
async def test_what_goes_on_in_the_background_keeps_nobody_waiting_and_is_dead_at_the_end(
    sandbox, leftovers, command
):
    started = time.monotonic()
    result = await sandbox.run(f"{command.format(leftovers.text)}\necho said", timeout=60)
    assert result.output == "said\n"
    assert not result.timed_out
    assert time.monotonic() - started < 30  # the pipe stays open for as long as the child lives
    assert leftovers.gone()


async def test_the_end_of_a_pipeline_that_the_shell_does_not_wait_for_still_ends(sandbox):
    result = await sandbox.run("echo hello > >(cat > copy); cd .", timeout=30)
    assert result.exit_code == 0
    assert await sandbox.read_bytes("copy") == b"hello\n"


async def test_cancelling_kills(sandbox, leftovers):
    await sandbox.run("true", timeout=30)
    task = asyncio.ensure_future(
        sandbox.run(f"echo $$ > started; setsid sleep {leftovers.text} & sleep {leftovers.text}", timeout=60)
    )
    while len(leftovers.alive()) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leftovers.gone()
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


async def test_cancelling_at_any_moment_leaves_a_working_sandbox(sandbox):
    await sandbox.run("true", timeout=30)
    for step in range(25):
        task = asyncio.ensure_future(sandbox.run("echo x", timeout=30))
        for _ in range(step):
            await asyncio.sleep(0.0003)
        task.cancel()
        await asyncio.wait([task])
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


@pytest.mark.parametrize("moment", ["_lose", "_answer_all"])
async def test_cancelling_a_command_in_the_moment_its_first_process_is_lost_ends(
    sandbox, monkeypatch, moment
):
    await sandbox.run("true", timeout=30)
    host = sandbox._host
    task = asyncio.ensure_future(sandbox.run("sleep 100", timeout=200))
    while not host._calls:
        await asyncio.sleep(0.01)
    happens = getattr(host, moment)

    def cancelled_just_before() -> None:
        task.cancel()
        happens()

    monkeypatch.setattr(host, moment, cancelled_just_before)
    host._lose()
    done, _ = await asyncio.wait([task], timeout=20)
    assert done
    assert task.cancelled()
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


async def test_the_search_for_what_a_lost_first_process_left_does_not_hold_the_loop_up(
    sandboxes, monkeypatch
):
    sandbox = sandboxes(kind="plain")
    held, searching = threading.Event(), threading.Event()

    def search(prefix: str) -> int:
        searching.set()
        held.wait(30)
        return 0

    monkeypatch.setattr("taskmill.sandbox.local.kill_marked", search)
    running = asyncio.ensure_future(sandbox.run("sleep 100", timeout=200))
    while sandbox._host is None or not sandbox._host._calls:
        await asyncio.sleep(0.01)
    sandbox._host._lose()
    while not searching.is_set():
        await asyncio.sleep(0.01)
    again = asyncio.ensure_future(sandbox.run("echo again", timeout=30))
    await asyncio.sleep(0.05)
    assert not running.done()
    assert not again.done()  # its processes would bear the mark that is looked for
    held.set()
    with pytest.raises(SandboxError, match="ended"):
        await running
    assert (await again).output == "again\n"


async def test_closing_kills_what_runs_and_deletes_the_workspace(sandbox, leftovers, tmp_path):
    await sandbox.write_bytes("deep/er/file", b"x")
    await sandbox.run("mkdir locked; touch locked/x; chmod 0 locked", timeout=30)
    await sandbox.start(f"setsid sleep {leftovers.text} & sleep {leftovers.text}")
    running = asyncio.ensure_future(sandbox.run(f"sleep {leftovers.text}", timeout=60))
    while len(leftovers.alive()) < 3:
        await asyncio.sleep(0.01)
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running
    assert leftovers.gone()
    assert list((tmp_path / "sandboxes").iterdir()) == []
    await sandbox.close()
    for use in (sandbox.run("true", timeout=30), sandbox.read_bytes("deep/er/file"), sandbox.start("true")):
        with pytest.raises(SandboxError, match="closed"):
            await use


async def test_an_odd_rollout_id_names_a_folder_like_any_other(kind, tmp_path):
    sandbox = open_sandboxes(kind, directory=tmp_path).create("r/../ö 1")
    await sandbox.write_bytes("file", b"x")
    (base,) = tmp_path.iterdir()
    assert (base / "workspace/file").read_bytes() == b"x"
    await sandbox.close()
    assert list(tmp_path.iterdir()) == []


async def test_folders_however_deep_are_deleted(sandbox, tmp_path):
    name = "d" * 200
    dig = f"import os\nfor n in range(1500): os.mkdir('{name}'); os.chdir('{name}')\nopen('end', 'w')"
    assert (await sandbox.run(["python3", "-c", dig], timeout=60)).exit_code == 0
    await sandbox.write_bytes("near", b"x")
    assert await sandbox.list_files() == ["near"]
    with pytest.raises(ToolRefusedError, match="folders"):
        await sandbox.read_bytes("/".join([name] * 1500))
    await sandbox.remove(name)
    assert (await sandbox.run("ls", timeout=30)).output == "near\n"
    assert (await sandbox.run(["python3", "-c", dig], timeout=60)).exit_code == 0
    await sandbox.close()
    assert list((tmp_path / "sandboxes").iterdir()) == []


async def test_a_workspace_that_can_not_be_deleted_is_said_and_is_no_error(sandbox, monkeypatch, caplog):
    def broken(path: Path) -> None:
        raise RecursionError("too deep")

    await sandbox.write_bytes("x", b"")
    with monkeypatch.context() as patched:
        patched.setattr("taskmill.store.files.remove_tree", broken)
        await sandbox.close()
    assert "could not be deleted: too deep" in caplog.text


def test_a_leftover_that_can_not_be_deleted_keeps_no_run_from_going_on(tmp_path, monkeypatch, caplog):
    for name in ("a", "b"):
        (tmp_path / name / "workspace").mkdir(parents=True)
    remove = files.remove_tree

    def refuse_a(path: Path) -> None:
        if path.name == "a":
            raise RecursionError("too deep")
        remove(path)

    monkeypatch.setattr("taskmill.store.files.remove_tree", refuse_a)
    assert sweep_leftovers(tmp_path) == 1
    assert os.listdir(tmp_path) == ["a"]
    assert "could not be deleted: too deep" in caplog.text


async def test_a_sandbox_that_was_never_used_leaves_nothing(kind, tmp_path):
    sandbox = open_sandboxes(kind, directory=tmp_path / "none").create("r")
    await sandbox.close()
    assert not (tmp_path / "none").exists()


async def test_a_hundred_commands_leak_no_descriptor(sandbox):
    await sandbox.run("true", timeout=30)
    own = psutil.Process()
    before = own.num_fds()
    for _ in range(100):
        await sandbox.run("true", timeout=30, stdin=b"x")
    assert own.num_fds() == before
    result = await sandbox.run("ls /proc/$PPID/fd | wc -l", timeout=30)
    assert int(result.output) < 20


async def test_a_sandbox_whose_first_process_dies_says_so_and_starts_again(sandbox, leftovers, kind):
    running = asyncio.ensure_future(sandbox.run(f"setsid sleep {leftovers.text}", timeout=60))
    while not leftovers.alive():
        await asyncio.sleep(0.01)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # they die with each other
            if "marshal" in " ".join(process.cmdline()) and process.name().startswith("python"):
                process.kill()
    with pytest.raises(SandboxError, match="the sandbox ended"):
        await running
    assert leftovers.gone()
    assert (await sandbox.run("echo again", timeout=30)).output == "again\n"


async def test_a_first_process_that_is_stopped_holds_nobody_up(sandbox, leftovers, monkeypatch):
    monkeypatch.setattr("taskmill.sandbox.host.KILL_GRACE", 0.3)
    running = asyncio.ensure_future(sandbox.run(f"sleep {leftovers.text}", timeout=1.0))
    while not leftovers.alive():
        await asyncio.sleep(0.01)
    stopped = [
        process
        for process in psutil.Process().children(recursive=True)
        if "marshal" in " ".join(process.cmdline()) and process.name().startswith("python")
    ]
    for process in stopped:
        process.suspend()
    result = await running
    assert (result.timed_out, result.exit_code) == (True, -9)
    assert leftovers.gone()
    assert (await sandbox.run("echo again", timeout=30)).output == "again\n"


# -- processes in the background ------------------------------------------------------------------------------


async def test_a_background_process_is_read_written_and_waited_for(sandbox):
    process = await sandbox.start("while read line; do echo got $line; done; exit 7")
    assert process.exit_code is None
    await process.write("one\n")
    text = ""
    while "got one" not in text:
        text += process.read()
        await asyncio.sleep(0.01)
    assert await process.wait(0.01) is None
    await process.write("two\n")
    await process.kill()
    assert process.exit_code == -9
    with pytest.raises(ToolError, match="ended"):
        await process.write("three\n")


async def test_a_background_process_that_ends_tells_its_code_and_last_words(sandbox):
    process = await sandbox.start("sleep 0.1; echo last words; exit 7")
    assert await process.wait(30) == 7
    assert process.read() == "last words\n"
    assert process.read() == ""


async def test_killing_a_background_process_kills_what_it_started(sandbox, leftovers):
    process = await sandbox.start(f"setsid sleep {leftovers.text} & echo up; wait")
    while len(leftovers.alive()) < 2:
        await asyncio.sleep(0.01)
    await process.kill()
    assert leftovers.gone()


async def test_a_daemon_outlives_its_starter_and_dies_with_a_kill(sandbox, leftovers):
    process = await sandbox.start(f"setsid sleep {leftovers.text} & sleep 0.1")
    assert await process.wait(30) == 0
    assert leftovers.alive()
    await sandbox.run("true", timeout=30)
    assert leftovers.alive()
    await process.kill()
    assert leftovers.gone()


async def test_a_foreground_command_reaches_a_server_in_the_background_and_leaves_it_alone(sandbox):
    await sandbox.write_bytes("page.txt", b"served")
    server = await sandbox.start("exec python3 -u -m http.server 0 --bind 127.0.0.1")
    said = ""
    while "port " not in said:
        assert server.exit_code is None, said
        said += server.read()
        await asyncio.sleep(0.02)
    port = said.partition("port ")[2].split()[0]
    fetch = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/page.txt').read())"
    for _ in range(2):
        result = await sandbox.run(["python3", "-c", fetch], timeout=30)
        assert result.output == "b'served'\n"
    await server.kill()


async def test_output_of_a_background_process_is_bounded(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(output=5000))
    process = await sandbox.start("yes | head -c 20M; echo end")
    assert await process.wait(60) == 0
    text = process.read()
    assert len(text) < 5200
    assert text.endswith("end\n")


async def test_a_character_that_comes_in_two_parts_is_one_character(sandbox):
    process = await sandbox.start(r"printf 'a\342\202'; read x; printf '\254b'")
    text = ""
    while not text:
        text = process.read()
        await asyncio.sleep(0.01)
    await process.write("\n")
    await process.wait(30)
    assert text + process.read() == "a€b"


async def test_writing_to_a_process_that_does_not_read_ends(sandbox, monkeypatch):
    monkeypatch.setattr("taskmill.sandbox.local.WRITE_TIMEOUT", 0.2)
    process = await sandbox.start("sleep 100")
    with pytest.raises(ToolError, match="did not read"):
        await process.write("x" * 1_000_000)


# -- limits ---------------------------------------------------------------------------------------------------


async def test_a_fork_bomb_is_stopped(sandboxes, leftovers):
    sandbox = sandboxes(limits=SandboxLimits(processes=40))
    bomb = f"bomb() {{ sleep {leftovers.text} & sleep {leftovers.text} & }}; for i in $(seq 150); do bomb; done; wait"
    result = await sandbox.run(bomb, timeout=60)
    assert result.exit_code != 0
    assert not result.timed_out
    assert leftovers.gone()
    assert (await sandbox.run("echo next", timeout=30)).output == "next\n"


async def test_a_bomb_of_detached_processes_is_stopped(sandboxes, leftovers):
    sandbox = sandboxes(limits=SandboxLimits(processes=40))
    bomb = f"for i in $(seq 300); do setsid sh -c 'sleep {leftovers.text}; :' & done; sleep {leftovers.text}"
    result = await sandbox.run(bomb, timeout=60)
    assert not result.timed_out
    assert leftovers.gone()


async def test_memory_is_limited_for_a_process(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(memory=300 * 1024**2))
    result = await sandbox.run(["python3", "-c", "x = bytearray(400 * 1024**2)"], timeout=60)
    assert "MemoryError" in result.output


async def test_memory_is_limited_for_all_processes_together(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(memory=200 * 1024**2))
    hold = "import time; x = bytearray(90 * 1024**2); time.sleep(60)"
    result = await sandbox.run(f"for i in 1 2 3; do python3 -c '{hold}' & done; wait", timeout=60)
    assert not result.timed_out
    assert "together used more than" in result.output


async def test_forked_processes_that_share_memory_are_not_counted_twice(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(memory=200 * 1024**2))
    fork = (
        "import os, time\nx = b'x' * (90 * 1024**2)\n"
        "pids = [os.fork() for i in range(1)]\n"
        "if pids[0]: pids.append(os.fork())\n"
        "time.sleep(0.7)\nprint('fine')"
    )
    result = await sandbox.run(["python3", "-c", fork], timeout=60)
    assert result.output == "fine\n" * 3


async def test_the_size_of_a_file_is_limited(sandboxes):
    sandbox = sandboxes(limits=SandboxLimits(file_size=1024**2))
    await sandbox.run("head -c 5M /dev/zero > big", timeout=30)
    assert len(await sandbox.read_bytes("big")) == 1024**2


async def test_no_core_is_dumped(sandbox):
    assert (await sandbox.run("ulimit -c", timeout=30)).output == "0\n"


# -- what a rollout must not see ------------------------------------------------------------------------------


async def test_keys_in_the_environment_are_invisible(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-very-secret")
    result = await sandbox.run("env; cat /proc/self/environ /proc/$PPID/environ | tr '\\0' '\\n'", timeout=30)
    assert "sk-very-secret" not in result.output
    names = {line.partition("=")[0] for line in (await sandbox.run(["env"], timeout=30)).output.splitlines()}
    assert names <= {"PATH", "LANG", "HOME", "TERM", "TMPDIR", "TASKMILL_CALL"}
    assert (await sandbox.run("echo $HOME", timeout=30)).output == f"{sandbox.root}\n"


async def test_two_rollouts_see_neither_files_nor_variables_of_each_other(sandboxes):
    first, second = sandboxes("a"), sandboxes("b")
    await first.run("echo 1 > x; export Y=2; echo 3 > $(mktemp)", timeout=30)
    result = await second.run('cat x; echo "<$Y>"; ls -A; ls -A ${TMPDIR:-/tmp}', timeout=30)
    assert "No such file" in result.output
    assert result.output.endswith("<>\n")


async def test_one_rollout_twice_has_two_workspaces(sandboxes):
    first, second = sandboxes("same"), sandboxes("same")
    await first.write_bytes("x", b"1")
    assert await second.list_files() == []


async def test_children_die_when_the_whole_of_taskmill_is_killed(kind, tmp_path, leftovers):
    script = f"""
import asyncio
from pathlib import Path
from taskmill.sandbox.choose import open_sandboxes
async def main():
    sandbox = open_sandboxes({kind!r}, directory=Path({str(tmp_path)!r})).create("r")
    await sandbox.start("setsid sleep {leftovers.text} & env -i setsid sleep {leftovers.text} & wait")
    await sandbox.run("echo up > up; trap '' TERM; sleep {leftovers.text}", timeout=600)
asyncio.run(main())
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    while not (list(tmp_path.glob("*/workspace/up")) and len(leftovers.alive()) >= 4):
        assert child.returncode is None
        await asyncio.sleep(0.02)
    child.kill()
    await child.wait()
    assert leftovers.gone()
    assert os.listdir(tmp_path)  # the workspace is swept by the next start
    assert sweep_leftovers(tmp_path) == 1
    assert os.listdir(tmp_path) == []
