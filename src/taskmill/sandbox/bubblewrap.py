"""Confinement by bubblewrap: a root of its own, of which only the workspace can be written.

Every namespace is new. The system's programs are there read-only, of `/etc` only what programs need to find their
libraries, users, certificates and time zone. No capability, no way to gain one, no network unless asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from taskmill.sandbox.base import SandboxLimits
from taskmill.sandbox.host import interpreter
from taskmill.sandbox.local import Confinement, Place

ROOT = "/workspace"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")

_ETC = (
    # users and names
    "passwd", "group", "nsswitch.conf", "host.conf", "hosts", "gai.conf", "protocols", "services",
    # the loader, and programs that are chosen by link
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives",
    # time, language, and what kind of system this is
    "localtime", "timezone", "locale.conf", "locale.alias", "os-release", "debian_version", "redhat-release",
    "alpine-release", "arch-release", "lsb-release", "mime.types", "magic", "terminfo", "inputrc",
    # certificates, never keys
    "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "pki/tls/certs",
    "pki/tls/cert.pem", "pki/tls/openssl.cnf", "pki/ca-trust/extracted", "crypto-policies",
    # interpreters that keep a part of themselves there
    "perl", "java-8-openjdk", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "R", "fonts", "php",
)  # fmt: skip


def confinement(limits: SandboxLimits) -> Confinement:
    """How a rollout is confined by bubblewrap. `problem()` must be `None`."""
    return Confinement(
        kind="bubblewrap",
        namespace=True,
        root=lambda place: ROOT,
        argv=lambda place: [*_arguments(_hardened(), limits.network), *_own(place), "--"],
        environment=lambda place: environment(),
    )


def environment() -> dict[str, str]:
    """Every variable a command has. None of taskmill's own: keys stand among them."""
    return {
        "PATH": f"{Path(interpreter()).parent}:{SYSTEM_PATH}" if _python_directory() else SYSTEM_PATH,
        "LANG": "C.UTF-8",
        "HOME": ROOT,
        "TERM": "dumb",
    }


@cache
def problem() -> str | None:
    """Why bubblewrap can't be used here, or `None`. Runs it once per process to know."""
    if sys.platform != "linux":
        return "bubblewrap is there on Linux only"
    if shutil.which("bwrap") is None:
        return "bubblewrap (the program 'bwrap') is not installed"
    return None if _try(hardened=True) is None else _try(hardened=False)


@cache
def _hardened() -> bool:
    return _try(hardened=True) is None


@cache
def _try(*, hardened: bool) -> str | None:
    """Start the interpreter in a sandbox once; the reason in words when it does not come up."""
    check = "import os, resource, select, socket, time; os.listdir('/proc')"
    command = [
        *_arguments(hardened, False),
        *("--dir", ROOT, "--remount-ro", "/", "--"),
        *(interpreter(), "-I", "-S", "-c", check),
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap could not be run: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"bwrap does not work here: {said[-1] if said else f'it ended with code {done.returncode}'}"


@cache
def _arguments(hardened: bool, network: bool) -> tuple[str, ...]:
    """All that is the same for every rollout."""
    arguments = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"]
    if network:
        arguments.append("--share-net")
    if hardened:  # bubblewrap 0.8: no user namespace inside, where a program would be root again
        arguments.append("--disable-userns")
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--hostname", "taskmill"]
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    for folder in ("/etc", "/etc/ssl", "/etc/pki", "/etc/pki/tls", "/etc/pki/ca-trust", "/var", "/run"):
        arguments += ["--dir", folder]  # else they would be open to their owner alone
    for name in (*_ETC, *(("resolv.conf",) if network else ())):
        path = os.path.join("/etc", name)
        if os.path.exists(path):
            arguments += ["--ro-bind", os.path.realpath(path), path]
    python = _python_directory()
    if python is not None:
        arguments += ["--ro-bind", python, python]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    return tuple(arguments)


def _own(place: Place) -> list[str]:
    """What is this rollout's: its workspace, and on disk what would else be unbounded memory."""
    return [
        *("--bind", str(place.workspace), ROOT),
        *("--bind", str(place.temporary), "/tmp"),
        *("--bind", str(place.temporary), "/var/tmp"),
        *("--bind", str(place.shared_memory), "/dev/shm"),
        # Root of the machine owns what is writable in /proc, and is still its owner without a capability.
        *(("--remount-ro", "/proc") if os.getuid() == 0 else ()),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", ROOT),
    ]


def _python_directory() -> str | None:
    """Where the Python that runs taskmill is installed, if the system's directories do not hold it."""
    prefix = os.path.realpath(sys.base_prefix)
    if prefix in ("/", "/usr") or prefix.startswith(tuple(f"{path}/" for path in _SYSTEM)):
        return None
    # A Python built in place may have a whole home or project directory for its prefix.
    standard = os.path.join(prefix, sys.platlibdir, f"python{sys.version_info[0]}.{sys.version_info[1]}")
    home = os.path.realpath(os.path.expanduser("~"))
    if not os.path.isdir(standard) or home == prefix or home.startswith(prefix.rstrip("/") + "/"):
        return None
    return prefix
