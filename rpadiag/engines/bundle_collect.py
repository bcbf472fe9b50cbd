"""A bundle that grows by whole sequences: what ``rpadiag capture`` writes, and goes on with after it was interrupted.

While it grows, ``bundle.json`` says ``writing`` and ``finished.jsonl`` has one line per finished sequence, so that a
killed process loses the sequence it was at and no other. Finished sequences are plain safetensors files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from rpadiag.engines.bundle_files import SAFETENSORS, Key, read_keys
from rpadiag.engines.bundle_writer import BUNDLE, FORMAT, VERSION, disk_errors, write_bundle_json
from rpadiag.errors import InputError

FINISHED = "finished.jsonl"
SCRATCH = "scratch"
LOG = "vllm.log"  # the engine's, left where it failed
_COPY_BYTES = 8 << 20
_CODES = {dtype: code for code, dtype in SAFETENSORS.items()}


class BundleCollection:
    """The directory of a bundle that is being written; a context manager. Only :meth:`close` makes it complete.

    entries: what ``bundle.json`` will say of each finished sequence, by its number. effective: what was chosen for the user.
    """

    def __init__(self, directory: Path, meta: dict[str, Any], entries: dict[int, dict[str, Any]]) -> None:
        self.path = directory
        self.meta = meta
        self.entries = entries
        self.effective: dict[str, Any] = {}

    @classmethod
    def create(cls, directory: Path) -> BundleCollection:
        """Claim a new or empty directory, or one where nothing was finished. Raises InputError for one that holds anything else."""
        if directory.exists() and not (directory.is_dir() and _holds_nothing(directory)):
            raise InputError(
                f"bundle {directory} already exists",
                hint="write to another path, remove it, or add --resume to go on with an interrupted capture",
            )
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        found = cls(directory, {}, {})
        found._save("writing")
        return found

    @classmethod
    def reopen(cls, directory: Path) -> BundleCollection:
        """Go on with a bundle that was begun: its meta, and the sequences whose files are whole.

        Raises InputError for what is no bundle of ``rpadiag capture``, and for one that is complete.
        """
        try:
            content = json.loads((directory / BUNDLE).read_text(encoding="utf-8"))
            if content["format"] != FORMAT or content["version"] != VERSION:
                raise ValueError("its format is another")
            meta, status = dict(content["meta"]), content["status"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"cannot go on with {directory}: it is not a bundle", detail=repr(error)) from error
        if status == "complete":
            raise InputError(f"bundle {directory} is complete already", hint="capture into another directory")
        entries: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (directory / FINISHED).read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, KeyError, OSError):  # the line that a kill cut short
                    entry = json.loads(line)
                    if (directory / entry["file"]).stat().st_size == entry["num_bytes"]:
                        entries[int(entry.pop("number"))] = entry
        shutil.rmtree(directory / SCRATCH, ignore_errors=True)
        return cls(directory, meta, entries)

    def set_effective(self, **values: Any) -> None:
        """Note what an option turned out to be where the user left it open."""
        self.effective.update(values)

    def set_meta(self, meta: Mapping[str, Any]) -> None:
        """Replace the meta and write it."""
        self.meta = dict(meta)
        self._save("writing")

    def scratch(self) -> Path:
        """Where sequences are captured before they are finished."""
        with disk_errors(self.path):
            (self.path / SCRATCH).mkdir(exist_ok=True)
        return self.path / SCRATCH

    def add(self, number: int, raw: Path, entry: Mapping[str, Any]) -> None:
        """Finish sequence ``number``: its keys, captured in ``raw``, become a safetensors file. ``entry``: its tokens and texts."""
        name = f"sequence-{number:05d}.safetensors"
        with disk_errors(self.path):
            num_bytes = write_safetensors(raw, self.path / name)
            done = {"file": name, "num_bytes": num_bytes, **entry}
            with (self.path / FINISHED).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"number": number, **done}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.entries[number] = done

    def close(self) -> None:
        """Mark the bundle complete."""
        self._save("complete")
        shutil.rmtree(self.path / SCRATCH, ignore_errors=True)
        (self.path / FINISHED).unlink(missing_ok=True)

    def _save(self, status: str) -> None:
        write_bundle_json(self.path, status, self.meta, self.entries if status == "complete" else {})

    def __enter__(self) -> BundleCollection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            shutil.rmtree(self.path / SCRATCH, ignore_errors=True)


def _holds_nothing(directory: Path) -> bool:
    """Whether a directory is empty, or was left by a capture that failed before its first sequence was finished."""
    names = {path.name for path in directory.iterdir()}
    if not names:
        return True
    try:
        status = json.loads((directory / BUNDLE).read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return status == "writing" and names <= {BUNDLE, SCRATCH, LOG}


def write_safetensors(source: Path, target: Path) -> int:
    """Copy a sequence's file of either layout into a safetensors file, a few MiB at a time; returns its size in bytes."""
    keys = read_keys(source)
    # widest elements first, as the format's own library does, so that each tensor starts on a multiple of its element
    order = sorted(keys, key=lambda name: (-keys[name].element.itemsize, name))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        key = keys[name]
        rows, begin = _whole(source, name, key), end
        end += rows * key.width * key.element.itemsize
        shape = [rows] if key.width == 1 and name.startswith(("scores.", "positions")) else [rows, key.width]
        header[name] = {"dtype": _CODES[key.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    part = target.with_suffix(".part")
    with source.open("rb") as given, part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            _copy_rows(given, file, keys[name])
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, target)
    return size


def _whole(source: Path, name: str, key: Key) -> int:
    try:
        return key.rows
    except ValueError as why:
        raise InputError(f"{name} of {source} {why}") from why


def _copy_rows(given: BinaryIO, file: BinaryIO, key: Key) -> None:
    for segment in sorted(key.segments, key=lambda s: s.row):
        given.seek(segment.offset)
        left = segment.rows * key.width * key.element.itemsize
        while left:
            piece = given.read(min(left, _COPY_BYTES))
            if not piece:
                raise InputError(f"{given.name} ended inside a segment")
            file.write(piece)
            left -= len(piece)


def num_bytes_of(lengths: Sequence[int], num_elements: int, itemsize: int) -> int:
    """Exact bytes of the tensors of sequences of ``lengths`` tokens: ``num_elements`` of all sites, positions and scores.

    Each token has the sites and an int64 position; each but the first of a sequence four scores of 4 bytes.
    """
    tokens = sum(lengths)
    return tokens * (num_elements * itemsize + 8) + (tokens - len(lengths)) * 16
