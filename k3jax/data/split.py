"""Train and validation by whole files and groups, then long files into documents."""

import collections
import hashlib
from collections.abc import Sequence

from k3jax.data.text import CorpusError, Document


def split_documents(
    documents: Sequence[Document],
    fraction: float,
    seed: int,
    max_document_bytes: int,
    setting: str = "data.source",
) -> tuple[list[Document], list[Document], list[str]]:
    """Splits by file and cuts files longer than `max_document_bytes` at line ends.

    Documents of one group (`Document.group`) count as one file, by the name of the group. Files
    are visited in the order of a hash of (seed, name) and taken for validation until 0.9 of
    `fraction` of all bytes is reached; one that would lead beyond 1.1 of it is passed over. So
    the choice depends on names and sizes, hardly on which other files there are. A corpus of too
    few files for that (a single book) gives the last bytes of its largest file instead; a group is
    never cut.

    Args:
      documents: whole files.
      fraction: wanted share of validation bytes, in (0, 1).
      seed: of the choice.
      max_document_bytes: length of the longest document returned.
      setting: the words that name the source in messages.

    Returns:
      Training and validation documents, each in the given order, and notes.

    Raises:
      CorpusError: one side would be empty.
    """
    budget = fraction * sum(document.size for document in documents)
    chosen = _choose(documents, budget, seed)
    train = [document for document in documents if _unit(document) not in chosen]
    validation = [document for document in documents if _unit(document) in chosen]
    notes = []
    if not train or sum(document.size for document in validation) < 0.5 * budget:
        alone = [document for document in documents if not document.group]
        if not alone:
            raise CorpusError(
                f"{setting} has {len({d.group for d in documents})} groups, too few for "
                f"validation_fraction={fraction}; add text, move validation_fraction towards 0.5 "
                "or set data.group_field to nothing"
            )
        largest = max(alone, key=lambda document: document.size)
        head, tail = _cut_tail(largest, max(int(budget), 1))
        train = [head if document is largest else document for document in documents]
        validation = [tail]
        notes.append(f"too few files to split whole ones: validation is the end of {largest.name}")
    if not all(document.size for document in train + validation):
        raise CorpusError(
            f"{setting} has {sum(d.size for d in documents)} bytes of text, too few for "
            f"validation_fraction={fraction}; add text or move validation_fraction towards 0.5"
        )
    return _cut_all(train, max_document_bytes), _cut_all(validation, max_document_bytes), notes


def _choose(documents: Sequence[Document], budget: float, seed: int) -> set[str]:
    def rank(unit):
        return hashlib.sha256(f"{seed}\0{unit}".encode()).digest()

    sizes = collections.Counter()
    for document in documents:
        sizes[_unit(document)] += document.size
    chosen, taken = set(), 0
    for unit in sorted(sizes, key=rank):
        if taken >= 0.9 * budget:
            break
        if taken + sizes[unit] <= 1.1 * budget:
            chosen.add(unit)
            taken += sizes[unit]
    return chosen


def _unit(document: Document) -> str:
    return document.group or document.name


def _cut_tail(document: Document, tail_bytes: int) -> tuple[Document, Document]:
    """Cuts off about the last `tail_bytes` bytes, at a line end where there is one."""
    cut = document.data.find(b"\n", document.size - tail_bytes) + 1
    if cut in (0, document.size):
        cut = _character_start(document.data, document.size - tail_bytes)
    return _piece(document, 0, cut), _piece(document, cut, document.size)


def _cut_all(documents: Sequence[Document], limit: int) -> list[Document]:
    pieces = []
    for document in documents:
        if document.size <= limit:
            pieces.append(document)
            continue
        start = 0
        while start < document.size:
            end = min(start + limit, document.size)
            if end < document.size:
                line = document.data.rfind(b"\n", start, end) + 1
                end = line or _character_start(document.data, end)
            pieces.append(_piece(document, start, end))
            start = end
    return pieces


def _character_start(data: bytes, position: int) -> int:
    """The last start of a UTF-8 character at or before `position`."""
    while data[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _piece(document: Document, start: int, end: int) -> Document:
    # A piece of a piece counts from the start of the file.
    name, _, offset = document.name.rpartition("@") if "@" in document.name else ("", "", "")
    if not (name and offset.isdigit()):
        name, offset = document.name, "0"
    return Document(f"{name}@{int(offset) + start}", document.data[start:end], document.group)
