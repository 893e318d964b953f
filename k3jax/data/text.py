"""Documents of a source: whole files, and the records of files that hold several."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator

from k3jax.data import files, records
from k3jax.data.files import CorpusError, File
from k3jax.data.records import Fields, Record

PLAIN = Fields()

__all__ = ["CorpusError", "Document", "read_documents"]


@dataclasses.dataclass(frozen=True)
class Document:
    """One file or record, or one piece of it (then `name` is "file@offset", offset in bytes).

    `data` is the exact content in UTF-8: line ends, byte order marks and NUL are kept. Documents
    of one `group` (a conversation) stay on one side of the split; "" is a document by itself.
    """

    name: str
    data: bytes
    group: str = ""

    @property
    def text(self) -> str:
        """The decoded text, made anew on each use so that a corpus is held once."""
        return self.data.decode("utf-8")

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    @functools.cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()


def read_documents(
    location: str,
    min_document_bytes: int = 0,
    fields: Fields = PLAIN,
    setting: str = "data.source",
) -> tuple[list[Document], list[str]]:
    """Reads every document of a location, sorted by relative name.

    Args:
      location: see `DataConfig.source`.
      min_document_bytes: shorter files are left out.
      fields: of records.
      setting: the words before the location in messages.

    Returns:
      The documents, and one note (a sentence) for each reason why files were left out.

    Raises:
      CorpusError: nothing is there, nothing of it can be used, or a record is damaged.
    """
    documents, undecodable, short = [], [], {"files": 0, "records": 0}
    for file in files.find(location, setting):
        try:
            for record in _read(file, fields):
                if len(record.data) < max(min_document_bytes, 1):
                    short["records" if records.holds_records(file) else "files"] += 1
                else:
                    documents.append(Document(*record))
        except CorpusError as error:
            raise CorpusError(f"{setting}={location!r}: {error}") from error
        except (OSError, UnicodeDecodeError):
            undecodable.append(file.name)
    notes = []
    if undecodable:
        notes.append(f"{len(undecodable)} files unreadable or not UTF-8, first {undecodable[0]}")
    for what, count in short.items():
        if count:
            notes.append(f"{count} {what} shorter than min_document_bytes={min_document_bytes}")
    if not documents:
        raise CorpusError(
            f"{setting}={location!r} holds no usable text ({'; '.join(notes) or 'no files'}); "
            "give UTF-8 files, or lower data.min_document_bytes"
        )
    return documents, [f"left out: {note}" for note in notes]


def _read(file: File, fields: Fields) -> Iterator[Record]:
    if records.holds_records(file):
        yield from records.read(file, fields)
        return
    with file.open() as stream:
        data = stream.read()
    data.decode("utf-8")
    yield Record(file.name, data)
