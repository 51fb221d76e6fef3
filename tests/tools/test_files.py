from __future__ import annotations

import asyncio

import pytest

from taskmill.records import ToolCall
from taskmill.store.jsonl import encode_row
from taskmill.tools import TOOLSETS, ToolBox
from taskmill.tools import files as files_module
from taskmill.tools import patching as patching_module
from taskmill.tools import search as search_module


@pytest.fixture
def do(context):
    box = ToolBox(TOOLSETS["file"].tools(), context)

    async def do(name: str, **arguments) -> tuple[bool, str]:
        call = ToolCall("c", name, encode_row(arguments).decode())
        [(message, event)] = await box.run([call])
        return event.success, message.content

    return do


# -- reading and writing --------------------------------------------------------------------------------------


async def test_what_is_written_is_read_with_line_numbers(do, sandbox):
    assert await do("write_file", path="src/a.py", content="one\ntwo\n") == (
        True,
        "Wrote 8 bytes (2 lines) to src/a.py.",
    )
    assert sandbox.files == {"src/a.py": b"one\ntwo\n"}
    assert await do("read_file", path="src/a.py") == (True, "1|one\n2|two")


async def test_a_part_of_a_long_file(do, sandbox):
    sandbox.files["a"] = "".join(f"line {n}\n" for n in range(1, 5001)).encode()
    assert await do("read_file", path="a", offset=4, limit=2) == (
        True,
        "4|line 4\n5|line 5\n[lines 4 to 5 of 5000]",
    )
    assert await do("read_file", path="a", offset=-1) == (
        True,
        "5000|line 5000\n[lines 5000 to 5000 of 5000]",
    )
    success, text = await do("read_file", path="a")
    assert text.endswith("2000|line 2000\n[lines 1 to 2000 of 5000]")
    success, text = await do("read_file", path="a", offset=5001)
    assert (success, text) == (False, "Error: a has 5000 lines; line 5001 is after its end")


async def test_odd_files_are_read_with_a_word(do, sandbox, monkeypatch):
    sandbox.files.update(
        {
            "empty": b"",
            "crlf": b"a\r\nb\r\n",
            "binary": b"\x7fELF\0\1",
            "latin": b"caf\xe9",
            "long": b"x" * 5000,
        }
    )
    assert await do("read_file", path="empty") == (True, "empty is empty.")
    assert await do("read_file", path="crlf") == (True, "1|a\n2|b\n[lines end with CRLF]")
    assert await do("read_file", path="latin") == (True, "1|caf\ufffd")
    assert (await do("read_file", path="binary"))[
        1
    ] == "Error: 'binary' is a binary file of 6 bytes, not a text"
    assert (await do("read_file", path="long"))[1].endswith("[… 3,000 more characters in this line]")
    monkeypatch.setattr(files_module, "LARGEST_FILE", 100)
    assert "larger than the 100 bytes" in (await do("read_file", path="long"))[1]
    assert "at most 100" in (await do("write_file", path="long", content="x" * 101))[1]


async def test_a_file_that_is_not_there_is_answered_with_one_that_is(do, sandbox):
    sandbox.files["src/app/main.py"] = b""
    success, text = await do("read_file", path="app/main.py")
    assert (success, text) == (
        False,
        "Error: There is no file 'app/main.py'. Did you mean 'src/app/main.py'?",
    )
    assert (await do("read_file", path="src"))[1].startswith("Error: 'src' is a folder")
    assert (await do("read_file", path="zzz"))[1] == "Error: There is no file 'zzz'."


async def test_nothing_outside_the_workspace_is_touched(do, sandbox):
    for name, more in [("read_file", {}), ("write_file", {"content": "x"})]:
        success, text = await do(name, path="../secret", **more)
        assert (success, "outside the workspace" in text) == (False, True)
    assert sandbox.files == {}


async def test_half_a_surrogate_pair_is_not_written(context, sandbox):
    box = ToolBox(TOOLSETS["file"].tools(), context)
    call = ToolCall("c", "write_file", '{"path": "a", "content": "x\\ud83d"}')
    [(message, _)] = await box.run([call])
    assert message.content == "Error: character 1 is a lone surrogate, \\ud83d, and can't be written"
    assert sandbox.files == {}


