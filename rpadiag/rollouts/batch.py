"""Records of any schema laid out alike: flat arrays over scored tokens, with the sequence and position of each.

Shape legend: S sequences, T tokens of all of them together, M scored tokens (mask 1) of all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rpadiag.errors import InputError
from rpadiag.rollouts.files import ONE_LIST, Chunk
from rpadiag.rollouts.schemas import Schema

if TYPE_CHECKING:
    import pyarrow as pa

ONE_NUMBER = "write one number a record"
LARGEST_ID = 2**31  # tables hold 32-bit token ids and positions
Ints = NDArray[np.int64]
Singles = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A record whose columns differ in length where they must not: ``text`` says which, and by how much."""

    sequence: int
    text: str
    difference: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some whole sequences. Those in ``misfits`` have no scored tokens.

    ids [T] without padding; starts [S + 1]: where each sequence begins in it. num_prompt [S]: tokens before the first scored
    one. padding [S]: padding tokens on the left. first [S]: position id of the first real token, where the file has them.
    Of each scored token: row (0..S-1), position (in its unpadded sequence), token, p (None without trainer), q.
    """

    first: int
    ids: Ints
    starts: Ints
    num_prompt: Ints
    padding: Ints
    row: Ints
    position: Ints
    token: Ints
    p: Singles | None
    q: Singles
    rollout_ids: list[Ints | None]
    first_position: Ints | None = None
    scalars: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    misfits: tuple[Misfit, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    def prompt_ids(self, i: int) -> Ints:
        """Tokens of sequence i before its first scored one."""
        return self.ids[self.starts[i] : self.starts[i] + self.num_prompt[i]]


@dataclass
class _Column:
    """A list column as flat values [N] and offsets [S + 1]."""

    values: NDArray[Any]
    offsets: Ints

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def rows(self) -> Ints:
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)

    def within(self) -> Ints:
        """Index of each value in its own list."""
        return np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)


def lay_out(chunk: Chunk, schema: Schema, *, first: int) -> Batch:
    """One chunk in the common layout; ``first`` is the number of its first sequence among all files."""
    table = chunk.table
    size = table.num_rows
    ids = _joined([_ints(chunk, c) for c in schema.ids])
    q = _floats(chunk, schema.rollout)
    p = _floats(chunk, schema.trainer) if schema.trainer in table.column_names else None
    misfits = _misfits(schema, first, ids, q, p)
    broken = np.zeros(size, bool)
    broken[[m.sequence - first for m in misfits]] = True
    real = _attention(chunk, schema, ids)
    scored = _mask(chunk, schema, q, ids, broken)
    row, index = q.rows(), q.within()
    place = index + (ids.lengths - q.lengths)[row]  # the last R tokens of the sequence
    keep = scored & ~broken[row] & (place >= 0)
    keep[keep] &= real[(ids.offsets[:-1][row] + place)[keep]]
    row, place = row[keep], place[keep]
    before = np.concatenate(([0], np.cumsum(real)))  # real tokens before each token
    real_starts = before[ids.offsets]
    position = before[ids.offsets[:-1][row] + place] - real_starts[row]
    num_real = np.diff(real_starts)
    num_prompt = num_real.copy()
    np.minimum.at(num_prompt, row, position)
    positions = _ints(chunk, schema.positions) if schema.positions in table.column_names else None
    return Batch(
        first=first,
        ids=ids.values[real],
        starts=real_starts,
        num_prompt=num_prompt,
        padding=_leading(real, ids),
        row=row,
        position=position,
        token=ids.values[ids.offsets[:-1][row] + place],
        p=None if p is None else _like(p, q)[keep],
        q=q.values[keep],
        rollout_ids=_rollout_ids(chunk, schema, size),
        first_position=None if positions is None else _first_position(positions, real, ids),
        scalars=_scalars(chunk, schema, size),
        misfits=misfits,
    )


def _misfits(schema: Schema, first: int, ids: _Column, q: _Column, p: _Column | None) -> tuple[Misfit, ...]:
    out = []
    for i in np.flatnonzero(q.lengths > ids.lengths):
        text = f"{int(q.lengths[i])} {schema.rollout} for {int(ids.lengths[i])} tokens"
        out.append(Misfit(sequence=first + int(i), text=text, difference=int(q.lengths[i] - ids.lengths[i])))
    for i in np.flatnonzero(p.lengths != q.lengths) if p is not None else ():
        text = f"{int(p.lengths[i])} {schema.trainer} against {int(q.lengths[i])} {schema.rollout}"  # type: ignore[union-attr]
        out.append(Misfit(sequence=first + int(i), text=text, difference=int(p.lengths[i] - q.lengths[i])))  # type: ignore[union-attr]
    return tuple({m.sequence: m for m in reversed(out)}.values())


def _like(p: _Column, q: _Column) -> Singles:
    """p laid out as q is; NaN in the sequences where they differ in length, which are misfits."""
    if np.array_equal(p.lengths, q.lengths):
        return p.values
    out = np.full(len(q.values), np.nan, np.float32)
    alike = p.lengths == q.lengths
    out[alike[q.rows()]] = p.values[alike[p.rows()]]
    return out


def _attention(chunk: Chunk, schema: Schema, ids: _Column) -> NDArray[np.bool_]:
    """Which tokens are real [T]; all of them where the file does not say."""
    names = [c for c in schema.attention if c in chunk.table.column_names]
    if names and len(names) == len(schema.attention):
        mask = _joined([_floats(chunk, c) for c in names])
        if not np.array_equal(mask.lengths, ids.lengths):
            i = int(np.flatnonzero(mask.lengths != ids.lengths)[0])
            raise InputError(
                f"{chunk.path}, record {chunk.first + i + 1}: {' and '.join(names)} cover {mask.lengths[i]} tokens, "
                f"{' and '.join(schema.ids)} {ids.lengths[i]}",
                hint="write a mask as long as the tokens",
            )
        return mask.values > 0
    if schema.length is not None and schema.length in chunk.table.column_names:
        lengths = _scalar(chunk, schema.length)
        return np.asarray(ids.within() < lengths[ids.rows()])
    return np.ones(len(ids.values), bool)


def _mask(chunk: Chunk, schema: Schema, q: _Column, ids: _Column, broken: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the log-probabilities count [sum of R]."""
    keep = np.ones(len(q.values), bool)
    row, index = q.rows(), q.within()
    for name in schema.mask:
        if name not in chunk.table.column_names:
            continue
        mask = _floats(chunk, name)
        odd = (mask.lengths != q.lengths) & (mask.lengths != ids.lengths) & ~broken
        if odd.any():
            i = int(np.flatnonzero(odd)[0])
            raise InputError(
                f"{chunk.path}, record {chunk.first + i + 1}: {name} has {mask.lengths[i]} entries, "
                f"{schema.rollout} {q.lengths[i]} and the sequence {ids.lengths[i]}",
                hint="write a mask as long as the tokens, or as the log-probabilities",
            )
        place = np.clip(index + (mask.lengths - q.lengths)[row], 0, np.maximum(mask.lengths[row] - 1, 0))
        if len(mask.values):
            keep &= mask.values[np.minimum(mask.offsets[:-1][row] + place, len(mask.values) - 1)] > 0
    if schema.response_length is not None and schema.response_length in chunk.table.column_names:
        keep &= (q.lengths[row] - index) <= _scalar(chunk, schema.response_length)[row]
    if schema.weight is not None and schema.weight in chunk.table.column_names:
        keep &= _scalar(chunk, schema.weight)[row] > 0
    return keep


