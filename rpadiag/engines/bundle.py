"""Bundles: what one engine captured, on disk, so that two stacks never have to run at the same time or place.

A bundle is a directory with ``bundle.json`` and one file per sequence whose keys are site names; docs/bundle-format.md
says what is in them. Opening one and reading bit patterns needs neither torch nor safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rpadiag.engines.base import TokenScores, TokenSequence
from rpadiag.engines.bundle_files import POSITIONS, SCORES, Keys, read_keys, read_rows
from rpadiag.engines.bundle_writer import FORMAT, VERSION, BundleWriter, SequenceWriter
from rpadiag.errors import CaptureError, InputError
from rpadiag.sites import in_execution_order, split_site

if TYPE_CHECKING:
    import torch

__all__ = ["Bundle", "BundleCapture", "BundleWriter", "SequenceWriter", "open_bundle"]


class BundleCapture:
    """One sequence of a bundle, read one site at a time (a :class:`rpadiag.engines.base.Capture`)."""

    def __init__(self, path: Path, sequence: TokenSequence) -> None:
        self.path = path
        self.sequence = sequence
        self._keys: Keys = read_keys(path)
        self.sites: tuple[str, ...] = _sites(self._keys)

    @cached_property
    def positions(self) -> npt.NDArray[np.int64] | None:
        """int64 [T], None where the engine did not record them."""
        found = self.column(POSITIONS)
        return None if found is None else found.astype(np.int64)

    @property
    def scores(self) -> TokenScores | None:
        """Scores of tokens 1 .. T-1, None unless the bundle holds all four columns."""
        columns = {name: self.column(f"scores.{name}") for name in SCORES}
        given = {name: column.astype(SCORES[name]) for name, column in columns.items() if column is not None}
        return TokenScores(**given, positions=self.positions) if len(given) == len(SCORES) else None

    def column(self, key: str) -> npt.NDArray[Any] | None:
        """``positions`` [T] or one of the ``scores`` [T-1] as stored; None where it was not recorded."""
        if key not in self._keys:
            return None
        values = read_rows(self.path, key, self._keys[key]).reshape(-1)
        if key != POSITIONS and len(values) != len(self.sequence.token_ids) - 1:
            raise InputError(f"{self.path} does not hold one score for each token but the first")
        if key == POSITIONS and len(values) != len(self.sequence.token_ids):
            raise InputError(f"{self.path} holds {len(values)} positions for {len(self.sequence.token_ids)} tokens")
        return values

    def dtype(self, site: str) -> str:
        """Dtype of a captured site, by torch's name."""
        return self._keys[site].dtype

    def bits(self, site: str) -> npt.NDArray[Any]:
        """Rows [T, W] of a site as captured, bfloat16 as int16 bit patterns; one that was not captured raises CaptureError.

        Where a MiB or more of rows lies in one piece the array maps the file and costs no copy; it may be written to
        (the file stays as it is), and the mapping ends with the array.
        """
        if site not in self.sites:
            points = ", ".join(dict.fromkeys(s.rsplit(".", 1)[-1] for s in self.sites))
            raise CaptureError(
                f"site {site} is not in {self.path}",
                detail=f"{len(self.sites)} sites are, of the points {points or 'none'}",
                hint="capture it: name it with --sites, or leave --sites out to capture every site",
            )
        rows = read_rows(self.path, site, self._keys[site])
        expected = len(self.sequence.token_ids) - (1 if site == "logprob" else 0)
        if len(rows) != expected:
            raise InputError(f"site {site} of {self.path} has {len(rows)} rows, expected {expected}")
        return rows

    def read(self, site: str) -> torch.Tensor:
        """:meth:`bits` as a tensor [T, W] on the CPU in the captured dtype."""
        import torch

        return torch.from_numpy(self.bits(site)).view(getattr(torch, self.dtype(site)))


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

    def text(self, index: int) -> str | None:
        """The prompt of sequence ``index`` as text, None where it was not recorded."""
        found = self._entries[index].get("text")
        return None if found is None else str(found)

    def token_texts(self, index: int) -> list[str] | None:
        """The text of each token of sequence ``index``, None where it was not recorded."""
        found = self._entries[index].get("token_texts")
        return None if found is None else [str(text) for text in found]

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


def _sites(keys: Keys) -> tuple[str, ...]:
    known = {POSITIONS, *(f"scores.{name}" for name in SCORES)}
    sites = [key for key in keys if key not in known]
    for site in sites:
        split_site(site)  # an unknown name is an error that lists the known ones
    return tuple(in_execution_order(sites))
