"""What a command says, kept within a limit: its head and its tail, and how much fell out between."""

from __future__ import annotations


class Output:
    """Collects bytes, never many more than `limit` of them. `text()` is what a model reads."""

    __slots__ = ("_half", "_head", "_tail", "limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Take what came next."""
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Cut only when twice too long: each byte is then moved about once, however small the pieces are.
        if len(self._tail) > 2 * (self.limit - self._half):
            del self._tail[: self._half - self.limit]

    def take(self) -> bytes:
        """All bytes, for a caller to whom more than `limit` of them is an error (`total` tells)."""
        return bytes(self._head + self._tail)

    def text(self) -> tuple[str, int]:
        """The text, and how many bytes are missing from it. What is not UTF-8 is replaced."""
        if self.total <= self.limit:
            return self.take().decode("utf-8", "replace"), 0
        head = bytes(self._head)
        tail = bytes(self._tail[self._half - self.limit :])
        head = head[: _last_boundary(head)]
        tail = tail[_first_boundary(tail) :]
        dropped = self.total - len(head) - len(tail)
        middle = f"\n[... {dropped:,} bytes dropped ...]\n"
        return head.decode("utf-8", "replace") + middle + tail.decode("utf-8", "replace"), dropped

    def cut(self, mark: bytes) -> str | None:
        """Take the last line that begins with `mark` out of the output, and give what stands after the mark."""
        whole = self.total <= self.limit
        data = self.take() if whole else bytes(self._tail)
        before, found, after = data.rpartition(mark)
        if not found:
            return None
        line, newline, rest = after.partition(b"\n")
        kept = before + rest
        self.total -= len(mark) + len(line) + len(newline)
        if whole:
            self._head = bytearray(kept[: self._half])
            kept = kept[self._half :]
        self._tail = bytearray(kept)
        return line.decode("utf-8", "replace") or None

    def pull(self) -> str:
        """The text so far, which is forgotten; a character of which only a part has come is left for the next."""
        text, dropped = self.text()
        rest = b""
        if not dropped:
            data = self.take()
            boundary = _last_boundary(data)
            if boundary < len(data):
                text, rest = data[:boundary].decode("utf-8", "replace"), data[boundary:]
        self._head = bytearray(rest)
        self._tail.clear()
        self.total = len(rest)
        return text


def _first_boundary(data: bytes) -> int:
    """How many bytes at the start belong to a character that was cut in two."""
    for index in range(min(3, len(data))):
        if data[index] & 0xC0 != 0x80:
            return index
    return 0


def _last_boundary(data: bytes) -> int:
    """How many bytes remain when a character cut in two at the end is left out."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return len(data) if needed <= back else len(data) - back
    return len(data)
