from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from taskmill.errors import SandboxError, StorageFullError, ToolRefusedError
from taskmill.store.beneath import list_beneath, read_beneath, remove_beneath, write_beneath
from taskmill.store.files import (
    AppendFile,
    append_shared,
    copy_tree_into,
    make_directory,
    remove,
    remove_tree,
    replace,
    replacing,
)

ROWS = [b'{"n":0}\n', '{"t":"é😀"}\n'.encode(), b'{"n":[1,{"x":"\\u0000"}]}\n']


# -- the append log ---------------------------------------------------------------------------------------------


def test_rows_stand_where_the_log_says(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = AppendFile(path)
    offsets = [file.write(row) for row in ROWS]
    file.datasync()
    assert file.size == path.stat().st_size
    file.close()
    file.close()
    assert file.closed
    data = path.read_bytes()
    assert [data[offset:].splitlines(keepends=True)[0] for offset in offsets] == ROWS


def test_opening_again_goes_on_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for row in ROWS:
        file = AppendFile(path)
        assert file.repair is None
        file.write(row)
        file.close()
    assert path.read_bytes() == b"".join(ROWS)


def test_a_torn_end_is_cut_off_and_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(ROWS[0] + b'{"a": 1')
    file = AppendFile(path)
    file.write(ROWS[2])
    file.close()
    assert path.read_bytes() == ROWS[0] + ROWS[2]
    assert (tmp_path / "log.jsonl.torn").read_bytes() == b'{"a": 1\n'
    assert file.repair is not None
    assert file.repair[1:] == (len(ROWS[0]), 7, "torn")
    assert "log.jsonl" in str(file.repair)
    assert f"at byte {len(ROWS[0])}" in str(file.repair)


def test_torn_ends_of_several_crashes_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for torn in (b'{"a', b'{"b'):
        with path.open("ab") as file:
            file.write(torn)
        AppendFile(path).close()
    assert (tmp_path / "log.jsonl.torn").read_bytes() == b'{"a\n{"b\n'


@pytest.mark.parametrize("row", ROWS)
def test_a_whole_row_without_its_newline_gets_one(tmp_path: Path, row: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(ROWS[0] + row[:-1])
    file = AppendFile(path)
    file.close()
    assert path.read_bytes() == ROWS[0] + row
    assert file.repair is not None
    assert file.repair[1:] == (len(ROWS[0]), 0, "unterminated")
    assert "newline" in str(file.repair)
    assert not (tmp_path / "log.jsonl.torn").exists()


def test_a_long_torn_row_is_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    long = b'{"t":"' + b"x" * 5_000_000
    path.write_bytes(ROWS[0] + long)
    file = AppendFile(path)
    file.close()
    assert path.read_bytes() == ROWS[0]
    assert (tmp_path / "log.jsonl.torn").read_bytes() == long + b"\n"


def test_a_log_that_is_nothing_but_a_torn_row(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\0" * 4096)
    AppendFile(path).close()
    assert path.read_bytes() == b""


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    file = AppendFile(tmp_path / "log.jsonl")
    assert [file.write(row) for row in ROWS[:2]] == [0, len(ROWS[0])]
    file.close()
    assert (tmp_path / "log.jsonl").read_bytes() == ROWS[0] + ROWS[1]


def test_a_log_that_was_removed_is_noticed_at_the_sync(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = AppendFile(folder / "log.jsonl")
    file.write(ROWS[0])
    shutil.rmtree(folder)
    with pytest.raises(StorageFullError, match="removed while it was written"):
        file.datasync()
    file.close()


def test_a_log_in_a_folder_that_is_not_there_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(StorageFullError, match=r"gone/log\.jsonl.*No such file.*bytes are free"):
        AppendFile(tmp_path / "gone" / "log.jsonl")


def test_a_shared_log_takes_rows_from_several_writers_and_survives_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    append_shared(path, ROWS[0])
    with path.open("ab") as other:
        other.write(b'{"half')
    append_shared(path, ROWS[1])
    assert path.read_bytes() == ROWS[0] + b'{"half\n' + ROWS[1]


# -- whole files ------------------------------------------------------------------------------------------------


def test_replacing_keeps_mode_and_the_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    replace(link, (b"n", b"ew"))
    assert real.read_bytes() == b"new"
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link.json", "real.json"]


def test_a_new_file_has_the_mode_other_new_files_have(tmp_path: Path) -> None:
    replace(tmp_path / "a", b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_when_the_data_fails_half_way_the_old_file_stands(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"old")

    def pieces() -> Iterator[bytes]:
        yield b"x" * 3_000_000
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        replace(path, pieces())

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_reader_that_has_the_file_open_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        replace(path, b"new")
        assert reader.read() == b"old"


def test_folders_are_made_and_removed_whatever_is_in_them(tmp_path: Path) -> None:
    top = tmp_path / "a"
    make_directory(top / "b" / "c")
    make_directory(top / "b" / "c")
    (top / "b" / "file").write_bytes(b"x")
    (top / "link").symlink_to(tmp_path)
    (top / "b").chmod(0)
    remove_tree(top)
    remove_tree(top)
    remove(top)
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageFullError, match="could not be made"):
        make_directory(tmp_path / "file" / "x")


def test_the_owner_deletes_what_no_mode_allows_and_no_link_is_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    (kept / "file").write_bytes(b"x")
    for mode in (0o000, 0o100, 0o200, 0o300, 0o400, 0o500):
        inner = tmp_path / "top" / f"{mode:o}" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_bytes(b"x")
        (inner / "link").symlink_to(kept)
        inner.chmod(mode)
        inner.parent.chmod(mode)
    child = os.fork()
    if child == 0:  # as an ordinary user, for whom modes hold
        try:
            if os.getuid() == 0:
                for base, folders, names in os.walk(tmp_path):
                    for name in (*folders, *names):
                        os.lchown(os.path.join(base, name), 65534, 65534)
                os.chown(tmp_path, 65534, 65534)
                os.chdir(tmp_path)
                os.setgid(65534)
                os.setuid(65534)
                remove_tree(Path("top"))
            else:
                remove_tree(tmp_path / "top")
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept.stat().st_mode & 0o777, os.listdir(kept)) == (0o500, ["file"])


def test_removing_a_link_to_a_folder_removes_the_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove_tree(tmp_path / "link")
    assert os.listdir(tmp_path) == ["folder"]
    assert (tmp_path / "folder" / "kept").exists()


# -- inside a folder that others may fill with traps ------------------------------------------------------------


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A workspace `room`, and beside it what must stay out of reach."""
    room = tmp_path / "room"
    (room / "sub").mkdir(parents=True)
    (room / "sub" / "a.txt").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "roommate").mkdir()
    (tmp_path / "roommate" / "a").write_bytes(b"outside")
    return room


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("up", "../secret"),
        ("up2", "sub/../../secret"),
        ("abs", "/etc/passwd"),
        ("loop", "loop"),
        ("folder", ".."),
        ("neighbour", "{room}mate"),
        ("proc", "/proc/self/root/etc/passwd"),
    ],
)
def test_no_link_leads_out(room: Path, link: str, target: str) -> None:
    os.symlink(target.format(room=room), room / link)
    last = {"folder": "folder/secret", "neighbour": "neighbour/a"}.get(link, link)
    with pytest.raises(ToolRefusedError, match=f"'{last}' is outside the workspace"):
        read_beneath(room, last)
    with pytest.raises(ToolRefusedError):
        write_beneath(room, last, b"harm")
    assert (room.parent / "secret").read_bytes() == b"outside"
    assert (room.parent / "roommate" / "a").read_bytes() == b"outside"


@pytest.mark.parametrize(
    "path", ["../secret", "sub/../../secret", "/etc/passwd", "sub/../..", "..", "a\0b", "\ud800"]
)
def test_no_path_leads_out(room: Path, path: str) -> None:
    for act in (
        read_beneath,
        remove_beneath,
        list_beneath,
        lambda root, name: write_beneath(root, name, b"harm"),
    ):
        with pytest.raises(ToolRefusedError):
            act(room, path)
    assert (room.parent / "secret").read_bytes() == b"outside"


def test_links_that_stay_inside_are_followed(room: Path) -> None:
    os.symlink("sub/a.txt", room / "rel")
    os.symlink(room / "sub", room / "abs")
    os.symlink("../sub/./a.txt", room / "sub" / "back")
    for path in ("rel", "abs/a.txt", "sub/back", "./sub//a.txt", "sub/../sub/a.txt"):
        assert read_beneath(room, path) == b"inside"
    write_beneath(room, "rel", b"new")
    assert (room / "sub" / "a.txt").read_bytes() == b"new"
    assert (room / "rel").is_symlink()


def test_a_link_swapped_in_at_the_last_moment_is_not_followed(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = os.stat

    def swap_after_looking(path: object, **options: object) -> os.stat_result:
        info = look(path, **options)  # type: ignore[call-overload]
        if path in ("sub", "a.txt") and not (room / "sub").is_symlink():
            shutil.rmtree(room / "sub")
            os.symlink(room.parent / "roommate", room / "sub")
        return info  # type: ignore[no-any-return]

    monkeypatch.setattr(os, "stat", swap_after_looking)
    with pytest.raises((ToolRefusedError, OSError)):
        read_beneath(room, "sub/a")


def test_writing_makes_folders_and_replaces_what_was_there(room: Path) -> None:
    write_beneath(room, "new/deep/x.bin", b"long content")
    write_beneath(room, "new/deep/x.bin", b"short")
    assert read_beneath(room, "new/deep/x.bin") == b"short"
    assert read_beneath(room, "new/deep/x.bin", 3) == b"sho"
    (room / "script").write_bytes(b"old")
    (room / "script").chmod(0o755)
    write_beneath(room, "script", b"new")
    assert stat.S_IMODE((room / "script").stat().st_mode) == 0o755


def test_only_regular_files_are_read_and_nothing_hangs(room: Path) -> None:
    os.mkfifo(room / "pipe")
    for act in (read_beneath, lambda root, name: write_beneath(root, name, b"x")):
        with pytest.raises(ToolRefusedError, match="not a regular file"):
            act(room, "pipe")
        with pytest.raises(IsADirectoryError, match="'sub'"):
            act(room, "sub")
        with pytest.raises(IsADirectoryError):
            act(room, ".")
    with pytest.raises(FileNotFoundError, match=r"'no/such\.txt'"):
        read_beneath(room, "no/such.txt")
    with pytest.raises(NotADirectoryError, match=r"'sub/a\.txt/x'"):
        read_beneath(room, "sub/a.txt/x")


def test_removing_takes_files_links_and_folders_but_not_the_workspace(room: Path) -> None:
    os.symlink("../secret", room / "out")
    os.symlink("../roommate", room / "sub" / "mate")
    remove_beneath(room, "out")
    remove_beneath(room, "sub")
    assert os.listdir(room) == []
    assert (room.parent / "roommate" / "a").exists()
    for path in (".", "", "./"):
        with pytest.raises(ToolRefusedError, match="workspace itself"):
            remove_beneath(room, path)
    with pytest.raises(FileNotFoundError, match="'gone'"):
        remove_beneath(room, "gone")


def test_files_are_listed_relative_sorted_and_up_to_the_limit(room: Path) -> None:
    os.symlink("..", room / "sub" / "parent")
    os.symlink("a.txt", room / "sub" / "link")
    for name in ("z", "b/c", "b/a"):
        write_beneath(room, name, b"")
    assert list_beneath(room) == ["b/a", "b/c", "sub/a.txt", "sub/link", "sub/parent", "z"]
    assert list_beneath(room, "sub") == ["a.txt", "link", "parent"]
    assert len(list_beneath(room, ".", 2)) == 2
    with pytest.raises(NotADirectoryError):
        list_beneath(room, "z")


def test_a_folder_is_copied_with_modes_and_links_and_without_traps(room: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "bin" / "run").write_bytes(b"#!")
    (source / "bin" / "run").chmod(0o755)
    os.symlink("bin", source / "folder")
    os.symlink("/etc/passwd", source / "out")
    os.mkfifo(source / "pipe")
    copy_tree_into(source, room, limit_bytes=10_000, limit_files=10)
    assert stat.S_IMODE((room / "bin" / "run").stat().st_mode) == 0o755
    assert os.readlink(room / "folder") == "bin"
    assert os.readlink(room / "out") == "/etc/passwd"
    assert (room / "empty").is_dir()
    assert not (room / "pipe").exists()
    assert (room / "sub" / "a.txt").read_bytes() == b"inside"


def test_a_workspace_inside_the_folder_is_not_copied_into_itself(room: Path) -> None:
    copy_tree_into(room.parent, room, limit_bytes=10_000, limit_files=10)
    assert sorted(os.listdir(room)) == ["roommate", "secret", "sub"]


@pytest.mark.parametrize("limits", [(5, 10), (10_000, 1)])
def test_a_folder_too_large_is_refused_by_name(room: Path, tmp_path: Path, limits: tuple[int, int]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        (source / name).write_bytes(b"1234")
    with pytest.raises(SandboxError, match=r"source.*holds more than"):
        copy_tree_into(source, room, *limits)
