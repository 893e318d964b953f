"""What exactly a run was trained on, written beside it and checked when it resumes."""

import dataclasses
from collections.abc import Sequence

from k3jax.config import to_dict
from k3jax.data.config import DataConfig
from k3jax.data.dedup import Duplicate
from k3jax.data.text import Document
from k3jax.data.tokenizer import Tokenizer

VERSION = 1


class ManifestError(ValueError):
    """The corpus is not the one that the manifest describes; names the first difference."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One document: name, bytes, SHA-256, and "train" or "validation"."""

    name: str
    size: int
    sha256: str
    split: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A corpus by names and hashes.

    Attributes:
      config: fields of `DataConfig` but `cache_dir` and `prefetch`, which decide nothing.
      documents: in order, training first.
      duplicates: files dropped as near-duplicates.
      notes: what else was left out, and why.
      tokenizer: fingerprint of the tokenizer.
      vocab_size: its number of ids.
    """

    config: dict
    documents: list[Entry]
    duplicates: list[Duplicate]
    notes: list[str]
    tokenizer: str
    vocab_size: int
    version: int = VERSION

    def to_fields(self) -> dict:
        """JSON values; a checkpoint stores them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: dict) -> "Manifest":
        """Reads what `to_fields` gave.

        Raises:
          ManifestError: the fields are damaged or of another version.
        """
        try:
            entries = [Entry(**entry) for entry in fields["documents"]]
            duplicates = [Duplicate(**entry) for entry in fields["duplicates"]]
            manifest = cls(**{**fields, "documents": entries, "duplicates": duplicates})
        except (KeyError, TypeError) as error:
            raise ManifestError(
                f"the stored manifest is damaged ({type(error).__name__}: {error}): it must hold "
                "the fields of Manifest; start a new --workdir"
            ) from error
        if manifest.version != VERSION:
            raise ManifestError(
                f"the stored manifest has version {manifest.version}: must be {VERSION}; resume "
                "with the code that wrote it or start a new --workdir"
            )
        return manifest


def build(
    cfg: DataConfig,
    train: Sequence[Document],
    validation: Sequence[Document],
    duplicates: Sequence[Duplicate],
    notes: Sequence[str],
    tokenizer: Tokenizer,
) -> Manifest:
    """Describes a corpus."""
    config = to_dict(cfg)
    for field in ("cache_dir", "prefetch"):
        del config[field]
    entries = [
        Entry(document.name, document.size, document.sha256, split)
        for split, documents in (("train", train), ("validation", validation))
        for document in documents
    ]
    return Manifest(
        config, entries, list(duplicates), list(notes), tokenizer.fingerprint, tokenizer.vocab_size
    )


def verify(stored: Manifest, present: Manifest) -> None:
    """Refuses to go on with another corpus than the one that the run began with.

    Args:
      stored: of the run.
      present: of the corpus loaded now.

    Raises:
      ManifestError: a document is missing, changed, on the other side of the split, or new, or
        the tokenizer differs.
    """
    saved = {entry.name: entry for entry in stored.documents}
    now = {entry.name: entry for entry in present.documents}
    for name, entry in saved.items():
        if name not in now:
            _refuse(name, f"is missing now (was {entry.size} bytes in {entry.split})")
        if now[name].sha256 != entry.sha256:
            _refuse(name, f"has changed ({entry.size} bytes then, {now[name].size} bytes now)")
        if now[name].split != entry.split:
            _refuse(name, f"was in {entry.split} and is in {now[name].split} now")
    for name in now:
        if name not in saved:
            _refuse(name, "is new")
    if present.tokenizer != stored.tokenizer:
        raise ManifestError(
            f"tokenizer {present.tokenizer[:12]} is not the run's "
            f"{stored.tokenizer[:12]}: a resumed run must keep its token ids; restore "
            f"data.vocab_size={stored.config.get('vocab_size')} or start a new --workdir"
        )


def _refuse(name: str, what: str):
    raise ManifestError(
        f"document {name!r} {what}: a resumed run must read the corpus of its manifest; restore "
        "the text and the data settings (the stdlib changes with the Python version), or start a "
        "new --workdir"
    )
