"""Prompts with one needle: a key and its value at a chosen depth, and the key again at the end.

A prompt has exactly the length asked for, <|bos|> and question included; the answer comes after
it. Equal seeds give equal prompts.
"""

from typing import NamedTuple, Protocol

import numpy as np

from k3jax.data.corpus import encode_documents
from k3jax.data.pipeline import SPECIAL_IDS
from k3jax.data.text import read_documents
from k3jax.data.tokenizer import Tokenizer

# A question is the beginning of the needle, so what answers it follows it once in the prompt.
BEGINNING, END = "\nThe code of {key} is ", ".\n"
DIGITS = 4
SYLLABLE = ("bdfgklmnprstvz", "aeiou")  # a name is three of them: about 340,000 names


class Case(NamedTuple):
    """One trial.

    Attributes:
      prompt: int32 [length].
      answer: int32 [A], the tokens that must follow.
      needle: First token of the needle in the prompt.
    """

    prompt: np.ndarray
    answer: np.ndarray
    needle: int


class Haystack(Protocol):
    """Makes cases."""

    def case(self, length: int, depth: float, draw: np.random.Generator) -> Case:
        """A prompt of `length` tokens with the needle behind the share `depth` of the filling."""


class TextHaystack:
    """Filling from real text; the needle is a sentence with a made-up name and four digits."""

    def __init__(self, tokenizer: Tokenizer, source: str):
        """Reads the text.

        Args:
          tokenizer: Of the model.
          source: "stdlib", a file, a directory or a glob.
        """
        self._tokenizer = tokenizer
        documents, _ = read_documents(source, setting="data")
        self._text = encode_documents(documents, tokenizer).tokens

    def case(self, length: int, depth: float, draw: np.random.Generator) -> Case:
        """See `Haystack`; the filling is a piece of the text from a random place.

        The text starts again where it ends, and a document follows another one without a mark.

        Raises:
          ValueError: `length` does not hold needle and question.
        """
        key = "".join(draw.choice(list(letters)) for letters in SYLLABLE * 3)
        number = str(draw.integers(10 ** (DIGITS - 1), 10**DIGITS))
        parts = (BEGINNING.format(key=key), number, END)
        question, answer, end = self._tokenizer.encode_batch(parts)
        needle = np.concatenate([question, answer, end])
        filling = length - 1 - len(needle) - len(question)
        if filling < 0:
            raise ValueError(
                f"needle_lengths={length}: <|bos|>, needle and question are "
                f"{length - filling} tokens; give at least that"
            )
        start = draw.integers(len(self._text))
        hay = np.take(self._text, np.arange(start, start + filling), mode="wrap")
        before = round(depth * filling)
        bos = [self._tokenizer.bos_id]
        prompt = np.concatenate([bos, hay[:before], needle, hay[before:], question])
        return Case(prompt.astype(np.int32), answer, 1 + before)


class RecallHaystack:
    """Pairs of ids in the format of the recall task, for a model without a tokenizer.

    `<|bos|> k v k v ... k`: the needle's pair stands once, the others repeat the same few pairs.
    """

    def __init__(self, vocab: int, keys: int):
        """Checks the sizes.

        Args:
          vocab: Ids, the three special ones included; keys and values are its two halves.
          keys: Different keys in a prompt, the needle's included.

        Raises:
          ValueError: there are not so many keys.
        """
        self._first, self._keys = len(SPECIAL_IDS), keys
        self._half = (vocab - self._first) // 2
        if not 2 <= keys <= self._half:
            raise ValueError(
                f"needle_keys={keys}: must lie in [2, {self._half}], the keys of a vocabulary of "
                f"{vocab}; change it"
            )

    def case(self, length: int, depth: float, draw: np.random.Generator) -> Case:
        """See `Haystack`; depth counts pairs.

        Raises:
          ValueError: `length` is odd, or less than 4.
        """
        if length < 4 or length % 2:
            raise ValueError(
                f"needle_lengths={length}: <|bos|>, pairs and the question's key are an even "
                "number of tokens, at least 4; give such a length"
            )
        pairs = length // 2 - 1
        keys = self._first + draw.permutation(self._half)[: self._keys]
        values = self._first + self._half + draw.integers(0, self._half, self._keys)
        # As in training: every other pair once, then any of them again.
        others = np.arange(1, self._keys)[: pairs - 1]
        again = draw.integers(1, self._keys, pairs - 1 - len(others))
        before = round(depth * (pairs - 1))
        which = np.insert(np.concatenate([others, again]), before, 0)
        body = np.stack([keys[which], values[which]], axis=1).ravel()
        prompt = np.concatenate([[SPECIAL_IDS[1]], body, keys[:1]])
        return Case(prompt.astype(np.int32), values[:1].astype(np.int32), 1 + 2 * before)
