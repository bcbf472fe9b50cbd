"""Prompt files: what is read, and the error for each way a file can be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpadiag.errors import InputError
from rpadiag.prompts import Prompt, Tokenizer, check_prompt_file, load_prompts

VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[[str], Path]) -> Tokenizer:
    from transformers import AutoTokenizer

    loaded: Tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    return loaded


@pytest.fixture
def load(tokenizer: Tokenizer) -> Callable[..., list[Prompt]]:
    def loader(path: Path, **limits: Any) -> list[Prompt]:
        return load_prompts(path, lambda: tokenizer, **{"vocab_size": VOCAB, "max_positions": 128} | limits)

    return loader


def no_tokenizer() -> Tokenizer:
    raise AssertionError("a file of token ids must not need a tokenizer")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(path: Path, *values: Any) -> Path:
    return write(path, "".join(json.dumps(v) + "\n" for v in values))


def message_of(function: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as caught:
        function()
    return str(caught.value)


def test_text_file_has_one_prompt_per_line_exactly_as_it_stands(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    prompts = load(write(tmp_path / "p.txt", "The quick brown fox\n  two spaces before \n"))
    assert [p.text for p in prompts] == ["The quick brown fox", "  two spaces before "]
    assert [p.index for p in prompts] == [0, 1]
    assert prompts[1].token_ids == tuple(tokenizer("  two spaces before ")["input_ids"])
    assert prompts[1].origin.endswith("p.txt:2")


def test_byte_order_mark_and_crlf_do_not_reach_the_tokens(tmp_path: Path, load: Any) -> None:
    plain = load(write(tmp_path / "a.txt", "The lazy dog\nthe hills\n"))
    windows = load(write(tmp_path / "b.txt", b"\xef\xbb\xbfThe lazy dog\r\nthe hills\r\n"))
    assert [p.token_ids for p in plain] == [p.token_ids for p in windows]


def test_last_line_needs_no_newline(tmp_path: Path, load: Any) -> None:
    assert len(load(write(tmp_path / "p.txt", "The lazy dog\nthe hills"))) == 2


def test_only_newline_ends_a_line(tmp_path: Path, load: Any) -> None:
    text = "one\u2028line\x0cof text\x85here"
    assert [p.text for p in load(write(tmp_path / "p.txt", text + "\n"))] == [text]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("blank", ["\n", "   \n", "\r\n"])
def test_blank_line_is_an_error_that_names_it(tmp_path: Path, suffix: str, blank: str) -> None:
    line = '{"prompt": "a fox"}\n' if suffix == "jsonl" else "a fox\n"
    path = write(tmp_path / f"p.{suffix}", line + blank + line)
    assert f"p.{suffix}:2: blank line" in message_of(lambda: check_prompt_file(path))


def test_trailing_blank_line_is_an_error_too(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", "a fox\n\n")
    assert "p.txt:2: blank line" in message_of(lambda: check_prompt_file(path))


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_empty_file_is_an_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = write(tmp_path / f"p.{suffix}", content)
    assert "has no prompts" in message_of(lambda: check_prompt_file(path))


def test_bytes_that_are_not_utf8_are_an_error_that_names_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", b"fine\nna\xefve\n")
    message = message_of(lambda: check_prompt_file(path))
    assert "p.txt:2: not UTF-8" in message and "0xef at byte 3" in message


def test_utf16_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", "a fox\n".encode("utf-16"))
    message = message_of(lambda: check_prompt_file(path))
    assert "is UTF-16" in message and "iconv" in message


def test_nul_byte_in_a_text_file_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", b"a fox\nbin\x00ary\n")
    assert "p.txt:2: contains a NUL byte" in message_of(lambda: check_prompt_file(path))


@pytest.mark.parametrize(("name", "why"), [("p.csv", "unknown format"), ("p", "unknown format"), ("no.txt", "exist")])
def test_file_of_another_kind_or_none_is_an_error(tmp_path: Path, name: str, why: str) -> None:
    if name != "no.txt":
        write(tmp_path / name, "a fox\n")
    assert why in message_of(lambda: check_prompt_file(tmp_path / name))


@pytest.mark.parametrize("name", ["d.txt", "d.parquet"])
def test_directory_in_place_of_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert "is a directory" in message_of(lambda: check_prompt_file(tmp_path / name))


def test_jsonl_takes_prompt_messages_and_token_ids(tmp_path: Path, load: Any, tokenizer: Any) -> None:
    talk = [{"role": "user", "content": "What is the capital of France?"}]
    path = rows(tmp_path / "p.jsonl", {"prompt": "a fox", "id": 7}, {"messages": talk}, {"token_ids": [5, 0, 511]})
    text, chat, ids = load(path)
    assert text.token_ids == tuple(tokenizer("a fox")["input_ids"])
    expected = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert chat.text == expected and expected.endswith("<|im_start|>assistant\n")
    assert chat.token_ids == tuple(tokenizer(expected, add_special_tokens=False)["input_ids"])
    assert ids.token_ids == (5, 0, 511) and ids.text == ""


def test_conversation_that_ends_with_the_assistant_gets_no_generation_prompt(tmp_path: Path, load: Any) -> None:
    talk = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    (prompt,) = load(rows(tmp_path / "p.jsonl", {"messages": talk}))
    assert prompt.text.endswith("<|im_start|>assistant\n2<|im_end|>\n")


def test_file_of_token_ids_needs_no_tokenizer(tmp_path: Path) -> None:
    path = rows(tmp_path / "p.jsonl", {"token_ids": [1, 2, 3]})
    assert load_prompts(path, no_tokenizer, vocab_size=VOCAB, max_positions=8)[0].token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a fox"', "not valid JSON"),
        ("a fox", "not valid JSON"),
        ('["a fox"]', "a JSON array, not an object"),
        ('"a fox"', "a JSON string, not an object"),
        ("null", "a JSON null, not an object"),
        ("{}", "needs exactly one of prompt, messages, token_ids"),
        ('{"text": "a fox"}', "its keys: text"),
        ('{"prompt": "a", "token_ids": [1, 2]}', "it has prompt and token_ids"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": 3}', "prompt is a number, not a string"),
        ('{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        ('{"messages": []}', "messages is not a list with at least one message"),
        ('{"messages": "hello"}', "messages is not a list"),
        ('{"messages": [{"content": "hello"}]}', "message 1 is not an object with role and content"),
        ('{"messages": [{"role": "user"}]}', "message 1 is not an object with role and content"),
        ('{"token_ids": []}', "token_ids is empty"),
        ('{"token_ids": "1 2 3"}', "token_ids is a string, not an array"),
        ('{"token_ids": [1, 2.0]}', "token_ids[1] is 2.0, not an integer"),
        ('{"token_ids": [true, 1]}', "token_ids[0] is True, not an integer"),
        ('{"token_ids": [1, null]}', "token_ids[1] is None, not an integer"),
        ("[" * 100_000, "JSON that cannot be read"),
        ('{"token_ids": [' + "9" * 5000 + "]}", "JSON that cannot be read"),
    ],
)
def test_broken_line_is_an_error_that_names_file_line_and_reason(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "a fox"}\n' + line + "\n")
    message = message_of(lambda: check_prompt_file(path))
    assert message.startswith(f"{path}:2: ") and why in message


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_token_id_outside_the_vocabulary_is_an_error(tmp_path: Path, load: Any, token: int) -> None:
    path = rows(tmp_path / "p.jsonl", {"token_ids": [1, token]})
    message = message_of(lambda: load(path))
    assert f"p.jsonl:1: token id {token} at position 1 is outside the vocabulary" in message
    assert "512 rows, 0 to 511" in message


def test_prompt_longer_than_the_model_takes_is_an_error_with_the_way_out(tmp_path: Path, load: Any) -> None:
    path = rows(tmp_path / "p.jsonl", {"token_ids": [1, 2]}, {"token_ids": [7] * 129})
    message = message_of(lambda: load(path))
    assert "p.jsonl:2: 129 tokens, longer than the model takes" in message and "--max-tokens 128" in message
    assert "--max-tokens 120" in message_of(lambda: load(path, reserve=8))


def test_max_tokens_keeps_the_first_tokens_and_says_so(tmp_path: Path, load: Any) -> None:
    path = rows(tmp_path / "p.jsonl", {"token_ids": list(range(200))}, {"token_ids": [1, 2, 3]})
    long, short = load(path, max_tokens=16)
    assert long.token_ids == tuple(range(16)) and long.truncated_from == 200
    assert short.token_ids == (1, 2, 3) and short.truncated_from is None


def test_single_token_has_no_logprob_unless_tokens_are_generated(tmp_path: Path, load: Any) -> None:
    path = rows(tmp_path / "p.jsonl", {"token_ids": [1]})
    assert "1 token, at least 2 needed" in message_of(lambda: load(path))
    assert load(path, min_tokens=1)[0].token_ids == (1,)


def test_messages_without_a_chat_template_are_an_error(tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(tiny("llama"))
    bare.chat_template = None
    path = rows(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "hello"}]})
    message = message_of(lambda: load_prompts(path, lambda: bare, vocab_size=VOCAB, max_positions=128))
    assert "p.jsonl:1: messages need a chat template" in message


def test_template_that_refuses_the_turns_is_an_error_with_its_words(
    tmp_path: Path, tiny: Callable[[str], Path]
) -> None:
    from transformers import AutoTokenizer

    strict = AutoTokenizer.from_pretrained(tiny("llama"))
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = rows(tmp_path / "p.jsonl", {"messages": [{"role": "user", "content": "hello"}]})
    message = message_of(lambda: load_prompts(path, lambda: strict, vocab_size=VOCAB, max_positions=128))
    assert "p.jsonl:1: the model's chat template refuses" in message and "roles must alternate" in message


def test_parquet_gives_the_prompts_of_the_same_jsonl(tmp_path: Path, load: Any) -> None:
    values: list[dict[str, Any]] = [
        {"prompt": "a fox"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"token_ids": [1, 2, 3]},
    ]
    columns = {kind: [v.get(kind) for v in values] for kind in ("prompt", "messages", "token_ids")}
    pq.write_table(pa.table(columns | {"source": ["a", "b", "c"]}), tmp_path / "p.parquet")
    from_parquet = load(tmp_path / "p.parquet")
    from_jsonl = load(rows(tmp_path / "p.jsonl", *values))
    assert [(p.text, p.token_ids) for p in from_parquet] == [(p.text, p.token_ids) for p in from_jsonl]


def test_parquet_row_at_fault_is_named_from_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a fox"] * 2000 + [None]}), tmp_path / "p.parquet")
    assert "p.parquet:row 2001: needs exactly one of" in message_of(lambda: check_prompt_file(tmp_path / "p.parquet"))


def test_parquet_without_a_known_column_lists_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a fox"]}), tmp_path / "p.parquet")
    message = message_of(lambda: check_prompt_file(tmp_path / "p.parquet"))
    assert "no column that is one of prompt, messages, token_ids" in message and "its columns: text" in message


@pytest.mark.parametrize("content", [b"", b"not parquet at all", b"PAR1" + b"\x00" * 64 + b"PAR1"])
def test_broken_parquet_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "p.parquet", content)
    assert "not a readable Parquet file" in message_of(lambda: check_prompt_file(path))


def test_parquet_without_rows_has_no_prompts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "p.parquet")
    assert "has no prompts" in message_of(lambda: check_prompt_file(tmp_path / "p.parquet"))


def test_demo_prompts_are_eight_texts_that_load(tokenizer: Tokenizer) -> None:
    from importlib.resources import as_file, files

    with as_file(files("rpadiag") / "data" / "demo_prompts.jsonl") as path:
        prompts = load_prompts(path, lambda: tokenizer, vocab_size=VOCAB, max_positions=4096)
    assert len(prompts) == 8


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\x00"), min_size=1), min_size=1, max_size=5))
def test_any_text_survives_the_text_format(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    kept = [t for t in texts if t.strip() and not t.endswith("\r") and not t.startswith("\ufeff")]
    if not kept:
        return
    path = write(tmp_path_factory.mktemp("any") / "p.txt", "\n".join(kept) + "\n")

    class Characters:
        chat_template = None

        def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

        def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
            raise NotImplementedError

    loaded = load_prompts(path, Characters, vocab_size=0x110000, max_positions=10**6, min_tokens=1)
    assert ["".join(map(chr, p.token_ids)) for p in loaded] == kept


@given(st.binary(max_size=200))
def test_any_bytes_give_prompts_or_an_input_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for suffix in ("txt", "jsonl", "parquet"):
        path = write(tmp_path_factory.mktemp("bytes") / f"p.{suffix}", content)
        try:
            assert check_prompt_file(path) > 0
        except InputError as error:
            assert str(path) in error.message  # noqa: PT017 (either outcome is right)