async def test_relative_paths_start_where_commands_start(do, sandbox):
    sandbox.cwd = "/workspace/app"
    sandbox.files["other.py"] = b"x = 1\n"
    await do("write_file", path="main.py", content="x = 1\n")
    await do("patch", path="main.py", old_string="1", new_string="2")
    lines = ["*** Update File: main.py", "-x = 2", "+x = 3", "*** Add File: ../top.py", "+y"]
    lines += ["*** Update File: /workspace/app/main.py", "-x = 3", "+x = 4"]
    _, text = await do("patch", mode="patch", patch=patch_of(*lines))
    assert text == "Patch applied: updated main.py (+1 -1), added /workspace/top.py, updated main.py (+1 -1)."
    assert sandbox.files == {"other.py": b"x = 1\n", "app/main.py": b"x = 4\n", "top.py": b"y\n"}
    assert await do("read_file", path="main.py") == (True, "1|x = 4")
    assert await do("search_files", pattern="x") == (True, "main.py:1|x = 4")
    assert await do("search_files", pattern="x", path="..") == (
        True,
        "../app/main.py:1|x = 4\n../other.py:1|x = 1",
    )


# -- replacing ------------------------------------------------------------------------------------------------


async def test_replacing_the_one_place(do, sandbox):
    sandbox.files["a"] = b"x = 1\ny = 1\n"
    assert await do("patch", path="a", old_string="x = 1", new_string="x = 2") == (
        True,
        "Replaced 1 place in a.",
    )
    assert sandbox.files["a"] == b"x = 2\ny = 1\n"


async def test_replacing_every_place(do, sandbox):
    sandbox.files["a"] = b"1 1 1"
    said = await do("patch", path="a", old_string="1", new_string="2", replace_all=True)
    assert said == (True, "Replaced 3 places in a.")
    assert sandbox.files["a"] == b"2 2 2"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("a = 1", "a = 2", "stands 2 times in a (lines 1, 3)"),
        ("a = 3", "a = 2", "does not stand in a. The nearest is at line 1:\na = 1"),
        ("\tb = 2", "b = 3", "does not stand in a. The nearest is at line 2:\n    b = 2"),
        ("nowhere near this", "x", "does not stand in a."),
        ("", "x", "old_string is empty"),
        ("a = 1", "a = 1", "are the same"),
    ],
)
async def test_a_replacement_in_doubt_is_refused(do, sandbox, old, new, said):
    sandbox.files["a"] = before = b"a = 1\n    b = 2\na = 1\n"
    success, text = await do("patch", path="a", old_string=old, new_string=new)
    assert (success, said in text) == (False, True), text
    assert sandbox.files["a"] == before


async def test_the_nearest_place_in_a_large_file_is_looked_for_beside_the_loop_and_not_for_long(
    do, sandbox, monkeypatch
):
    monkeypatch.setattr(patching_module, "NEAREST_SECONDS", 0.3)
    sandbox.files["a"] = b"".join(b"value_%d = compute(%d)\n" % (n, n * 7) for n in range(100_000))
    ticks = 0
    changing = asyncio.ensure_future(do("patch", path="a", old_string="value = computed(0)", new_string=""))
    while not changing.done():
        ticks += 1
        await asyncio.sleep(0.01)
    assert "old_string does not stand in a. The nearest is at line " in (await changing)[1]
    assert ticks > 3
    monkeypatch.setattr(patching_module, "NEAREST_CHARACTERS", 1_000)
    said = await do("patch", path="a", old_string="value = computed(0)", new_string="")
    assert said == (False, "Error: old_string does not stand in a.")


async def test_a_patch_of_a_large_file(do, sandbox):
    sandbox.files["a"] = b"line\n" * 100_000 + b"last\n"
    success, _ = await do("patch", mode="patch", patch=patch_of("*** Update File: a", "-last", "+end"))
    assert (success, sandbox.files["a"][-12:]) == (True, b"ne\nline\nend\n")
    success, text = await do("patch", mode="patch", patch=patch_of("*** Update File: a", "-line", "+x"))
    assert (success, "fits 100000 places in a" in text) == (False, True)


async def test_replacing_keeps_crlf(do, sandbox):
    sandbox.files["a"] = b"one\r\ntwo\r\nthree\r\n"
    await do("patch", path="a", old_string="one\ntwo", new_string="1\n2")
    assert sandbox.files["a"] == b"1\r\n2\r\nthree\r\n"


async def test_a_file_that_would_not_come_out_the_same_is_not_changed(do, sandbox):
    sandbox.files["a"] = b"caf\xe9 = 1"
    success, text = await do("patch", path="a", old_string="1", new_string="2")
    assert (success, "not UTF-8 (byte 3)" in text) == (False, True)
    assert sandbox.files["a"] == b"caf\xe9 = 1"


async def test_arguments_of_the_other_mode_are_named(do):
    assert "argument 'old_string', 'new_string' is missing" in (await do("patch", path="a"))[1]
    assert "argument 'patch' is missing" in (await do("patch", mode="patch"))[1]


# -- patches --------------------------------------------------------------------------------------------------

MAIN = b"""import os

def first():
    return 1

def second():
    return 1
"""


