"""The files of a bundle's sequences, read without torch and without safetensors: where each key's rows lie, and the rows.

Two layouts hold the same keys: rpadiag's append-only ``.bin`` with its index beside it, written while an engine runs, and
plain safetensors, which is what a finished bundle consists of and what any other program can write.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rpadiag.errors import InputError

POSITIONS = "positions"
SCORES = {"logprob": "float32", "entropy": "float32", "rank": "int32", "argmax": "int32"}
ELEMENTS = {"bfloat16": "<i2", "float16": "<f2", "float32": "<f4", "float64": "<f8", "int32": "<i4", "int64": "<i8"}
SAFETENSORS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64"}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
MIN_MAPPED_BYTES = 1 << 20  # reading less than this is faster than making a mapping


@dataclass(frozen=True, kw_only=True)
class Segment:
    """``rows`` rows from row ``row`` on, at ``offset`` bytes of the file."""

    row: int
    rows: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a sequence's file: its dtype by torch's name, its width in elements, and where its rows lie."""

    dtype: str
    width: int
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Rows that the segments reach to. Raises ValueError where some before are missing or there twice."""
        end = max((s.row + s.rows for s in self.segments), default=0)
        there = sum(s.rows for s in self.segments)
        if there != end:
            raise ValueError(f"is missing rows: {there} of {end} are there")
        return end

    @property
    def element(self) -> np.dtype[Any]:
        """How numpy sees an element: bfloat16 as the signed integer of its bits."""
        return np.dtype(ELEMENTS[self.dtype])


Keys = dict[str, Key]


def read_keys(path: Path) -> Keys:
    """The keys of a sequence's file in either layout; a broken or truncated one is an InputError."""
    keys, end = _safetensors_keys(path) if path.suffix == ".safetensors" else _raw_keys(path)
    size = path.stat().st_size
    if size < end:
        raise InputError(f"{path} is truncated: {size} bytes, its index names {end}")
    return keys


def read_rows(path: Path, name: str, key: Key) -> npt.NDArray[Any]:
    """Rows [T, W] of a key, bfloat16 as int16 bit patterns.

    Many rows in one piece map the file and cost no copy; the array may be written to, and the file stays as it is.
    """
    try:
        rows = key.rows
    except ValueError as why:
        raise InputError(f"{name} of {path} {why}") from why
    if rows * key.width == 0:
        return np.empty((rows, key.width), key.element)
    many = rows * key.width * key.element.itemsize >= MIN_MAPPED_BYTES
    if many and len(key.segments) == 1 and key.segments[0].offset % key.element.itemsize == 0:
        # mode "c": pages come from the file, and what is written to them does not go back
        return np.memmap(path, key.element, mode="c", offset=key.segments[0].offset, shape=(rows, key.width))
    array = np.empty((rows, key.width), key.element)
    with path.open("rb", buffering=0) as file:
        for segment in key.segments:
            file.seek(segment.offset)
            view = array[segment.row : segment.row + segment.rows]
            if file.readinto(view.data.cast("B")) != view.nbytes:
                raise InputError(f"{path} ended inside {name}")
    return array


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(tensors by name, first byte of the data) of a safetensors file. Raises ValueError, OSError or struct.error."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header claims {length} bytes, the file has {size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _safetensors_keys(path: Path) -> tuple[Keys, int]:
    keys: Keys = {}
    end = 0
    try:
        header, start = read_header(path)
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            shape = [int(n) for n in entry["shape"]]
            dtype = SAFETENSORS.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"{name} is {entry['dtype']}; known dtypes are {', '.join(SAFETENSORS)}")
            if not shape:
                raise ValueError(f"{name} is a single number; every tensor has one row per token")
            width = int(np.prod(shape[1:], dtype=np.int64))
            if stop - begin != shape[0] * width * np.dtype(ELEMENTS[dtype]).itemsize:
                raise ValueError(f"{name} of shape {shape} takes {stop - begin} bytes")
            keys[name] = Key(dtype=dtype, width=width, segments=(Segment(row=0, rows=shape[0], offset=start + begin),))
            end = max(end, start + stop)
    except (ValueError, KeyError, TypeError, OSError, struct.error) as error:
        raise InputError(f"cannot read {path}", detail=_said(error)) from error
    return keys, end


def _raw_keys(path: Path) -> tuple[Keys, int]:
    index_path = path.with_suffix(".json")
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        names = [(str(name), str(dtype), int(width)) for name, dtype, width in index["keys"]]
        found: Mapping[str, list[Segment]] = {name: [] for name, _, _ in names}
        columns = index["segments"]
        end = 0
        for key, row, rows, offset in zip(*(columns[c] for c in ("key", "row", "rows", "offset")), strict=True):
            name, dtype, width = names[key]
            found[name].append(Segment(row=row, rows=rows, offset=offset))
            end = max(end, offset + rows * width * np.dtype(ELEMENTS[dtype]).itemsize)
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"cannot read {index_path}", detail=_said(error)) from error
    return {n: Key(dtype=d, width=w, segments=tuple(found[n])) for n, d, w in names}, end


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError) else repr(error)
