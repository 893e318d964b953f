"""From sources to token arrays: read, drop duplicates, split, learn a tokenizer, encode."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence

from k3jax.data import dedup
from k3jax.data import tokenizer as bpe
from k3jax.data.cache import load_or_make
from k3jax.data.config import DataConfig
from k3jax.data.manifest import Manifest, build
from k3jax.data.sources import Source
from k3jax.data.split import split_documents
from k3jax.data.text import CorpusError, Document, read_documents
from k3jax.data.tokenizer import Tokenizer
from k3jax.data.tokens import TokenArrays


@dataclasses.dataclass(frozen=True)
class Portion:
    """What one source gave.

    Attributes:
      source: its name, weight and bound.
      train: its documents among `Corpus.train`.
      validation: its documents among `Corpus.validation`.
      duplicates: its near-duplicates that were dropped.
    """

    source: Source
    train: range
    validation: range
    duplicates: int


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Everything about the text of a run, in memory.

    Attributes:
      train: training documents, source after source, by name in each.
      validation: validation documents, likewise.
      portions: the sources, in order.
      tokenizer: learnt from `train` alone, of all sources.
      manifest: names and hashes of all this.
      train_tokens: `train` as ids.
      validation_tokens: `validation` as ids.
      notes: sentences about what was left out, for the reader of the log.
    """

    train: list[Document]
    validation: list[Document]
    portions: list[Portion]
    tokenizer: Tokenizer
    manifest: Manifest
    train_tokens: TokenArrays
    validation_tokens: TokenArrays
    notes: list[str]


def load_corpus(cfg: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Loads a corpus; slow steps are cached by content, so the second start is quick.

    The split is made in each source by itself. Near-duplicates are looked for among all sources,
    and the first source that has one keeps it, so none stands on both sides of the split.

    Raises:
      CorpusError: a source is missing, empty or too small to split.
    """
    # Cache trouble concerns this machine, the other notes belong to the corpus and its manifest.
    trouble: list[str] = []
    read, notes = _read(cfg)
    documents = [
        _named(source, document)
        for source, part in zip(cfg.named_sources, read, strict=True)
        for document in part
    ]
    duplicates = _duplicates(documents, cfg, trouble)
    dropped = {duplicate.name for duplicate in duplicates}
    if dropped:
        size = sum(document.size for document in documents if document.name in dropped)
        notes.append(
            f"left out: {len(dropped)} near-duplicates, {size:,} bytes, first "
            f"{duplicates[0].name} (like {duplicates[0].kept})"
        )
    train, validation, portions, split_notes = _split(cfg, read, dropped)
    notes += split_notes
    if tokenizer is None:
        tokenizer = _tokenizer(train, cfg, trouble)
        if tokenizer.vocab_size < cfg.largest_vocabulary:
            notes.append(
                f"vocabulary: {tokenizer.vocab_size} of data.vocab_size={cfg.vocab_size}, the text "
                "has no more repeated pairs"
            )
    return Corpus(
        train,
        validation,
        portions,
        tokenizer,
        build(cfg, train, validation, duplicates, notes, tokenizer),
        _encoded(train, tokenizer, cfg, trouble),
        _encoded(validation, tokenizer, cfg, trouble),
        notes + trouble,
    )


def _read(cfg: DataConfig) -> tuple[list[list[Document]], list[str]]:
    """Documents of each source by their names in it, and notes."""
    read, notes = [], []
    for source in cfg.named_sources:
        documents, new = read_documents(
            source.location, cfg.min_document_bytes, cfg.fields, source.setting
        )
        read.append(documents)
        notes += _notes(source, new)
    return read, notes


def _named(source: Source, document: Document) -> Document:
    """The document under its name among all sources."""
    if not source.name:
        return document
    return dataclasses.replace(document, name=f"{source.name}/{document.name}")


def _notes(source: Source, notes: Sequence[str]) -> list[str]:
    return [f"{source.name}: {note}" if source.name else note for note in notes]


def _split(
    cfg: DataConfig, read: Sequence[Sequence[Document]], dropped: set[str]
) -> tuple[list[Document], list[Document], list[Portion], list[str]]:
    train, validation, portions, notes = [], [], [], []
    for source, documents in zip(cfg.named_sources, read, strict=True):
        kept = [d for d in documents if _named(source, d).name not in dropped]
        if not kept:
            raise CorpusError(
                f"{source.setting}={source.location!r} holds only near-duplicates of the sources "
                "before it; leave it out or raise data.dedup_threshold"
            )
        # By names in the source: the same files are held out whatever it is called.
        sides = split_documents(
            kept, cfg.validation_fraction, cfg.split_seed, cfg.max_document_bytes, source.setting
        )
        first, second = len(train), len(validation)
        train += [_named(source, document) for document in sides[0]]
        validation += [_named(source, document) for document in sides[1]]
        notes += _notes(source, sides[2])
        here, there = range(first, len(train)), range(second, len(validation))
        portions.append(Portion(source, here, there, len(documents) - len(kept)))
    return train, validation, portions, notes


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenArrays:
    """Ids of every document, without special ones."""
    ids = []
    # In pieces, because the library's own result is some ten times larger than the ids.
    for start in range(0, len(documents), 64):
        texts = [document.text for document in documents[start : start + 64]]
        ids += tokenizer.encode_batch(texts)
    return TokenArrays.from_documents(ids, tokenizer.vocab_size)


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
    if cfg.tokenizer == "bytes":
        return Tokenizer([])
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
    key = _key(documents, "tokens", tokenizer.fingerprint)
    path = cfg.cache_path / f"tokens-{key}.npy"
    make = functools.partial(encode_documents, documents, tokenizer)
    return load_or_make(path, TokenArrays.load, make, TokenArrays.save, notes)


def _key(documents: Sequence[Document], *settings) -> str:
    digest = hashlib.sha256(repr(settings).encode())
    for document in documents:
        digest.update(f"{document.name}\0{document.sha256}\n".encode())
    return digest.hexdigest()[:24]