def patch_of(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


async def test_a_patch_over_several_files(do, sandbox):
    sandbox.files.update({"main.py": MAIN, "old.txt": b"gone\n", "name.py": b"a\nb\n"})
    said = await do(
        "patch",
        mode="patch",
        patch=patch_of(
            "*** Update File: main.py",
            "@@ def second():",
            "-    return 1",
            "+    x = 2",
            "+    return x",
            "*** Add File: docs/new.md",
            "+# New",
            "+",
            "+text",
            "*** Delete File: old.txt",
            "*** Update File: ./name.py",
            "*** Move to: better.py",
            " a",
            "-b",
            "+c",
        ),
    )
    assert said == (
        True,
        "Patch applied: updated main.py (+2 -1), added docs/new.md, deleted old.txt, "
        "moved name.py to better.py (+1 -1).",
    )
    assert sandbox.files == {
        "main.py": MAIN.replace(b"second():\n    return 1", b"second():\n    x = 2\n    return x"),
        "docs/new.md": b"# New\n\ntext\n",
        "better.py": b"a\nc\n",
    }


@pytest.mark.parametrize(
    ("before", "hunks", "after"),
    [
        (b"a\nb\nc\n", [" a", "-b", "+B", " c"], b"a\nB\nc\n"),
        (b"a\nb\nc", [" b", "-c", "+C"], b"a\nb\nC"),
        (b"a\n", ["+b"], b"a\nb\n"),
        (b"", ["+b"], b"b\n"),
        (b"a\nb\n", ["@@ a", "+x"], b"a\nx\nb\n"),
        (b"a\nx\na\nx\n", ["@@ a", "@@ a", "-x", "+y"], b"a\nx\na\ny\n"),
        (b"x\na\nx\n", ["-x", "+y", "*** End of File"], b"x\na\ny\n"),
        (b"a\nb\nc\nd\n", ["-a", "+A", "@@", "-d", "+D"], b"A\nb\nc\nD\n"),
        (b"a\n\nb\n", [" a", "", "-b", "+c"], b"a\n\nc\n"),
        (b"a  \n\tb\nc\n", [" a", "-    b", "+    B", " c"], b"a  \n    B\nc\n"),
        (b"a\r\nb\r\n", ["-b", "+c", "+d"], b"a\r\nc\r\nd\r\n"),
        (b"a\nb\nc\n", ["@@ -1,2 +1,2 @@", "-b", "+c"], b"a\nc\nc\n"),
        (b"a\n", ["-a"], b""),
    ],
)
async def test_changes_find_their_place(do, sandbox, before, hunks, after):
    sandbox.files["f"] = before
    success, text = await do("patch", mode="patch", patch=patch_of("*** Update File: f", *hunks))
    assert success, text
    assert sandbox.files["f"] == after


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["*** Update File: main.py", "-    return 1", "+    return 2"],
            "fits 2 places in main.py (lines 4, 7)",
        ),
        (
            ["*** Update File: main.py", "-    return 3", "+    return 2"],
            "do not stand in main.py:\n    return 3",
        ),
        (["*** Update File: main.py", "@@ def third():", "+x"], "no line 'def third():' in main.py"),
        (["*** Update File: main.py", "return 1"], "line 3: each line of a change begins with"),
        (["*** Update File: main.py", " import os"], "neither takes out nor puts in"),
        (["*** Update File: main.py"], "no change is given for 'main.py'"),
        (["*** Update File: nope.py", "-x", "+y"], "There is no file 'nope.py'"),
        (["*** Add File: main.py", "+x"], "'main.py' is there already"),
        (["*** Add File: x.py", "x"], "line 3: each line of an added file begins with '+'"),
        (["*** Delete File: nope.py"], "There is no file 'nope.py'"),
        (["*** Delete File: main.py", "*** Delete File: ./main.py"], "deleted or moved earlier"),
        (["--- a/main.py", "+++ b/main.py"], "line 2: expected '*** Update File"),
        (["*** Update File: ../x", "-x", "+y"], "outside the workspace"),
        ([], "the patch names no file"),
    ],
)
async def test_a_patch_in_doubt_changes_nothing(do, sandbox, lines, said):
    sandbox.files.update({"main.py": MAIN, "first.txt": b"one\n"})
    before = dict(sandbox.files)
    success, text = await do("patch", mode="patch", patch=patch_of(*lines))
    assert (success, said in text) == (False, True), text
    if lines:
        good = ["*** Update File: first.txt", "-one", "+two"]
        success, text = await do("patch", mode="patch", patch=patch_of(*good, *lines))
        assert not success, text
    assert sandbox.files == before


async def test_a_patch_that_was_cut_off_is_not_applied(do, sandbox):
    sandbox.files["a"] = b"a\n"
    success, text = await do("patch", mode="patch", patch="*** Begin Patch\n*** Update File: a\n-a\n+b")
    assert (success, "may be cut off" in text) == (False, True)
    success, text = await do("patch", mode="patch", patch="*** Update File: a\n-a\n+b\n*** End Patch")
    assert (success, "begins with '*** Begin Patch'" in text) == (False, True)
    assert sandbox.files == {"a": b"a\n"}


