"""Bundles: what one engine captured, on disk, so that two stacks never have to run at the same time or place.

A bundle is a directory with ``bundle.json`` and one set of files per sequence.

``bundle.json`` (strict JSON)::

    {"format": "rpadiag-bundle", "version": 1, "status": "complete", "meta": {...},
     "sequences": [{"file": "sequence-00000.bin", "prompt": 0, "token_ids": [1, 2, 3], "num_prompt_tokens": 3}]}

``status`` is ``writing`` until the writer closes; a reader refuses anything but ``complete``. ``meta`` is the
engine's manifest, free in form.

rpadiag writes ``sequence-NNNNN.bin``, append-only, with ``sequence-NNNNN.json`` beside it: ``keys`` lists
(name, dtype, width) and ``segments`` holds four columns of equal length: key (index into ``keys``), row
(first row), rows, offset (bytes). A segment is ``rows * width`` elements, little-endian and row-major.

An engine that rpadiag does not ship may write ``sequence-NNNNN.safetensors`` instead, and name it in ``file``.

Keys are the same in both: site addresses with tensors [T, W] (``logprob``: [T-1, 1]), and optionally
``positions`` (int64 [T]) and ``scores.logprob``, ``scores.entropy`` (float32), ``scores.rank``, ``scores.argmax``
(int32), each [T-1].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rpadiag.engines.base import TokenScores, TokenSequence
from rpadiag.engines.bundle_writer import ELEMENTS, FORMAT, POSITIONS, SCORES, VERSION, BundleWriter, SequenceWriter
from rpadiag.errors import CaptureError, InputError
from rpadiag.sites import in_execution_order, split_site

if TYPE_CHECKING:
    import torch

__all__ = ["Bundle", "BundleCapture", "BundleWriter", "SequenceWriter", "open_bundle"]


@dataclass(frozen=True, kw_only=True)
class _Segment:
    row: int
    rows: int
    offset: int


class BundleCapture:
    """One sequence of a bundle, read one site at a time (a :class:`rpadiag.engines.base.Capture`)."""

    def __init__(self, path: Path, sequence: TokenSequence) -> None:
        self.path = path
        self.sequence = sequence
        self._foreign = path.suffix == ".safetensors"
        self._keys = _foreign_keys(path) if self._foreign else _native_keys(path)
        self.sites: tuple[str, ...] = _in_execution_order(self._keys)

    @property
    def positions(self) -> npt.NDArray[np.int64] | None:
        """int64 [T], None where the engine did not record them."""
        if POSITIONS not in self._keys:
            return None
        values: npt.NDArray[np.int64] = self._read(POSITIONS).reshape(-1).numpy().astype(np.int64)
        return values

    @property
    def scores(self) -> TokenScores | None:
        """Scores of tokens 1 .. T-1, None unless the bundle holds all four columns."""
        if any(f"scores.{name}" not in self._keys for name in SCORES):
            return None
        columns = {n: self._read(f"scores.{n}").reshape(-1).numpy().astype(dtype) for n, dtype in SCORES.items()}
        if any(len(c) != len(self.sequence.token_ids) - 1 for c in columns.values()):
            raise InputError(f"{self.path} does not hold one score for each token but the first")
        return TokenScores(**columns, positions=self.positions)

    def read(self, site: str) -> torch.Tensor:
        """Tensor [T, W] on the CPU in the captured dtype; a site that was not captured raises CaptureError.

        Where the rows lie in one piece the tensor maps the file and costs no copy; it may be written to
        (the file stays as it is), and the mapping ends with the tensor.
        """
        if site not in self.sites:
            points = ", ".join(dict.fromkeys(s.rsplit(".", 1)[-1] for s in self.sites))
            raise CaptureError(
                f"site {site} is not in {self.path}",
                detail=f"{len(self.sites)} sites are, of the points {points or 'none'}",
                hint="capture it: name it with --sites, or leave --sites out to capture every site",
            )
        tensor = self._read(site)
        expected = len(self.sequence.token_ids) - (1 if site == "logprob" else 0)
        if tensor.shape[0] != expected:
            raise InputError(f"site {site} of {self.path} has {tensor.shape[0]} rows, expected {expected}")
        return tensor

    def _read(self, key: str) -> torch.Tensor:
        if self._foreign:
            from safetensors import safe_open

            with safe_open(str(self.path), framework="pt", device="cpu") as file:
                tensor: torch.Tensor = file.get_tensor(key)
            return tensor.reshape(tensor.shape[0], -1)
        dtype, width, segments = self._keys[key]
        return _assemble(self.path, key, dtype, width, segments)


class Bundle:
    """A complete bundle. ``meta`` is the engine's manifest, ``sequences`` what it ran."""

    def __init__(self, directory: Path, content: Mapping[str, Any]) -> None:
        self.directory = directory
        self.meta: dict[str, Any] = dict(content.get("meta", {}))
        self._entries: list[dict[str, Any]] = list(content["sequences"])
        self.sequences = [
            TokenSequence(
                prompt=int(entry.get("prompt", i)),
                token_ids=tuple(int(t) for t in entry["token_ids"]),
                num_prompt_tokens=int(entry.get("num_prompt_tokens", len(entry["token_ids"]))),
            )
            for i, entry in enumerate(self._entries)
        ]

    def __len__(self) -> int:
        return len(self.sequences)

    def capture(self, index: int) -> BundleCapture:
        """The intermediates of sequence ``index``."""
        name = self._entries[index].get("file", f"sequence-{index:05d}.safetensors")
        path = self.directory / Path(name).name
        if not path.is_file():
            raise InputError(f"bundle {self.directory} has no file {path.name}, which bundle.json names")
        return BundleCapture(path, self.sequences[index])


