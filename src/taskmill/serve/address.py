"""Where a server listens, and who may come."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from taskmill.errors import ConfigurationError
from taskmill.store.files import read_whole

SHORTEST_TOKEN = 16
"""Characters that a token has at least: shorter ones can be guessed."""


class Address(NamedTuple):
    """A host and a port; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """An address from `HOST:PORT`, `[IPv6]:PORT` or `:PORT` (this machine alone). Raises `ConfigurationError`."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and "[" not in text):
        raise ConfigurationError(
            f"address={text!r} is none: give HOST:PORT, such as 127.0.0.1:8400, or :0 for any free port"
        )
    return Address(host or "127.0.0.1", int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. Raises `ConfigurationError` for a name that means nothing."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"address: the host {host!r} can't be found: {error}") from None
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)


def read_token(path: Path) -> str:
    """The token in a file, blanks around it left out. Raises `ConfigurationError` where there is none."""
    try:
        text = read_whole(path).decode("utf-8").strip()
    except FileNotFoundError:
        raise ConfigurationError(f"token_file: there is no file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"token_file: {str(path)!r} can't be read: {error}") from None
    return check_token(text, f"token_file: the token in {str(path)!r}")


def check_token(token: str, what: str = "token") -> str:
    """`token`, if it will do. Raises `ConfigurationError`, which does not repeat it."""
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"{what} won't do: {SHORTEST_TOKEN} or more printable ASCII characters without a blank are needed"
        )
    return token


def is_allowed(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries the token; takes the same time for any wrong one."""
    given = (header or "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


@lru_cache(64)
def names_this_machine(host: str | None) -> bool:
    """Whether a Host header means the machine itself.

    A server without a token takes no others: a page in a browser can be made to reach it under a name of its own.
    """
    name = (host or "").strip().lower()
    bare = name.partition("]")[0].removeprefix("[") if name.startswith("[") else name.partition(":")[0]
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
