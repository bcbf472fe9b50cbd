"""Arithmetic with a reward that a program checks: the sum of a list of numbers, written out one addition at a time.

For the models made here, one token a character::

    347+586+912=          prompt: always as long, so that no prompt is padded
    586+347=933;933+912=1845;#1845

Which term comes next is free: the text that a model is pretrained on takes the terms in random order, so a right completion is one
of many, and sampling has entropy. For a model with a tokenizer of its own the same sums stand in plain words behind worked examples.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+=;#"
PAD, END = "<pad>", "<end>"
VOCAB_SIZE = 64  # ids above the characters are never seen in training; a multiple of 64, so that no engine pads it
SPARE_TOKENS = 6  # a completion may be this much longer than the longest right one


@dataclass(frozen=True, kw_only=True)
class Task:
    """Sums of ``terms`` numbers of exactly ``digits`` digits. words: in plain words, for a tokenizer of its own."""

    terms: int
    digits: int
    words: bool = False

    def max_completion_tokens(self) -> int:
        """Longest right completion in tokens (plain words: as a tokenizer with one token a digit writes it), and some spare."""
        longest = self.digits + len(str(self.terms))
        step = 2 * longest + self.digits + 3
        return (self.terms - 1) * (step + (3 if self.words else 0)) + longest + 2 + SPARE_TOKENS


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One list of numbers and its sum."""

    numbers: tuple[int, ...]

    @property
    def answer(self) -> int:
        return sum(self.numbers)

    def prompt(self, words: bool = False) -> str:
        if not words:
            return "+".join(map(str, self.numbers)) + "="
        worked = "".join(WORKED[len(self.numbers)])
        return f"Add step by step.\n{worked}" + " + ".join(map(str, self.numbers)) + ":"

    def solution(self, rng: random.Random) -> str:
        """A right completion, the terms taken in the order that ``rng`` gives."""
        order = list(self.numbers)
        rng.shuffle(order)
        total, text = order[0], ""
        for term in order[1:]:
            text += f"{total}+{term}={total + term};"
            total += term
        return f"{text}#{total}"


# Examples in plain words, by number of terms.
WORKED = {
    2: ("3 + 5: 3 + 5 = 8. Answer: 8\n", "9 + 4: 9 + 4 = 13. Answer: 13\n", "7 + 7: 7 + 7 = 14. Answer: 14\n", "2 + 6: 2 + 6 = 8. Answer: 8\n"),
    3: ("3 + 5 + 2: 3 + 5 = 8, 8 + 2 = 10. Answer: 10\n", "9 + 4 + 3: 9 + 4 = 13, 13 + 3 = 16. Answer: 16\n", "7 + 7 + 8: 7 + 7 = 14, 14 + 8 = 22. Answer: 22\n"),
}  # fmt: skip


def problems(task: Task, num: int, *, seed: int) -> list[Problem]:
    """``num`` problems that depend on the task and the seed alone."""
    rng = random.Random(f"problems {task.terms} {task.digits} {seed}")
    low, high = (1 if task.digits == 1 else 10 ** (task.digits - 1)), 10**task.digits - 1
    return [Problem(numbers=tuple(rng.randint(low, high) for _ in range(task.terms))) for _ in range(num)]


def is_right(completion: str, answer: int, *, words: bool = False) -> bool:
    """Whether the completion ends in the answer: after its one ``#``, or after the first ``Answer:`` of its first line."""
    if words:
        _, found, rest = completion.split("\n")[0].partition("Answer:")
        return bool(found) and rest.strip().rstrip(".") == str(answer)
    head, found, rest = completion.partition("#")
    return bool(found) and bool(head) and rest == str(answer)


def rewards(completions: Sequence[str], answer: Sequence[int], words: Sequence[bool], **_: Any) -> list[float]:
    """What TRL calls a reward function: 1 for the right sum, 0 for any other text."""
    return [float(is_right(c, a, words=w)) for c, a, w in zip(completions, answer, words, strict=True)]


def save_tokenizer(directory: Path) -> None:
    """One token a character, as a tokenizer that transformers and vLLM load."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((PAD, END, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    wrapped.save_pretrained(directory)


def encode(text: str) -> list[int]:
    """Token ids of a text of CHARACTERS, as the saved tokenizer gives them."""
    return [2 + CHARACTERS.index(c) for c in text]


def decode(ids: Sequence[int]) -> str:
    """The text that token ids stand for; a question mark for an id that no character has."""
    return "".join(CHARACTERS[i - 2] if 2 <= i < 2 + len(CHARACTERS) else "?" for i in ids)


PAD_ID, END_ID = 0, 1
