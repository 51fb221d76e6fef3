"""The first process of a sandbox: it starts the rollout's commands, and nothing it started outlives it.

A program of its own, not a module of taskmill: `host.py` compiles it once and sends it to a bare interpreter
inside the confinement, where reading and compiling it each time would take longer than all else. It imports
little, knows no secret, and ends when its control socket closes, which the death of taskmill does by itself. In
a process namespace it is process 1; elsewhere on Linux it is a subreaper. Either way every process that loses its
parent becomes a child of this one, however it was detached, and can be found here.

Requests are length-prefixed lists of NUL-terminated fields:
    run    id, mode (shell|program), foreground (1|0), directory, n, n arguments, then NAME=value…
           with two descriptors: standard input, output
    kill   id
Answers, in the same form: id, exit code (empty: could not start), directory at the end, note.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False
_SIGNALS = ("SIGCHLD", "SIGINT", "SIGKILL", "SIGPIPE", "SIGSTOP", "SIGXFSZ")

if TYPE_CHECKING:
    import signal
    import socket
else:
    try:  # the public modules pull in enum and more, a third of the time this program takes to start
        import _signal as signal
        import _socket as socket

        # Nothing promises that they stay as they are, so what is used of them is looked for.
        for name in (*_SIGNALS, "signal", "set_wakeup_fd", "pthread_sigmask", "SIG_SETMASK"):
            getattr(signal, name)
        for name in ("recvmsg", "sendall", "fileno"):
            getattr(socket.socket, name)
        for name in ("SOL_SOCKET", "SCM_RIGHTS"):
            getattr(socket, name)
    except (ImportError, AttributeError):
        import signal
        import socket

REPORT = 87  # where a shell says its directory at the end; a number no script is likely to use
SCRIPT = 86
LONGEST_ARGUMENT = 96 * 1024  # Linux refuses an argument of 128 KiB
GRACE = 0.1  # seconds for what a command left behind to end by itself, such as the end of a pipeline
GIVE_UP = 3.0  # seconds to chase what does not die
CENSUS = 0.2  # seconds between two counts of a rollout's processes and memory
PAGE = resource.getpagesize()
BASH = (b"/bin/bash", b"/usr/bin/bash", b"/usr/local/bin/bash", b"/run/current-system/sw/bin/bash")
MARK = b"TASKMILL_CALL="


class Call:
    """One command that was asked for."""

    __slots__ = ("directory", "ended", "foreground", "id", "killed", "note", "pid", "report", "status")

    def __init__(self, id: bytes, pid: int, report: int, foreground: bool) -> None:
        self.id = id
        self.pid = pid
        self.report = report
        self.foreground = foreground
        self.killed = False
        self.status: int | None = None
        self.ended = 0.0
        self.directory = b""
        self.note = b""


class Init:
    """Starts, counts, ends and reaps."""

    def __init__(self, control: socket.socket, namespace: bool, memory: int, processes: int) -> None:
        self.control = control
        self.namespace = namespace
        self.memory = memory
        self.processes = processes
        self.linux = sys.platform == "linux"
        self.shell = next((path for path in BASH if os.access(path, os.X_OK)), b"/bin/sh")
        self.environment = dict(os.environb)
        # bubblewrap's word on where it started itself, which is not where a command does
        self.environment.pop(b"PWD", None)
        self.incoming = bytearray()
        self.descriptors: list[int] = []
        self.running: dict[int, Call] = {}  # by process id, until the process ended
        self.ending: list[Call] = []  # ended, perhaps with something left behind
        self.background: dict[bytes, Call] = {}  # ended, what they left may stay
        self.groups: set[int] = set()  # only where there is no /proc
        self.childless = True
        self.next_census = 0.0

    # -- the loop ---------------------------------------------------------------------------------------------

    def serve(self) -> None:
        wake, woken = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken)
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        poll.register(wake, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll(self.pause()):
                    if fd == wake:
                        os.read(wake, 4096)
                    elif not self.receive():
                        return
                self.reap()
                now = time.monotonic()
                if self.ending:
                    self.settle(now)
                if self.counting() and now >= self.next_census:
                    self.census(now)
        finally:
            self.end_all()

    def pause(self) -> float | None:
        """Milliseconds until something must be looked at without being told."""
        if self.ending:
            return 4
        if self.counting():
            return max(1.0, (self.next_census - time.monotonic()) * 1000)
        return None

    def counting(self) -> bool:
        """Whether something runs that could grow."""
        return self.linux and (bool(self.running) or (bool(self.background) and not self.childless))

    # -- requests ---------------------------------------------------------------------------------------------

    def receive(self) -> bool:
        try:
            data, ancillary, _, _ = self.control.recvmsg(1 << 16, 256)
        except OSError:
            return False
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                for start in range(0, len(payload) - 3, 4):
                    fd = int.from_bytes(payload[start : start + 4], sys.byteorder, signed=True)
                    os.set_inheritable(fd, False)
                    self.descriptors.append(fd)
        if not data:
            return False
        self.incoming += data
        while len(self.incoming) >= 4:
            end = 4 + int.from_bytes(self.incoming[:4], "big")
            if len(self.incoming) < end:
                break
            fields = bytes(self.incoming[4:end]).split(b"\0")[:-1]
            del self.incoming[:end]
            if fields[0] == b"run":
                self.run(fields)
            elif fields[0] == b"kill":
                self.kill(fields[1])
        return True

    def answer(self, *fields: bytes) -> None:
        body = b"".join(field + b"\0" for field in fields)
        try:
            self.control.sendall(len(body).to_bytes(4, "big") + body)
        except OSError:
            pass  # nobody listens any more; the loop sees the end of the socket next

    def run(self, fields: list[bytes]) -> None:
        _, id, mode, foreground, directory, count = fields[:6]
        arguments = fields[6 : 6 + int(count)]
        environment = dict(self.environment)
        for pair in fields[6 + int(count) :]:
            name, _, value = pair.partition(b"=")
            environment[name] = value
        given, output = self.descriptors[:2]
        del self.descriptors[:2]
        report, reported = os.pipe()
        os.set_blocking(reported, False)  # a command that fills it must not keep its shell from ending
        opened = [given, output, reported]
        actions = [
            (os.POSIX_SPAWN_DUP2, given, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ]
        arrived = False
        program = arguments[0]
        try:
            os.chdir(directory)
            arrived = True
            if mode == b"shell":
                actions.append((os.POSIX_SPAWN_DUP2, reported, REPORT))
                # One line with the command, so that line numbers in messages are the command's own.
                program = self.shell
                name = os.path.basename(program)
                place = (b"&%d" if name == b"bash" else b"/dev/fd/%d") % REPORT
                script = b'trap "pwd -P 2>/dev/null >%s" EXIT; ' % place + arguments[0]
                if len(script) < LONGEST_ARGUMENT:
                    arguments = [name, b"-c", script]
                else:
                    opened.append(unnamed_file(script))
                    actions.append((os.POSIX_SPAWN_DUP2, opened[-1], SCRIPT))
                    arguments = [name, b"/dev/fd/%d" % SCRIPT]
            pid = os.posix_spawnp(
                program,
                arguments,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD],
            )
        except (OSError, ValueError) as error:
            os.close(report)
            number = getattr(error, "errno", None) or errno.EINVAL
            self.answer(id, b"", b"", b"%d %s" % (number, b"program" if arrived else b"directory"))
        else:
            os.set_blocking(report, False)
            self.running[pid] = Call(id, pid, report, foreground == b"1")
            self.childless = False
            if len(self.running) == 1:
                self.next_census = time.monotonic() + CENSUS
            if not self.linux:
                self.groups.add(pid)
        finally:
            for fd in opened:
                os.close(fd)

    def kill(self, id: bytes) -> None:
        for call in self.running.values():
            if call.id == id:
                call.killed = True
                signal_group(call.pid, signal.SIGKILL)
                return
        for call in self.ending:
            if call.id == id:
                call.killed = True
        if id in self.background:
            call = self.background.pop(id)
            call.killed = True
            call.ended = time.monotonic()
            self.ending.append(call)

    # -- the end of a command ---------------------------------------------------------------------------------

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            if pid == 0:
                self.childless = False
                return
            call = self.running.pop(pid, None)
            if call is None:
                continue
            call.status = os.waitstatus_to_exitcode(status)
            call.ended = time.monotonic()
            call.directory = reported_directory(call.report)
            os.close(call.report)
            self.ending.append(call)

    def settle(self, now: float) -> None:
        """Answer for the commands of which nothing is left, and end what is left of the others."""
        for call in list(self.ending):
            if call.killed or call.foreground:
                left = self.left_by(call)
                if left:
                    if call.killed or now - call.ended > GRACE:
                        for pid in left:
                            end(pid)
                    if now - call.ended < GIVE_UP:
                        continue
            else:
                self.background[call.id] = call
            self.ending.remove(call)
            self.answer(call.id, b"%d" % (call.status or 0), call.directory, call.note)

    def left_by(self, call: Call) -> list[int]:
        """Processes that lost their parent and belong to `call`. What they started comes to us as they end."""
        if self.childless:
            return []
        if not self.linux:
            return [-call.pid] if signal_group(call.pid, 0) else []
        alone = not self.background and not self.running and len(self.ending) == 1
        sessions = {call.pid for call in (*self.running.values(), *self.background.values(), *self.ending)}
        left = []
        for pid in children(os.getpid()):
            if pid in self.running:
                continue
            owner = read(f"/proc/{pid}/environ").partition(MARK)[2].partition(b"\0")[0]
            if owner:
                mine = owner == call.id
            else:  # it cleared its environment, or is about to start
                session = session_of(pid)
                mine = session == call.pid or (alone and session not in sessions)
            if mine:
                left.append(pid)
        return left

    # -- limits of the rollout as a whole ---------------------------------------------------------------------

    def census(self, now: float) -> None:
        """Count processes and memory of all commands together, which no limit of the kernel's does for us."""
        pids = self.everything()
        note = b""
        if 0 < self.processes < len(pids):
            note = b"processes"
        # Forked processes share much; count exactly before anything is killed for it.
        elif 0 < self.memory < sum(map(private_memory, pids)) and self.memory < sum(map(memory_share, pids)):
            note = b"memory"
        if note:
            for call in self.running.values():
                call.note = note
                call.killed = True
            self.kill_all(pids)
            now = time.monotonic()
        self.next_census = now + CENSUS

    def everything(self) -> list[int]:
        """Every process of the sandbox but this one."""
        own = os.getpid()
        if self.namespace:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]
        found = []
        waiting = [own]
        while waiting:
            below = children(waiting.pop())
            found += below
            waiting += below
        return found

    def kill_all(self, pids: list[int]) -> None:
        for pid in self.running:
            signal_group(pid, signal.SIGKILL)
        if self.namespace:
            try:
                os.kill(-1, signal.SIGKILL)  # all but process 1, which this is
            except OSError:
                pass
            return
        for pid in pids:  # held first, so that none of them makes more while the others end
            signal_one(pid, signal.SIGSTOP)
        for pid in pids:
            signal_one(pid, signal.SIGKILL)

    def end_all(self) -> None:
        self.kill_all([])
        for group in self.groups:
            signal_group(group, signal.SIGKILL)
        give_up = time.monotonic() + GIVE_UP
        while self.linux and not self.namespace and time.monotonic() < give_up:
            self.reap()
            if self.childless:
                return
            self.kill_all(self.everything())
            time.sleep(0.002)


