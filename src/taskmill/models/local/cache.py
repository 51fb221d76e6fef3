"""Keys and values: of the rows of a running batch, and of turns that ended, for the next turn to go on from.

All rows of a batch end at the same column, as in a batch padded on the left, so that one step writes one column and
the model's own code makes the masks. Rows join and leave without any of the others being moved: a row that joins is
copied in so that it ends where all end, a row that leaves gives its place to the last. What stands to the left of a
row's own columns is masked; it may be anything but not-a-number, so memory is zeroed when it is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

LEAST_SPARE = 64
"""Columns kept free on either side when memory for a batch is taken."""

Tokens = np.ndarray[Any, np.dtype[np.int32]]


class Kept(NamedTuple):
    """Keys and values of a row's first tokens: for each layer, two of (heads, tokens, width of a head)."""

    layers: list[tuple[Tensor, Tensor]]
    length: int

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)


class _Place:
    """Where the batch stands in its memory: rows in use, and the columns `start` to `end`."""

    def __init__(self, row_room: int, column_room: int, end: int) -> None:
        self.row_room = row_room
        self.column_room = column_room
        self.start = self.end = end


class _Layer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, place: _Place) -> None:
        super().__init__()
        self.place = place

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        place = self.place
        rows, heads, fresh, width = key_states.shape
        if not self.is_initialized:
            self.take(heads, width, value_states.shape[-1], key_states.dtype, key_states.device)
        assert self.keys is not None
        assert self.values is not None
        until = place.end + fresh
        self.keys[:rows, :, place.end : until] = key_states
        self.values[:rows, :, place.end : until] = value_states
        return self.keys[:rows, :, place.start : until], self.values[:rows, :, place.start : until]

    def take(self, heads: int, width: int, value_width: int, dtype: Any, device: Any) -> None:
        room = (self.place.row_room, heads, self.place.column_room)
        self.keys = torch.zeros((*room, width), dtype=dtype, device=device)
        self.values = torch.zeros((*room, value_width), dtype=dtype, device=device)
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.place.end - self.place.start

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # transformers before 5 hands the positions of the queries over, and later ones their number.
        fresh = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + fresh, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class Slots(Cache):  # type: ignore[misc]
    """The keys and values of a batch's rows. `lengths` are the tokens each row has in here."""

    def __init__(self, layers: int, *, rows: int = 0, columns: int = 0, end: int = 0) -> None:
        self.place = _Place(rows, columns, end)
        self.lengths: list[int] = []
        super().__init__(layers=[_Layer(self.place) for _ in range(layers)])

    @property
    def width(self) -> int:
        """Columns from the beginning of the longest row to where all end."""
        return self.place.end - self.place.start

    @property
    def size(self) -> int:
        """Bytes taken."""
        return sum(
            part.numel() * part.element_size()
            for layer in self.layers
            if layer.is_initialized
            for part in (layer.keys, layer.values)
        )

    # -- filling ----------------------------------------------------------------------------------------------

    def begin(self, histories: Sequence[tuple[Kept | None, int]]) -> None:
        """Start with these rows: of each, the first so many tokens of what was kept. The cache must be empty."""
        place = self.place
        self.lengths = [length for _, length in histories]
        place.start = place.end - max(self.lengths)
        for row, (kept, length) in enumerate(histories):
            if kept is None or not length:
                continue
            for layer, (keys, values) in zip(self.layers, kept.layers, strict=True):
                if not layer.is_initialized:
                    layer.take(keys.shape[0], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)
                layer.keys[row, :, place.end - length : place.end] = keys[:, :length]
                layer.values[row, :, place.end - length : place.end] = values[:, :length]

    def make_room(self, fresh: int) -> None:
        """See to it that `fresh` columns can be written at the end."""
        if self.place.end + fresh > self.place.column_room:
            self._move(self.place.row_room, self.width + fresh)

    def advance(self, fresh: int, own: Sequence[int] | None = None) -> None:
        """A pass has written `fresh` columns; of these, `own` are each row's (all, by default)."""
        self.place.end += fresh
        for row in range(len(self.lengths)):
            self.lengths[row] += fresh if own is None else own[row]

    def join(self, group: Slots, picks: Sequence[int], *, most_rows: int) -> None:
        """Add the rows `picks` of `group` (one may be picked twice) at the end of these."""
        rows, joining = len(self.lengths), len(picks)
        width = group.width
        room = self.place.row_room
        if rows + joining > room:
            room = max(rows + joining, min(room + room // 4, most_rows))
        if rows == 0:
            self.place.start = self.place.end
        if room > self.place.row_room or width > self.place.end:
            self._move(room, max(width, self.width))
        end, whence = self.place.end, group.place
        for layer, other in zip(self.layers, group.layers, strict=True):
            if not other.is_initialized:
                continue
            if not layer.is_initialized:
                heads, value_width = other.keys.shape[1], other.values.shape[-1]
                layer.take(heads, other.keys.shape[-1], value_width, other.keys.dtype, other.keys.device)
            for row, pick in enumerate(picks, start=rows):
                layer.keys[row, :, end - width : end] = other.keys[pick, :, whence.start : whence.end]
                layer.values[row, :, end - width : end] = other.values[pick, :, whence.start : whence.end]
        self.lengths += [group.lengths[pick] for pick in picks]
        self.place.start = end - max(self.lengths)

    def leave(self, row: int) -> None:
        """Take `row` out; the last one gets its number."""
        last = len(self.lengths) - 1
        if row != last:
            start, end = self.place.end - self.lengths[last], self.place.end
            for layer in self.layers:
                if layer.is_initialized:
                    layer.keys[row, :, start:end] = layer.keys[last, :, start:end]
                    layer.values[row, :, start:end] = layer.values[last, :, start:end]
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self.place.start = self.place.end - max(self.lengths, default=0)

    def copy_of(self, row: int) -> Kept:
        """What `row` has, in memory of its own."""
        length = self.lengths[row]
        start, end = self.place.end - length, self.place.end
        return Kept(
            [
                (layer.keys[row, :, start:end].clone(), layer.values[row, :, start:end].clone())
                for layer in self.layers
                if layer.is_initialized
            ],
            length,
        )

    def _move(self, rows: int, width: int) -> None:
        """Take memory for `rows` of `width` columns and some to spare on both sides, and move in."""
        place = self.place
        spare = _spare(width)
        start, end = place.start, place.end
        place.row_room, place.column_room, place.end = rows, width + 2 * spare, width + spare
        place.start = place.end - (end - start)
        used = len(self.lengths)
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            keys, values = layer.keys, layer.values
            layer.take(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype, keys.device)
            if used:
                layer.keys[:used, :, place.start : place.end] = keys[:used, :, start:end]
                layer.values[:used, :, place.start : place.end] = values[:used, :, start:end]


def _spare(width: int) -> int:
    return max(LEAST_SPARE, width // 4)


def tokens_taken(rows: int, width: int) -> int:
    """For how many tokens there is room in the memory that so many rows of this width take, spare room included."""
    return (rows + rows // 4) * (width + 2 * _spare(width))


class KeptTurns:
    """Keys and values of turns that ended, the longest unused of them first to go when they exceed `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._turns: OrderedDict[int, tuple[Tokens, Kept]] = OrderedDict()
        self._serial = 0

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, tokens: Sequence[int], kept: Kept) -> None:
        """Keep a row's keys and values for `tokens`. Turns that these begin with are no longer needed."""
        if kept.size > self.limit:
            return
        new = np.asarray(tokens[: kept.length], dtype=np.int32)
        for number, (old, _) in list(self._turns.items()):
            if len(old) <= len(new) and common(old, new) == len(old):
                self._forget(number)
        self._serial += 1
        self._turns[self._serial] = (new, kept)
        self.size += kept.size
        self.bound(self.limit)

    def find(self, tokens: Sequence[int]) -> tuple[Kept | None, int]:
        """What is kept of the longest beginning of `tokens`, and how many tokens that is; never all of them."""
        wanted = np.asarray(tokens[:-1], dtype=np.int32)
        best, length = 0, 0
        for number, (old, _) in self._turns.items():
            if length < len(old) and (shared := common(old, wanted)) > length:
                best, length = number, shared
        if not length:
            return None, 0
        self._turns.move_to_end(best)
        return self._turns[best][1], length

    def bound(self, limit: int) -> None:
        """Keep at most `limit` bytes from now on."""
        self.limit = limit
        while self.size > limit:
            self._forget(next(iter(self._turns)))

    def clear(self) -> None:
        """Forget all of it."""
        self._turns.clear()
        self.size = 0

    def _forget(self, number: int) -> None:
        _, kept = self._turns.pop(number)
        self.size -= kept.size


def common(one: Tokens, other: Tokens) -> int:
    """How many tokens two rows have in common from their beginning."""
    length = min(len(one), len(other))
    if not length or one[0] != other[0]:
        return 0
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