async def test_when_a_write_fails_the_files_written_before_are_put_back(do, sandbox):
    sandbox.files.update({"a": b"a\n", "c": b"c\n"})
    before = dict(sandbox.files)
    sandbox.fail_on_write = "c"
    lines = ["*** Update File: a", "-a", "+A", "*** Add File: b", "+b", "*** Update File: c", "-c", "+C"]
    success, text = await do("patch", mode="patch", patch=patch_of(*lines))
    assert (success, "No space left" in text) == (False, True)
    assert sandbox.files == before


# -- searching ------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(sandbox):
    sandbox.files.update(
        {
            "README.md": b"# Tree\nsee main\n",
            "src/main.py": b"import os\n\ndef main():\n    pass\n",
            "src/deep/er/test_main.py": b"def test_main():\n    main()\n",
            "src/data.bin": b"main\0main",
            ".git/config": b"main\n",
            "src/__pycache__/x.pyc": b"main\n",
        }
    )
    return sandbox


async def test_searching_by_content(do, tree):
    assert await do("search_files", pattern=r"def \w*main") == (
        True,
        "src/deep/er/test_main.py:1|def test_main():\nsrc/main.py:3|def main():\n"
        "[1 binary or very large files skipped]",
    )
    assert (await do("search_files", pattern="MAIN", ignore_case=True, glob="*.md"))[
        1
    ] == "README.md:2|see main"
    assert (await do("search_files", pattern="^import", path="src"))[1].startswith("src/main.py:1|import os")
    assert (await do("search_files", pattern="nowhere", glob="*.py"))[1] == "No match in 2 files."
    assert (await do("search_files", pattern="main", glob="*.py", limit=1))[1] == (
        "src/deep/er/test_main.py:1|def test_main():\n[more matches follow; the first 1 are shown]"
    )
    assert (await do("search_files", pattern="main", path="src/main.py"))[1] == "src/main.py:3|def main():"
    assert (await do("search_files", pattern="$", glob="main.py"))[1].count("\n") == 3
    assert (await do("search_files", pattern="x", path="nope")) == (
        False,
        "Error: There is no folder 'nope'.",
    )


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.py", ["src/deep/er/test_main.py", "src/main.py"]),
        ("src/*.py", ["src/main.py"]),
        ("src/**/*.py", ["src/deep/er/test_main.py", "src/main.py"]),
        ("**/test_*.py", ["src/deep/er/test_main.py"]),
        ("readme.md", []),
        ("src/**", ["src/data.bin", "src/deep/er/test_main.py", "src/main.py"]),
        ("**", ["README.md", "src/data.bin", "src/deep/er/test_main.py", "src/main.py"]),
        ("src/deep/??/*", ["src/deep/er/test_main.py"]),
    ],
)
async def test_searching_by_name(do, tree, pattern, found):
    success, text = await do("search_files", target="files", pattern=pattern)
    assert success
    assert [line for line in text.split("\n") if not line.startswith("No file fits")] == found


async def test_a_pattern_that_is_none_is_refused(do, tree):
    success, text = await do("search_files", pattern="(main")
    assert (success, "'(main' is no regular expression" in text) == (False, True)
    assert not (await do("search_files", pattern=" ", target="files"))[0]


@pytest.mark.parametrize("target", ["content", "files"])
async def test_a_pattern_that_is_too_long_is_refused(do, tree, target):
    longest = search_module.LONGEST_PATTERN
    assert (await do("search_files", pattern="a" * longest, target=target))[0]
    success, text = await do("search_files", pattern="a" * (longest + 1), target=target)
    assert (success, text) == (
        False,
        "Error: a pattern of 5,001 characters is too long; it may have 5,000. Search for less at once.",
    )


async def test_a_pattern_that_backtracks_for_ever_is_given_up_and_does_not_stop_the_loop(
    do, sandbox, monkeypatch
):
    monkeypatch.setattr(search_module, "MATCH_SECONDS", 0.3)
    sandbox.files["a"] = b"a" * 60 + b"b\n"
    ticks = 0
    searching = asyncio.ensure_future(do("search_files", pattern=r"(a|aa)+$"))
    while not searching.done():
        ticks += 1
        await asyncio.sleep(0.01)
    success, text = await searching
    assert (success, "takes too long" in text) == (False, True)
    assert ticks > 3


async def test_globs_do_not_backtrack(do, sandbox):
    sandbox.files["/".join(["a"] * 60) + "/b"] = b""
    success, text = await do("search_files", target="files", pattern="/".join(["**", "a"] * 20) + "/c")
    assert (success, text.startswith("No file fits")) == (True, True)
