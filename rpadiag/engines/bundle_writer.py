"""Writing bundles while an engine runs: ``sequence-NNNNN.bin``, append-only, with its index ``sequence-NNNNN.json`` beside it.

The index's ``keys`` lists (name, dtype, width), and ``segments`` has four columns of equal length: key (index into ``keys``),
row (first row), rows, offset (bytes). A segment is ``rows * width`` elements, little-endian and row-major.
:mod:`rpadiag.engines.bundle` reads them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rpadiag.engines.base import TokenScores
from rpadiag.engines.bundle_files import ELEMENTS, POSITIONS, SCORES
from rpadiag.errors import CaptureError, InputError

if TYPE_CHECKING:
    import torch

FORMAT = "rpadiag-bundle"
VERSION = 1
BUNDLE = "bundle.json"
_ALIGNMENT = 64  # bytes; a mapped segment then starts on an element of any dtype


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about writing into an error that names the bundle."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise InputError(
            f"cannot write bundle {path}: {error.strerror or error}",
            hint="free space on that disk, write elsewhere, or capture fewer sites" if full else None,
        ) from error


class SequenceWriter:
    """One sequence's raw file: rows are appended as they come and found again through the index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, tuple[int, str, int]] = {}
        self._segments: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        self._next_row: list[int] = []
        self._offset = 0
        with disk_errors(path):
            self._file: BinaryIO = path.open("wb", buffering=1 << 20)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows written per key, counted to the last row."""
        return {name: self._next_row[index] for name, (index, _, _) in self._keys.items()}

    def append(self, key: str, tensor: torch.Tensor, *, row: int | None = None) -> None:
        """Append rows of a key. ``tensor`` [t, W] may be strided and live on any device.

        row: the first row's index in the sequence; by default the row after the last one written.
        """
        data = tensor.detach().reshape(tensor.shape[0], -1).contiguous().cpu()
        dtype = str(data.dtype).removeprefix("torch.")
        index = self._key(key, dtype, data.shape[1])
        start = self._next_row[index] if row is None else row
        self._write(index, start, data.shape[0], _bytes(data).data)

    def append_array(self, key: str, values: npt.NDArray[Any], dtype: str) -> None:
        """Append a one-dimensional array as a column of width 1."""
        data = np.ascontiguousarray(values, dtype=ELEMENTS[dtype])
        self._write(self._key(key, dtype, 1), 0, len(data), data.view(np.uint8).data)

    def close(self, **index: Any) -> None:
        """Flush, and write the index with ``index`` as further entries."""
        columns = dict(zip(("key", "row", "rows", "offset"), self._segments, strict=True))
        keys = [[name, dtype, width] for name, (_, dtype, width) in self._keys.items()]
        with disk_errors(self._path):
            self._file.close()
            write_json(self._path.with_suffix(".json"), {"keys": keys, "segments": columns, **index})

    def abandon(self) -> None:
        """Close the file without an index; the sequence cannot be read."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _key(self, key: str, dtype: str, width: int) -> int:
        known = self._keys.get(key)
        if dtype not in ELEMENTS:
            raise CaptureError(
                f"site {key} is {dtype}, which a bundle does not hold",
                detail=f"known dtypes: {', '.join(ELEMENTS)}",
                hint="a quantised KV cache hands a compiled model's attention quantised queries: use --mode eager",
            )
        if known is None:
            known = self._keys[key] = (len(self._keys), dtype, width)
            self._next_row.append(0)
        if known[1:] != (dtype, width):
            raise CaptureError(
                f"site {key} changed from {known[1]} with width {known[2]} to {dtype} with width {width}",
                detail="all rows of a site must have one dtype and width",
            )
        return known[0]

    def _write(self, index: int, row: int, rows: int, data: memoryview) -> None:
        with disk_errors(self._path):
            padding = -self._offset % _ALIGNMENT
            if padding:
                self._file.write(bytes(padding))
            self._file.write(data)
        for column, value in zip(self._segments, (index, row, rows, self._offset + padding), strict=True):
            column.append(value)
        self._next_row[index] = max(self._next_row[index], row + rows)
        self._offset += padding + data.nbytes


def raw_name(index: int) -> str:
    """File name of a sequence in rpadiag's own append-only form."""
    return f"sequence-{index:05d}.bin"


def write_bundle_json(
    directory: Path, status: str, meta: Mapping[str, Any], sequences: Mapping[int, Mapping[str, Any]]
) -> None:
    """Write ``bundle.json``: the sequences in the order of their numbers."""
    listed = [sequences[i] for i in sorted(sequences)]
    content = {"format": FORMAT, "version": VERSION, "status": status, "meta": meta, "sequences": listed}
    with disk_errors(directory):
        write_json(directory / BUNDLE, content)


class BundleWriter:
    """Writes a bundle; a context manager. Only :meth:`close`, or a block that ends well, makes it complete."""

    def __init__(self, directory: str | Path, meta: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self.meta = dict(meta)
        self._open: dict[int, SequenceWriter] = {}
        self._done: dict[int, dict[str, Any]] = {}
        self._last = -1
        if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise InputError(f"bundle {self.directory} already exists", hint="write to another path, or remove it")
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        self._save("writing")

    def begin(self, index: int) -> SequenceWriter:
        """Open sequence ``index`` for writing."""
        if index in self._open or index in self._done:
            raise InputError(f"sequence {index} of bundle {self.directory} was already begun")
        self._open[index] = SequenceWriter(self.directory / raw_name(index))
        self._last = index
        return self._open[index]

    def append(self, site: str, tensor: torch.Tensor, *, sequence: int | None = None, row: int | None = None) -> None:
        """Append rows [t, W] of a site to a sequence (the one begun last) at ``row`` (after those written)."""
        self._open[self._last if sequence is None else sequence].append(site, tensor, row=row)

    def end(
        self,
        index: int,
        *,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        prompt: int | None = None,
        positions: npt.NDArray[np.int64] | None = None,
        scores: TokenScores | None = None,
    ) -> None:
        """Close a sequence. ``prompt`` is its index in the prompt file, by default ``index``."""
        writer = self._open.pop(index)
        if positions is not None:
            writer.append_array(POSITIONS, positions, "int64")
        if scores is not None:
            for name, dtype in SCORES.items():
                writer.append_array(f"scores.{name}", getattr(scores, name), dtype)
        writer.close()
        self._done[index] = {
            "file": raw_name(index),
            "prompt": index if prompt is None else prompt,
            "token_ids": [int(t) for t in token_ids],
            "num_prompt_tokens": int(num_prompt_tokens),
        }

    def close(self) -> None:
        """Mark the bundle complete. A sequence that was begun and not ended is an error."""
        if self._open:
            raise CaptureError(f"sequence {min(self._open)} of bundle {self.directory} was begun but never ended")
        self._save("complete")

    def abandon(self) -> None:
        """Leave the bundle as it is, incomplete."""
        for writer in self._open.values():
            writer.abandon()
        self._open.clear()

    def _save(self, status: str) -> None:
        write_bundle_json(self.directory, status, self.meta, self._done)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _bytes(data: torch.Tensor) -> npt.NDArray[np.uint8]:
    import torch

    flat = data.reshape(-1)
    return (flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)).numpy()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)
