"""Prompt files: .txt, .jsonl and .parquet to token ids, with errors that name the line.

============  =====================================================================================
``.txt``      one prompt per line, exactly as it stands (leading and trailing spaces are tokens too)
``.jsonl``    one object per line with one of ``prompt`` (text), ``messages`` (through the model's chat
              template) or ``token_ids``; other keys are ignored
``.parquet``  the same three as columns, one of them set per row
============  =====================================================================================

Files are UTF-8; a byte order mark and CRLF line ends are accepted. A blank line is an error: skipping it
would move the index of every later prompt, and a prompt that contains newlines belongs in .jsonl.

``prompt`` gets the special tokens that the tokenizer adds by default, as vLLM does; ``messages`` gets those
of its template only, and the template's generation prompt unless the last message is the assistant's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rpadiag.errors import InputError

FORMATS = (".txt", ".jsonl", ".parquet")
KINDS = ("prompt", "messages", "token_ids")
_ONE_OBJECT = f"each line is one object with one of {', '.join(KINDS)}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that prompts need."""

    chat_template: Any

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt as both stacks receive it.

    text:           as given, or as the chat template renders it; empty for ``token_ids``.
    origin:         where it came from, ``prompts.jsonl:3``.
    truncated_from: number of tokens before ``max_tokens`` cut it; None when it was not cut.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origin: str
    truncated_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Entry:
    origin: str
    kind: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class _Limits:
    max_tokens: int | None
    min_tokens: int
    vocab_size: int
    max_positions: int
    reserve: int


def check_prompt_file(path: Path | str) -> int:
    """Read a prompt file without a tokenizer and return its number of prompts: broken files fail before the long work."""
    entries = list(_entries(Path(path)))
    if not entries:
        raise InputError(f"prompt file {path} has no prompts", hint="it needs at least one line or row")
    return len(entries)


def load_prompts(
    path: Path | str,
    tokenizer_factory: Callable[[], Tokenizer],
    *,
    max_tokens: int | None = None,
    vocab_size: int,
    max_positions: int,
    reserve: int = 0,
    min_tokens: int = 2,
) -> list[Prompt]:
    """Read and tokenize a prompt file; any prompt at fault is an ``InputError`` that names its line.

    tokenizer_factory: called at most once, and never when every prompt is ``token_ids``.
    max_tokens:    keep the first N tokens of each prompt; None keeps all.
    vocab_size:    rows of the embedding; an id outside is an error.
    max_positions: longest sequence of the model, of which ``reserve`` are kept for generated tokens.
    min_tokens:    shortest prompt; 2, because one token has no logprob, or 1 when tokens are generated.
    """
    path = Path(path)
    limits = _Limits(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        vocab_size=vocab_size,
        max_positions=max_positions,
        reserve=reserve,
    )
    entries = list(_entries(path))
    if not entries:
        raise InputError(f"prompt file {path} has no prompts", hint="it needs at least one line or row")
    tokenizer: Tokenizer | None = None
    prompts: list[Prompt] = []
    for index, entry in enumerate(entries):
        if entry.kind != "token_ids" and tokenizer is None:
            tokenizer = tokenizer_factory()
        text, ids = _tokenize(entry, tokenizer)
        prompts.append(_fit(index, entry.origin, text, ids, limits))
    return prompts


def _entries(path: Path) -> Iterator[_Entry]:
    if path.suffix not in FORMATS:
        raise InputError(
            f"prompt file {path} has an unknown format",
            detail=f"its name ends in {path.suffix or 'nothing'}; known: {', '.join(FORMATS)}",
            hint="text has one prompt per line; see rpadiag compare --help",
        )
    if path.is_dir():
        raise InputError(f"prompt file {path} is a directory")
    if path.suffix == ".parquet":
        return _parquet_entries(path)
    return _text_entries(path) if path.suffix == ".txt" else _jsonl_entries(path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(origin, line) without line ends. Only newline ends a line: U+2028 and form feeds are text."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"prompt file {path} does not exist") from None
    except OSError as error:
        raise InputError(f"prompt file {path} cannot be read", detail=str(error)) from error
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(
            f"prompt file {path} is UTF-16", hint=f"iconv -f UTF-16 -t UTF-8 {path} > prompts-utf8{path.suffix}"
        )
    lines = raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] in (b"", b"\r"):
        lines.pop()
    for number, line in enumerate(lines, start=1):
        origin = f"{path}:{number}"
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{origin}: not UTF-8",
                detail=f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line",
                hint="convert the file to UTF-8 with iconv",
            ) from None
        if not text.strip():
            raise InputError(
                f"{origin}: blank line",
                detail="skipping it would move the index of every later prompt",
                hint="remove the line; a prompt that contains newlines belongs in a .jsonl file",
            )
        yield origin, text


def _text_entries(path: Path) -> Iterator[_Entry]:
    for origin, line in _lines(path):
        if "\x00" in line:
            raise InputError(f"{origin}: contains a NUL byte", hint="is this a text file?")
        yield _Entry(origin=origin, kind="prompt", value=line)


