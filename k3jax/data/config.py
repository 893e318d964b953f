"""What text to train on, how to cut it up, and in what order it comes."""

import dataclasses
import os
import pathlib
from typing import Literal

from k3jax.data.records import Fields
from k3jax.data.sources import Source, parse

# 256 byte tokens and 3 special ones: the smallest vocabulary that can spell any text.
SMALLEST_VOCABULARY = 259


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Corpus, tokenizer, packing and order; the last two fields decide nothing about them.

    Attributes:
      source: "stdlib" (the Python files of this interpreter's standard library), a file, a
        directory (searched recursively, suffixes in `files.SUFFIXES`), a glob with `**` and
        `{a,b}`, a URL (`files.find`), or several of these with commas between. A local folder that
        happens to be called stdlib is written "./stdlib".
      sources: several named sources instead, "name=location" each, a location being what `source`
        may be: `--set=data.sources=code=stdlib,prose=texts`. A location with a comma is quoted
        together with its name: `"code=src/*.{py,pyi}"`.
      weights: share of the training rows of each source, "name=0.7"; they need not add up to 1.
        None given is by size. Shares hold at any time, to a few rows.
      epochs: "name=2" for sources that give no more rows after two passes. From then on the others
        share theirs, by weight; a run that outlasts every source is refused.
      text_field: field of a record that holds its text, in JSON lines (.jsonl, .jsonl.gz) and
        Parquet files. Each record is a document.
      group_field: field of a record whose value names a group, such as a conversation: all
        documents of a group in one source stay on one side of the split. "" for none.
      tokenizer: "bpe" learns merges from the training text of all sources; "bytes" has none, and
        its 259 ids are the bytes and the special tokens, whatever vocab_size says.
      vocab_size: upper bound of token ids: special tokens, bytes and merges. A small corpus may
        yield fewer merges; `Tokenizer.vocab_size` then is smaller, never larger.
      sequence_length: tokens in a training row.
      validation_fraction: share of the bytes that validation takes, as whole files. The default
        is about 0.6 MB of a standard library that has its tests.
      split_seed: which files are validation. Separate from `seed` so that bits per byte stay
        comparable between runs that differ only in `seed`. They differ much between splits (of
        six, gzip -9 gave 1.37 to 1.73 on the standard library); the default is a middling one of
        many files, the largest a sixth of it.
      min_document_bytes: shorter files are left out (empty `__init__.py` and the like).
      max_document_bytes: longer files are cut at line ends into several documents; all of them
        stay on one side of the split.
      dedup_threshold: files whose estimated Jaccard similarity with an earlier file reaches this
        are dropped. 1.0 drops only files equal up to white space.
      shuffle_rows: also shuffle the rows of an epoch, so that a long document does not fill whole
        batches. False keeps the rows in stream order.
      seed: order of documents and rows.
      prefetch: batches that a thread builds ahead of training; 0 builds each when it is needed.
        It changes no batch and no checkpoint.
      cache_dir: tokenizers, token arrays and duplicate lists, all named by content hash. "" is
        $XDG_CACHE_HOME/k3jax, or ~/.cache/k3jax.
    """

    source: str = "stdlib"
    sources: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()
    text_field: str = "text"
    group_field: str = ""
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    vocab_size: int = 4096
    sequence_length: int = 512
    validation_fraction: float = 0.02
    split_seed: int = 3
    min_document_bytes: int = 64
    max_document_bytes: int = 1 << 20
    dedup_threshold: float = 0.3
    shuffle_rows: bool = True
    seed: int = 0
    prefetch: int = 2
    cache_dir: str = ""

    def __post_init__(self):
        least, length = SMALLEST_VOCABULARY, self.max_document_bytes
        fraction, threshold = self.validation_fraction, self.dedup_threshold
        # Field, whether it holds, rule, way out.
        rules = (
            ("source", self.source != "", "must name a corpus", "use 'stdlib'"),
            (
                "source",
                self.source == "stdlib" or not self.sources,
                "is given beside data.sources",
                "name it there and set data.source=stdlib",
            ),
            (
                "tokenizer",
                self.tokenizer in ("bpe", "bytes"),
                "must be one of bpe, bytes",
                "use 'bpe'",
            ),
            ("text_field", self.text_field != "", "must name a field", "use 'text'"),
            (
                "vocab_size",
                self.vocab_size >= least,
                f"must be at least {least} (256 bytes and 3 special tokens)",
                "raise it, for example to 4096",
            ),
            ("sequence_length", self.sequence_length >= 2, "must be at least 2", "raise it"),
            (
                "validation_fraction",
                0.0 < fraction < 1.0,
                "must lie strictly between 0 and 1",
                "use 0.02 for 2 % of the bytes",
            ),
            ("max_document_bytes", length >= 1024, "must be at least 1024", "raise it"),
            (
                "min_document_bytes",
                0 <= self.min_document_bytes < length,
                f"must lie in [0, max_document_bytes={length})",
                "lower it or raise data.max_document_bytes",
            ),
            (
                "dedup_threshold",
                0.0 < threshold <= 1.0,
                "must lie in (0, 1]",
                "use 0.3, or 1.0 to drop only exact duplicates",
            ),
            ("prefetch", self.prefetch >= 0, "must be at least 0", "use 2"),
            ("seed", 0 <= self.seed < 2**63, "must lie in [0, 2**63)", "use 0"),
            ("split_seed", 0 <= self.split_seed < 2**63, "must lie in [0, 2**63)", "use 3"),
        )
        for field, holds, rule, way_out in rules:
            if not holds:
                raise ValueError(f"data.{field}={getattr(self, field)!r}: {rule}; {way_out}")
        parse(self.source, self.sources, self.weights, self.epochs)

    @property
    def named_sources(self) -> tuple[Source, ...]:
        """`sources` with weights and bounds, or the one `source` under the name ""."""
        return parse(self.source, self.sources, self.weights, self.epochs)

    @property
    def largest_vocabulary(self) -> int:
        """Ids that the tokenizer may come to have."""
        return SMALLEST_VOCABULARY if self.tokenizer == "bytes" else self.vocab_size

    @property
    def fields(self) -> Fields:
        """Names of the fields of a record."""
        return Fields(self.text_field, self.group_field)

    @property
    def cache_path(self) -> pathlib.Path:
        """The cache folder, `~` and the environment resolved. Not created here."""
        if self.cache_dir:
            return pathlib.Path(self.cache_dir).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return pathlib.Path(base).expanduser() / "k3jax"
