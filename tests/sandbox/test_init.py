"""The first process's program on interpreters whose private modules are not those of this one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from taskmill.sandbox import init

ADOPTS = """
import ctypes, os, select, signal, socket, sys, time, types
for name in {missing!r}:
    sys.modules[name] = types.ModuleType(name)
for name in {absent!r}:
    sys.modules[name] = None
init = types.ModuleType("init")
exec(compile(open({path!r}).read(), "init", "exec"), init.__dict__)
init.adopt_orphans()
assert init.signal.SIGKILL == 9 and init.socket.socket.recvmsg
reading, writing = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(7)
    os._exit(0)
os.close(reading)
first = os.wait()
os.close(writing)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
print("adopted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="adopting orphans is there on Linux only")
@pytest.mark.parametrize(
    ("missing", "absent"),
    [((), ()), (("_ctypes", "_signal", "_socket"), ()), ((), ("_ctypes", "_signal", "_socket"))],
    ids=["as here", "other names", "not there"],
)
def test_it_does_without_private_modules(missing, absent):
    script = ADOPTS.format(missing=missing, absent=absent, path=init.__file__)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "adopted\n", done.stderr