# -- what the system knows about a process --------------------------------------------------------------------


def read(path: str) -> bytes:
    """A small file of `/proc`; empty when it, or the process, is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 17)
    except OSError:
        return b""
    finally:
        os.close(fd)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid` now."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        found += map(int, read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def session_of(pid: int) -> int:
    """The session a process belongs to: the id of the process that opened it."""
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[3]) if len(fields) > 3 else 0


def private_memory(pid: int) -> int:
    """Bytes in memory that are not of files; what a fork shares is counted for both."""
    fields = read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * PAGE if len(fields) > 2 else 0


def memory_share(pid: int) -> int:
    """Bytes in memory, what is shared counted in parts. Exact, and a hundred times the work."""
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def signal_one(pid: int, number: int) -> bool:
    """Whether the process was there to be signalled."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def signal_group(group: int, number: int) -> bool:
    """Whether any process of the group was there to be signalled."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def end(pid: int) -> None:
    """Kill a child of ours, with its group where it leads or follows one; a negative number is a group."""
    if pid < 0:
        signal_group(-pid, signal.SIGKILL)
        return
    try:
        group = os.getpgid(pid)
    except OSError:
        return
    if group != os.getpgid(0):
        signal_group(group, signal.SIGKILL)
    signal_one(pid, signal.SIGKILL)


def reported_directory(report: int) -> bytes:
    """Where a shell said that it stood at its end; empty for what is no directory, as the command may write there."""
    try:
        said = os.read(report, 1 << 16).rpartition(b"\n")[0]
    except OSError:  # nothing was said
        return b""
    return said if said.startswith(b"/") and os.path.isdir(said) else b""


def unnamed_file(data: bytes) -> int:
    """A descriptor at the start of a file that holds `data` and has no name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("script", os.MFD_CLOEXEC)
    else:
        import tempfile

        fd, name = tempfile.mkstemp()
        os.unlink(name)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def limit(kind: int, value: int) -> None:
    """Lower a limit for this process and all it starts; a negative value leaves it."""
    if value < 0:
        return
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def counts_per_namespace() -> bool:
    """Whether the kernel counts a user's processes per user namespace (5.14), not on the whole machine."""
    version = os.uname().release.split(".")
    try:
        return (int(version[0]), int(version[1].partition("-")[0])) >= (5, 14)
    except (ValueError, IndexError):
        return False


