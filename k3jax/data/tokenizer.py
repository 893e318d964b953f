"""Byte-level BPE: any text becomes ids and comes back byte for byte.

Ids are laid out as special tokens 0..2, the 256 bytes 3..258, then merges in the order they were
learnt. A text is first cut by `PATTERN`, and merges never cross a cut. Special tokens are no part
of what the library matches, so a text that spells "<|eos|>" is encoded as those seven characters.
Without merges the ids are the bytes.

The pattern was chosen on the standard library's source. Validation bytes per token:

  vocabulary             2048  4096  8192
  pattern of GPT-2       3.10  3.48  3.78
  pattern of GPT-4       3.18  3.64  4.03
  this one               3.38  3.90  4.38

at bits per byte of a trigram model over the tokens that agree to 0.003 at 4096 (1.59; 1.58 at
8192, 1.62 at 2048). What helps is that a line's closing punctuation, its end and the indentation
of the next line are one piece. Patterns that let words cross blanks gave 4.1 bytes per token at
4096 and 0.07 bits per byte more.
"""

import codecs
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers

VERSION = 1
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")

# One letter class for words; marks stay with their letters.
_LETTER = r"\p{L}\p{M}"
PATTERN = "|".join(
    (
        rf"[^\s{_LETTER}\p{{N}}]*(?:\r?\n)+[ \t]*",  # "):", line end, next indentation
        rf"[^\r\n{_LETTER}\p{{N}}]?[{_LETTER}]+",  # a word with one leading blank, dot, ...
        r"\p{N}{1,3}",
        rf" ?[^\s{_LETTER}\p{{N}}]+",  # operators and brackets
        r"[^\S\r\n]+",  # blanks inside a line
        r"\s",  # a carriage return alone
    )
)


class Tokenizer:
    """Text to ids and back. Equal merges make equal tokenizers.

    Attributes:
      merges: learnt pairs, in order; each side is spelt in the library's byte alphabet.
      vocab_size: number of ids, special tokens included.
      pad_id: fills rows.
      bos_id: stands before each document.
      eos_id: stands behind each document.
    """

    pad_id, bos_id, eos_id = range(3)

    def __init__(self, merges: Iterable[tuple[str, str]]):
        self.merges = [(left, right) for left, right in merges]
        # The library never sees the special tokens; only the offset makes room for them.
        spellings = dict.fromkeys(_byte_alphabet())
        for left, right in self.merges:
            # Two merges may spell the same token; it keeps the first id.
            spellings.setdefault(left + right)
        first = len(SPECIAL_TOKENS)
        vocabulary = {spelling: first + index for index, spelling in enumerate(spellings)}
        self.vocab_size = first + len(vocabulary)
        self._library = _library(vocabulary, self.merges)
        byte_of = {character: bytes([b]) for b, character in enumerate(_byte_alphabet())}
        self._bytes = [b""] * first + [
            b"".join(byte_of[character] for character in spelling) for spelling in vocabulary
        ]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learns merges until `vocab_size` ids exist or no pair occurs twice. Deterministic.

        Raises:
          ValueError: `vocab_size` has no room for the special tokens and the 256 bytes.
        """
        least = len(SPECIAL_TOKENS) + 256
        if vocab_size < least:
            raise ValueError(
                f"vocab_size {vocab_size} must be at least {least}: every byte and special token "
                "has an id; raise it"
            )
        library = _library({}, [])
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            min_frequency=2,
            initial_alphabet=_byte_alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(texts, trainer)
        return cls(tuple(pair) for pair in json.loads(library.to_str())["model"]["merges"])

    def encode(self, text: str) -> np.ndarray:
        """Ids int32 [N] of `text`, no special ones.

        Raises:
          ValueError: `text` holds a lone surrogate, which has no UTF-8 form.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores.

        Raises:
          ValueError: a text holds a lone surrogate.
        """
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"character {error.start} is the lone surrogate {text[error.start]!r}: text "
                    "must be encodable as UTF-8; decode it with errors='replace'"
                ) from error
        if not self.merges:
            # Bytes need no library, which would take a hundred times as long.
            first = len(SPECIAL_TOKENS)
            return [
                first + np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts
            ]
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.int32) for item in encoded]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes behind `ids`; special tokens give none.

        Raises:
          ValueError: an id lies outside [0, vocab_size).
        """
        pieces = []
        for index in map(int, ids):
            if not 0 <= index < self.vocab_size:
                raise ValueError(
                    f"token id {index} lies outside [0, {self.vocab_size}); "
                    "decode with the tokenizer that the model was trained with"
                )
            pieces.append(self._bytes[index])
        return b"".join(pieces)

    def decode(self, ids: Iterable[int]) -> str:
        """The text behind `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """Bytes of each token: int32 [vocab_size], 0 for special tokens."""
        return np.array([len(token) for token in self._bytes], np.int32)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that decides the ids."""
        content = json.dumps([VERSION, PATTERN, SPECIAL_TOKENS, self.merges])
        return hashlib.sha256(content.encode()).hexdigest()

    def save(self, path: str | pathlib.Path) -> None:
        """Writes pattern and merges as JSON."""
        content = {"version": VERSION, "pattern": PATTERN, "merges": self.merges}
        pathlib.Path(path).write_text(json.dumps(content, indent=0), encoding="utf-8")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Reads what `save` wrote.

        Raises:
          ValueError: the file holds no tokenizer, or one with another pattern.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            same = (content["version"], content["pattern"]) == (VERSION, PATTERN)
            merges = content["merges"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no tokenizer file ({type(error).__name__}): it must be JSON written "
                "by Tokenizer.save; restore it, or delete it to train again"
            ) from error
        if not same:
            raise ValueError(
                f"{path} was written with another pattern or version than {VERSION}; "
                "use the code that wrote it, or delete it to train again"
            )
        return cls(merges)


class StreamDecoder:
    """Decodes ids as they arrive and holds back the bytes of an unfinished character.

    The pieces of any split, with `flush` at the end, join to `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain after `ids`, maybe empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """What is left; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


@functools.cache
def _byte_alphabet() -> list[str]:
    """One printable character per byte, the library's convention, in byte order.

    Printable Latin-1 bytes stand for themselves, the others for 256, 257, ... in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def _library(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    return library