def _leading(real: NDArray[np.bool_], ids: _Column) -> Ints:
    """Padding on the left of each sequence [S]."""
    out = ids.lengths.copy()
    np.minimum.at(out, ids.rows()[real], ids.within()[real])
    return np.where(np.diff(np.concatenate(([0], np.cumsum(real)))[ids.offsets]) > 0, out, 0)


def _first_position(positions: _Column, real: NDArray[np.bool_], ids: _Column) -> Ints | None:
    """Position id of the first real token of each sequence [S]; None where they are not one a token."""
    if not np.array_equal(positions.lengths, ids.lengths):
        return None
    at = ids.offsets[:-1] + _leading(real, ids)
    return np.asarray(positions.values[np.minimum(at, max(len(positions.values) - 1, 0))])


def _rollout_ids(chunk: Chunk, schema: Schema, size: int) -> list[Ints | None]:
    if schema.rollout_ids is None or schema.rollout_ids not in chunk.table.column_names:
        return [None] * size
    column = _ints(chunk, schema.rollout_ids)
    return [column.values[a:b] for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


def _scalars(chunk: Chunk, schema: Schema, size: int) -> dict[str, NDArray[np.float64]]:
    wanted = {k: getattr(schema, k) for k in ("step", "version", "temperature", "cached")}
    return {k: _scalar(chunk, c) for k, c in wanted.items() if c is not None and c in chunk.table.column_names}


# -- Arrow to numpy -----------------------------------------------------------------------------------


def _joined(parts: list[_Column]) -> _Column:
    """Lists of the same sequences, one after another."""
    if len(parts) == 1:
        return parts[0]
    lengths = sum((p.lengths for p in parts[1:]), start=parts[0].lengths)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    values = np.empty(int(offsets[-1]), parts[0].values.dtype)
    shift = np.zeros(len(lengths), np.int64)
    for part in parts:
        values[part.within() + (offsets[:-1] + shift)[part.rows()]] = part.values
        shift += part.lengths
    return _Column(values=values, offsets=offsets)


def _column(chunk: Chunk, name: str) -> tuple[pa.Array, Ints]:
    """Flat values and offsets of a list column; a list of one list is that list."""
    import pyarrow as pa

    array = chunk.table.column(name).combine_chunks()
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if not (
        pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type)
    ):
        raise InputError(f"{chunk.path}: {name} is {array.type}, not a list of numbers", hint=ONE_LIST)
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    if array.null_count:
        i = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise InputError(
            f"{chunk.path}, record {chunk.first + i + 1} has no {name}",
            hint="leave such records out, or write the column for every record",
        )
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.flatten()
    offsets = offsets - offsets[0]
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        if not (np.diff(offsets) == 1).all():
            raise InputError(
                f"{chunk.path}: {name} holds several sequences a record", hint="write one sequence a record"
            )
        offsets = values.offsets.to_numpy().astype(np.int64)
        values, offsets = values.flatten(), offsets - offsets[0]
    return values, offsets