def open_bundle(directory: str | Path) -> Bundle:
    """Open a complete bundle, rpadiag's own or a foreign one; anything else is an InputError."""
    directory = Path(directory)
    try:
        content = json.loads((directory / "bundle.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{directory} is not a bundle: it has no bundle.json") from error
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {directory / 'bundle.json'}", detail=str(error)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "sequences" not in content:
        detail = f'bundle.json must say "format": "{FORMAT}" and list sequences'
        raise InputError(f"{directory} is not a bundle", detail=detail)
    if content.get("version") != VERSION:
        found = content.get("version")
        raise InputError(f"bundle {directory} has format version {found}, this rpadiag reads {VERSION}")
    if content.get("status") != "complete":
        raise InputError(
            f"bundle {directory} is not complete: its status is {content.get('status')}",
            hint="its writer was killed or failed; capture again into a new directory",
        )
    try:
        return Bundle(directory, content)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"bundle.json of {directory} is malformed: {error!r}") from error


_Keys = dict[str, tuple[str, int, list[_Segment]]]


def _native_keys(path: Path) -> _Keys:
    index_path = path.with_suffix(".json")
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        names = [(str(name), str(dtype), int(width)) for name, dtype, width in index["keys"]]
        columns = index["segments"]
        keys: _Keys = {name: (dtype, width, []) for name, dtype, width in names}
        end = 0
        for key, row, rows, offset in zip(*(columns[c] for c in ("key", "row", "rows", "offset")), strict=True):
            name, dtype, width = names[key]
            keys[name][2].append(_Segment(row=row, rows=rows, offset=offset))
            end = max(end, offset + rows * width * np.dtype(ELEMENTS[dtype]).itemsize)
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"cannot read {index_path}", detail=repr(error)) from error
    if path.stat().st_size < end:
        raise InputError(f"{path} is truncated: {path.stat().st_size} bytes, its index names {end}")
    return keys


def _foreign_keys(path: Path) -> _Keys:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            names = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {path}", detail=str(error)) from error
    known = {POSITIONS, *(f"scores.{name}" for name in SCORES)}
    for name in names:
        if name not in known:
            split_site(name)
    return {name: ("", 0, []) for name in names}


def _in_execution_order(keys: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(in_execution_order(k for k in keys if k != POSITIONS and not k.startswith("scores.")))


def _assemble(path: Path, key: str, dtype: str, width: int, segments: list[_Segment]) -> torch.Tensor:
    import torch

    rows = max(s.row + s.rows for s in segments)
    if sum(s.rows for s in segments) != rows:
        raise InputError(f"{key} of {path} is missing rows: {sum(s.rows for s in segments)} of {rows} are there")
    element = np.dtype(ELEMENTS[dtype])
    array: npt.NDArray[Any]
    if rows * width == 0:
        array = np.empty((rows, width), element)
    elif len(segments) == 1:
        # mode "c": pages come from the file, and writing to the tensor leaves the file as it is
        array = np.memmap(path, dtype=element, mode="c", offset=segments[0].offset, shape=(rows, width))
    else:
        array = np.empty((rows, width), element)
        with path.open("rb", buffering=0) as file:
            for segment in segments:
                file.seek(segment.offset)
                view = array[segment.row : segment.row + segment.rows]
                if file.readinto(view.data.cast("B")) != view.nbytes:
                    raise InputError(f"{path} ended inside {key}")
    return torch.from_numpy(array).view(getattr(torch, dtype))