def _jsonl_entries(path: Path) -> Iterator[_Entry]:
    for origin, line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{origin}: not valid JSON", detail=f"column {error.colno}: {error.msg}", hint=_ONE_OBJECT
            ) from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits; brackets 1,000 deep
            raise InputError(f"{origin}: JSON that cannot be read", detail=str(error), hint=_ONE_OBJECT) from None
        if not isinstance(row, dict):
            raise InputError(f"{origin}: a JSON {_json_type(row)}, not an object", hint=_ONE_OBJECT)
        yield _entry(origin, row)


def _parquet_entries(path: Path) -> Iterator[_Entry]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    if not path.exists():
        raise InputError(f"prompt file {path} does not exist")
    try:
        with ParquetFile(path) as file:
            columns = [name for name in KINDS if name in file.schema_arrow.names]
            if not columns:
                raise InputError(
                    f"prompt file {path} has no column that is one of {', '.join(KINDS)}",
                    detail=f"its columns: {', '.join(file.schema_arrow.names) or 'none'}",
                )
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield _entry(f"{path}:row {number}", row)
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"prompt file {path} is not a readable Parquet file", detail=reason) from error


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _entry(origin: str, row: Mapping[str, Any]) -> _Entry:
    given = [kind for kind in KINDS if row.get(kind) is not None]
    if len(given) != 1:
        found = f"it has {' and '.join(given)}" if given else f"its keys: {', '.join(map(str, row)) or 'none'}"
        raise InputError(f"{origin}: needs exactly one of {', '.join(KINDS)}", detail=found)
    kind = given[0]
    value = row[kind]
    check = {"prompt": _check_text, "messages": _check_messages, "token_ids": _check_ids}[kind]
    check(origin, value)
    return _Entry(origin=origin, kind=kind, value=value)


def _check_text(origin: str, value: Any, what: str = "prompt") -> None:
    if not isinstance(value, str):
        raise InputError(f"{origin}: {what} is a {_json_type(value)}, not a string")
    if not value:
        raise InputError(f"{origin}: {what} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{origin}: {what} has half of a surrogate pair", detail=f"at character {error.start + 1}"
        ) from None


def _check_messages(origin: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise InputError(f"{origin}: messages is not a list with at least one message")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"{origin}: message {number} is not an object with role and content")
        if not isinstance(message["content"], str | list | None):
            raise InputError(
                f"{origin}: content of message {number} is a {_json_type(message['content'])}, not a string"
            )
        if isinstance(message["content"], str) and message["content"]:
            _check_text(origin, message["content"], f"content of message {number}")


def _check_ids(origin: str, value: Any) -> None:
    if not isinstance(value, list):
        raise InputError(f"{origin}: token_ids is a {_json_type(value)}, not an array")
    if not value:
        raise InputError(f"{origin}: token_ids is empty")
    for position, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InputError(f"{origin}: token_ids[{position}] is {token!r}, not an integer")


def _tokenize(entry: _Entry, tokenizer: Tokenizer | None) -> tuple[str, Sequence[int]]:
    if entry.kind == "token_ids":
        return "", entry.value
    assert tokenizer is not None
    if entry.kind == "prompt":
        return entry.value, tokenizer(entry.value)["input_ids"]
    text = _render(entry, tokenizer)
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def _render(entry: _Entry, tokenizer: Tokenizer) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InputError(
            f"{entry.origin}: messages need a chat template and the model's tokenizer has none",
            hint="give the text as prompt, or use the instruct version of the model",
        )
    messages = entry.value
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:  # templates raise any of these on bad turns
        raise InputError(
            f"{entry.origin}: the model's chat template refuses these messages",
            detail=str(error) or type(error).__name__,
        ) from error
    return str(rendered)


def _fit(index: int, origin: str, text: str, ids: Sequence[int], limits: _Limits) -> Prompt:
    given = len(ids)
    if limits.max_tokens is not None:
        ids = ids[: limits.max_tokens]
    for position, token in enumerate(ids):
        if not 0 <= token < limits.vocab_size:
            raise InputError(
                f"{origin}: token id {token} at position {position} is outside the vocabulary",
                detail=f"the model's embedding has {limits.vocab_size} rows, 0 to {limits.vocab_size - 1}",
                hint="was this file made with another model's tokenizer?",
            )
    if len(ids) < limits.min_tokens:
        raise InputError(
            f"{origin}: {len(ids)} token{'' if len(ids) == 1 else 's'}, at least {limits.min_tokens} needed",
            detail="a logprob is that of a token given the ones before it; the first token has none",
            hint="use a longer prompt, or --generate N to score sampled tokens too",
        )
    room = limits.max_positions - limits.reserve
    if len(ids) > room:
        kept = f" minus {limits.reserve} for generated tokens" if limits.reserve else ""
        raise InputError(
            f"{origin}: {len(ids)} tokens, longer than the model takes",
            detail=f"the model's length is {limits.max_positions} positions{kept}",
            hint=f"--max-tokens {room} keeps the first {room} tokens of each prompt"
            if room >= limits.min_tokens
            else "generate fewer tokens",
        )
    return Prompt(
        index=index,
        text=text,
        token_ids=tuple(int(t) for t in ids),
        origin=origin,
        truncated_from=given if given > len(ids) else None,
    )
