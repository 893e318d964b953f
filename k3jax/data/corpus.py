"""From a source to token arrays: read, drop duplicates, split, learn a tokenizer, encode."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence

from k3jax.data import dedup
from k3jax.data import tokenizer as bpe
from k3jax.data.cache import load_or_make
from k3jax.data.config import DataConfig
from k3jax.data.manifest import Manifest, build
from k3jax.data.split import split_documents
from k3jax.data.text import Document, read_documents
from k3jax.data.tokenizer import Tokenizer
from k3jax.data.tokens import TokenArrays


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Everything about the text of a run, in memory.

    Attributes:
      train: training documents, by name.
      validation: validation documents, by name.
      tokenizer: learnt from `train` alone.
      manifest: names and hashes of all this.
      train_tokens: `train` as ids.
      validation_tokens: `validation` as ids.
      notes: sentences about what was left out, for the reader of the log.
    """

    train: list[Document]
    validation: list[Document]
    tokenizer: Tokenizer
    manifest: Manifest
    train_tokens: TokenArrays
    validation_tokens: TokenArrays
    notes: list[str]

    def summary(self) -> str:
        """A few lines: sizes, bytes per token, and the notes."""
        lines = [
            f"{name}: {len(documents)} documents, {sum(d.size for d in documents):,} bytes, "
            f"{len(arrays.tokens):,} tokens "
            f"({sum(d.size for d in documents) / max(len(arrays.tokens), 1):.3f} bytes/token)"
            for name, documents, arrays in (
                ("train", self.train, self.train_tokens),
                ("validation", self.validation, self.validation_tokens),
            )
        ]
        return "\n".join([*lines, f"vocabulary: {self.tokenizer.vocab_size}", *self.notes])


def load_corpus(cfg: DataConfig) -> Corpus:
    """Loads a corpus; slow steps are cached by content, so the second start is quick.

    Raises:
      CorpusError: the source is missing, empty or too small to split.
    """
    # Cache trouble concerns this machine, the other notes belong to the corpus and its manifest.
    trouble: list[str] = []
    documents, notes = read_documents(cfg.source, cfg.min_document_bytes)
    duplicates = _duplicates(documents, cfg, trouble)
    dropped = {duplicate.name for duplicate in duplicates}
    if dropped:
        size = sum(document.size for document in documents if document.name in dropped)
        notes.append(
            f"left out: {len(dropped)} near-duplicates, {size:,} bytes, first "
            f"{duplicates[0].name} (like {duplicates[0].kept})"
        )
    kept = [document for document in documents if document.name not in dropped]
    train, validation, split_notes = split_documents(
        kept, cfg.validation_fraction, cfg.split_seed, cfg.max_document_bytes
    )
    notes += split_notes
    tokenizer = _tokenizer(train, cfg, trouble)
    if tokenizer.vocab_size < cfg.vocab_size:
        notes.append(
            f"vocabulary: {tokenizer.vocab_size} of data.vocab_size={cfg.vocab_size}, the text "
            "has no more repeated pairs"
        )
    return Corpus(
        train,
        validation,
        tokenizer,
        build(cfg, train, validation, duplicates, notes, tokenizer),
        _encoded(train, tokenizer, cfg, trouble),
        _encoded(validation, tokenizer, cfg, trouble),
        notes + trouble,
    )


def _duplicates(
    documents: Sequence[Document], cfg: DataConfig, notes: list[str]
) -> list[dedup.Duplicate]:
    key = _key(documents, "duplicates", dedup.VERSION, cfg.dedup_threshold)

    def load(path: pathlib.Path) -> list[dedup.Duplicate]:
        return [dedup.Duplicate(**entry) for entry in json.loads(path.read_text("utf-8"))]

    def save(found: list[dedup.Duplicate], path: pathlib.Path) -> None:
        entries = [dataclasses.asdict(duplicate) for duplicate in found]
        path.write_text(json.dumps(entries, indent=0), "utf-8")

    return load_or_make(
        cfg.cache_path / f"duplicates-{key}.json",
        load,
        lambda: dedup.find_duplicates(documents, cfg.dedup_threshold),
        save,
        notes,
    )


def _tokenizer(train: Sequence[Document], cfg: DataConfig, notes: list[str]) -> Tokenizer:
    key = _key(train, "tokenizer", bpe.VERSION, bpe.PATTERN, cfg.vocab_size)
    return load_or_make(
        cfg.cache_path / f"tokenizer-{key}.json",
        Tokenizer.load,
        lambda: Tokenizer.train((document.text for document in train), cfg.vocab_size),
        Tokenizer.save,
        notes,
    )


def _encoded(
    documents: Sequence[Document], tokenizer: Tokenizer, cfg: DataConfig, notes: list[str]
) -> TokenArrays:
    def make() -> TokenArrays:
        ids = []
        # In pieces, because the library's own result is some ten times larger than the ids.
        for start in range(0, len(documents), 64):
            texts = [document.text for document in documents[start : start + 64]]
            ids += tokenizer.encode_batch(texts)
        return TokenArrays.from_documents(ids, tokenizer.vocab_size)

    key = _key(documents, "tokens", tokenizer.fingerprint)
    path = cfg.cache_path / f"tokens-{key}.npy"
    return load_or_make(path, TokenArrays.load, make, TokenArrays.save, notes)


def _key(documents: Sequence[Document], *settings) -> str:
    digest = hashlib.sha256(repr(settings).encode())
    for document in documents:
        digest.update(f"{document.name}\0{document.sha256}\n".encode())
    return digest.hexdigest()[:24]