def _ints(chunk: Chunk, name: str | None) -> _Column:
    import pyarrow as pa

    assert name is not None
    values, offsets = _column(chunk, name)
    if values.null_count or not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise InputError(
            f"{chunk.path}: {name} is a list of {values.type}{' with nulls' if values.null_count else ''}, not of whole numbers",
            hint=ONE_LIST,
        )
    numbers = values.to_numpy(zero_copy_only=False)
    far = np.flatnonzero(~((numbers > -LARGEST_ID) & (numbers < LARGEST_ID))) if len(numbers) else numbers
    if len(far):
        raise InputError(
            f"{chunk.path}: {name} holds {numbers[far[0]]}, which is no token id and no position",
            hint="look at that column",
        )
    if numbers.dtype.kind == "f" and not np.array_equal(numbers, np.trunc(numbers)):
        raise InputError(f"{chunk.path}: {name} holds fractions, not whole numbers", hint=ONE_LIST)
    return _Column(values=numbers.astype(np.int64, copy=False), offsets=offsets)


def _floats(chunk: Chunk, name: str) -> _Column:
    import pyarrow as pa

    values, offsets = _column(chunk, name)
    kind = values.type
    if pa.types.is_null(kind) or pa.types.is_boolean(kind):
        values = values.cast(pa.float32())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InputError(f"{chunk.path}: {name} is a list of {kind}, not of numbers", hint=ONE_LIST)
    return _Column(values=values.to_numpy(zero_copy_only=False).astype(np.float32, copy=False), offsets=offsets)


def _scalar(chunk: Chunk, name: str) -> NDArray[np.float64]:
    import pyarrow as pa

    array = chunk.table.column(name).combine_chunks()
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):  # NeMo-RL's lists of one
        values, offsets = array.flatten(), array.offsets.to_numpy()
        if not (np.diff(offsets) == 1).all():
            raise InputError(f"{chunk.path}: {name} is not one number a record", hint=ONE_NUMBER)
        array = values
    if pa.types.is_boolean(array.type) or pa.types.is_null(array.type):
        array = array.cast(pa.float64())
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise InputError(f"{chunk.path}: {name} is {array.type}, not a number", hint=ONE_NUMBER)
    return np.asarray(array.to_numpy(zero_copy_only=False), np.float64)
