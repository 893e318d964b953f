"""Documents inside a file: all of a text file, or one for each record of JSON lines or Parquet."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from k3jax.data.files import CorpusError, File

JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"


class Fields(NamedTuple):
    """Names of the fields of a record: its text, and its group ("" for none)."""

    text: str = "text"
    group: str = ""


class Record(NamedTuple):
    """A document's name in its source, its text in UTF-8 and the group it belongs to, or ""."""

    name: str
    data: bytes
    group: str = ""


def holds_records(file: File) -> bool:
    """Whether a file is read record by record, which its name's ending decides."""
    return file.name.lower().endswith((*JSON_LINES, PARQUET))


def read(file: File, fields: Fields) -> Iterator[Record]:
    """The records of a file that `holds_records`, named "file:number", from 1.

    Blank lines count but give no record. The text is kept as it is.

    Raises:
      CorpusError: a record that is damaged or lacks a field, by file and number; a damaged file.
    """
    rows = _parquet_rows if file.name.lower().endswith(PARQUET) else _json_rows
    for number, row in rows(file, fields):
        yield _record(file, number, row, fields)


def _json_rows(file: File, fields: Fields) -> Iterator[tuple[int, Any]]:
    packed = file.name.lower().endswith(".gz")
    try:
        with file.open() as raw, gzip.open(raw) if packed else raw as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json(file, number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(
            f"{file.name} cannot be read to its end ({error}); restore the file or leave it out "
            "of the source"
        ) from error


def _json(file: File, number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{file.name} line {number} is not JSON in UTF-8 ({error}): every line must be one "
            "object; correct or remove the line"
        ) from error


def _parquet_rows(file: File, fields: Fields) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise CorpusError(
            f"{file.name}: Parquet files need the package pyarrow; install it (it is in "
            "k3jax[train]) or convert the file to JSON lines"
        ) from error
    try:
        with file.open() as raw, parquet.ParquetFile(raw) as table:
            names = table.schema_arrow.names
            wanted = [name for name in fields if name]
            for name in wanted:
                if name not in names:
                    raise CorpusError(_missing(file.name, name, names))
            number = 0
            for batch in table.iter_batches(1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, OSError) as error:
        raise CorpusError(
            f"{file.name} is no whole Parquet file ({error}); restore it or leave it out"
        ) from error


def _record(file: File, number: int, row: Any, fields: Fields) -> Record:
    where = f"{file.name} {'row' if file.name.lower().endswith(PARQUET) else 'line'} {number}"
    if not isinstance(row, dict):
        raise CorpusError(
            f"{where} holds a {type(row).__name__}: every record must be an object with the field "
            f"{fields.text!r}; correct or remove it"
        )
    for name in filter(None, fields):
        if name not in row:
            raise CorpusError(_missing(where, name, list(row)))
    text = row[fields.text]
    try:
        data = text.encode("utf-8")
    except (AttributeError, UnicodeEncodeError) as error:
        raise CorpusError(
            f"{where}: {fields.text!r} is {str(text)[:40]!r}, a {type(text).__name__}: it must be "
            "text that UTF-8 can spell; correct the record or name another data.text_field"
        ) from error
    group = row[fields.group] if fields.group else ""
    if isinstance(group, bool) or not isinstance(group, str | int):
        raise CorpusError(
            f"{where}: {fields.group!r} is {group!r}: a group is text or an integer; correct the "
            "record or name another data.group_field"
        )
    # A prefix keeps an id apart from names of documents.
    return Record(f"{file.name}:{number}", data, f"{fields.group}={group}" if fields.group else "")


def _missing(where: str, name: str, present: list[str]) -> str:
    setting = "data.text_field or data.group_field"
    return f"{where} has no {name!r}, it has {', '.join(present) or 'nothing'}; set {setting}"
