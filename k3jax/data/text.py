"""Documents: the standard library's own source, a file, a directory or a glob."""

import dataclasses
import functools
import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator

STDLIB = "stdlib"

# What a directory is searched for: prose and source code. Anything else is reached by a glob.
SUFFIXES = (
    ".txt .md .rst .tex .html .py .pyi .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs .sh .rb .jl"
).split()

# Installed packages, caches and (in 3.11) the library's old translator do not belong to it.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "lib2to3"}


class CorpusError(ValueError):
    """The corpus is missing or empty; the message names the source, the rule and the way out."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One file, or one piece of a file (then `name` is "file@offset", offset in bytes).

    `data` is the exact content in UTF-8: line ends, byte order marks and NUL are kept.
    """

    name: str
    data: bytes

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


def read_documents(source: str, min_document_bytes: int = 0) -> tuple[list[Document], list[str]]:
    """Reads every document of `source`, sorted by relative name.

    Args:
      source: see `DataConfig.source`.
      min_document_bytes: shorter files are left out.

    Returns:
      The documents, and one note (a sentence) for each reason why files were left out.

    Raises:
      CorpusError: nothing is there, or nothing of it can be used.
    """
    documents, undecodable, short = [], [], 0
    paths = dict(_find(source))
    for name in sorted(paths):
        try:
            data = paths[name].read_bytes()
            data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            undecodable.append(name)
            continue
        if len(data) < max(min_document_bytes, 1):
            short += 1
            continue
        documents.append(Document(name, data))
    notes = []
    if undecodable:
        notes.append(f"{len(undecodable)} files unreadable or not UTF-8, first {undecodable[0]}")
    if short:
        notes.append(f"{short} files shorter than min_document_bytes={min_document_bytes}")
    if not documents:
        raise CorpusError(
            f"data.source={source!r} holds no usable text ({'; '.join(notes) or 'no files'}); "
            "give UTF-8 files, or lower data.min_document_bytes"
        )
    return documents, [f"left out: {note}" for note in notes]


def _find(source: str) -> Iterator[tuple[str, pathlib.Path]]:
    """Relative name and path of each candidate file, in no particular order."""
    if source == STDLIB:
        return _stdlib_files()
    path = pathlib.Path(source).expanduser()
    if path.is_file():
        return iter([(path.name, path)])
    if path.is_dir():
        return _directory_files(path)
    if glob.has_magic(source):
        return _glob_files(source)
    raise CorpusError(
        f"data.source={source!r} does not exist; give 'stdlib', an existing file or directory, "
        "or a glob such as 'texts/**/*.txt'"
    )


def _stdlib_files() -> Iterator[tuple[str, pathlib.Path]]:
    # The path belongs to the base interpreter even inside a virtual environment.
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = list(_walk(root, (".py",), _NOT_LIBRARY))
    if not files:
        raise CorpusError(
            f"data.source='stdlib': {root} holds no .py files (a zipped or stripped Python); "
            "set data.source to a file, directory or glob of your own text"
        )
    return iter(files)


def _directory_files(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    files = list(_walk(root, tuple(SUFFIXES), {"__pycache__"}))
    if not files:
        raise CorpusError(
            f"data.source={str(root)!r} holds no file ending in {' '.join(SUFFIXES)}; "
            f"name other files by a glob such as '{root}/**/*.json'"
        )
    return iter(files)


def _glob_files(pattern: str) -> Iterator[tuple[str, pathlib.Path]]:
    matches = glob.glob(os.path.expanduser(pattern), recursive=True)
    files = [pathlib.Path(match) for match in matches if os.path.isfile(match)]
    if not files:
        raise CorpusError(
            f"data.source={pattern!r} matches no file; check the pattern ('**' crosses folders) "
            "or name a file or directory"
        )
    parent = os.path.commonpath([str(file.parent) for file in files])
    return iter([(pathlib.Path(os.path.relpath(f, parent)).as_posix(), f) for f in files])


def _walk(
    root: pathlib.Path, suffixes: tuple[str, ...], skipped: set[str]
) -> Iterator[tuple[str, pathlib.Path]]:
    for folder, subfolders, files in os.walk(root):
        # Hidden folders are version control and environments, never text someone wrote.
        subfolders[:] = [d for d in subfolders if d not in skipped and not d.startswith(".")]
        for file in files:
            path = pathlib.Path(folder, file)
            if file.lower().endswith(suffixes) and path.is_file():
                yield path.relative_to(root).as_posix(), path