def adopt_orphans() -> None:
    """Become the parent of every process below that loses its own (Linux).

    Where that can't be had, only what stays in its process group is found; the mark finds the rest at the next start.
    """
    prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def shut_out() -> None:
    """Let no command trace this process, read its memory or take its descriptors: it could forge its own result.

    What is started from here is as open as ever: the kernel sets it anew for each program.
    """
    prctl(4, 0)  # PR_SET_DUMPABLE


def prctl(option: int, value: int) -> None:
    """Ask the kernel something about this process (Linux), if it can be asked from here."""
    request = (option, value, 0, 0, 0)
    try:
        try:  # as above: the public module takes ten times as long to import
            import _ctypes

            _ctypes.call_function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"), request)  # type: ignore[arg-type]
        except Exception:
            import ctypes

            ctypes.CDLL(None).prctl(*request)
    except Exception:
        pass


def main(arguments: list[str]) -> None:
    """Arguments: control descriptor, namespace (1|0), then memory, file size, processes (-1: no limit)."""
    fd, namespace, memory, file_size, processes = map(int, arguments)
    control = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, file_size)
    if sys.platform == "linux":
        limit(resource.RLIMIT_DATA, memory)
        if namespace and counts_per_namespace():
            limit(resource.RLIMIT_NPROC, processes)
        if namespace:
            shut_out()
        else:
            adopt_orphans()
    try:
        Init(control, bool(namespace), memory, processes).serve()
    finally:
        os._exit(0)  # the interpreter has nothing to put in order


if __name__ == "__main__":
    main([sys.argv[1], *sys.argv[3:]])
