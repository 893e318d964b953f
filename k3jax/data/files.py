"""Where text lies: the standard library, files, folders, globs and URLs.

A location is one of these or several with commas between (a file whose name has a comma is named
alone, or in a URL by %2C). Globs know `*`, `?`, `[ab]`, `**` for
folders of any depth and `{a,b}` for either. `file://` is a local path; other URLs are opened by
`fsspec` where it and the driver of their scheme are installed.
"""

import functools
import glob
import os
import pathlib
import re
import sysconfig
import urllib.parse
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

STDLIB = "stdlib"

# What a directory is searched for: prose, source code and records. A glob reaches anything else.
SUFFIXES = (
    ".txt .md .rst .tex .html .py .pyi .c .h .cc .cpp .hpp .cu .java .js .ts .go .rs .sh .rb .jl "
    ".jsonl .jsonl.gz .parquet"
).split()

# Installed packages, caches and (in 3.11) the library's old translator do not belong to it.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "lib2to3"}


class CorpusError(ValueError):
    """The corpus is missing or empty; the message names the source, the rule and the way out."""


class File(NamedTuple):
    """A file by its name inside the source, and how to open it for reading bytes."""

    name: str
    open: Callable[[], BinaryIO]


# Openers by full path, and the folder that names are relative to ("" for whole URLs).
_Found = tuple[dict[str, Callable[[], BinaryIO]], str]


def find(location: str, setting: str = "data.source") -> list[File]:
    """The files of a location, sorted by name; a name is relative to their common folder.

    Args:
      location: "stdlib", or what the module's docstring says.
      setting: the words before the location in messages.

    Raises:
      CorpusError: some part of the location is missing, matches nothing or cannot be opened.
    """
    where = f"{setting}={location!r}"
    whole = location != STDLIB and os.path.exists(os.path.expanduser(location))
    parts = [location] if whole else _parts(location)
    found = [_part(p, where if p == location else f"{where}: {p!r}") for p in parts]
    files = {path: opener for part, _ in found for path, opener in part.items()}
    base = found[0][1]
    if len(found) > 1:
        bases = [base for _, base in found]
        base = os.path.commonpath(bases) if all(map(os.path.isabs, bases)) else ""
    prefix = base.rstrip("/") + "/" if base else ""
    names = {pathlib.Path(p.removeprefix(prefix)).as_posix(): f for p, f in files.items()}
    return [File(name, names[name]) for name in sorted(names)]


def _parts(location: str) -> list[str]:
    """Cuts at commas outside braces."""
    pieces = re.findall(r"(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^,])+", location)
    return [piece.strip() for piece in pieces if piece.strip()] or [location]


def _braces(pattern: str) -> list[str]:
    """a{b,c} -> ab, ac; the inner ones of nested braces first."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [p for choice in match[1].split(",") for p in _braces(head + choice + tail)]


def _part(part: str, where: str) -> _Found:
    if part == STDLIB:
        return _stdlib_files(where)
    scheme, is_url, _ = part.partition("://")
    if is_url and scheme != "file":
        return _remote_files(part, scheme, where)
    if is_url:
        part = urllib.parse.unquote(part.removeprefix("file://").removeprefix("localhost"))
        if not part.startswith("/"):
            raise CorpusError(f"{where} names another machine; write file:///folder/file")
    path = os.path.abspath(os.path.expanduser(part))
    if os.path.isfile(path):
        return _openers([path]), os.path.dirname(path)
    if os.path.isdir(path):
        files = list(_walk(path, tuple(SUFFIXES), {"__pycache__"}))
        if not files:
            raise CorpusError(
                f"{where} holds no file ending in {' '.join(SUFFIXES)}; "
                f"name other files by a glob such as '{part}/**/*.json'"
            )
        return _openers(files), path
    patterns = _braces(path)
    if len(patterns) == 1 and not glob.has_magic(path):
        raise CorpusError(
            f"{where} does not exist; give 'stdlib', an existing file or directory, "
            "or a glob such as 'texts/**/*.txt'"
        )
    matches = [m for pattern in patterns for m in glob.glob(pattern, recursive=True)]
    files = [match for match in matches if os.path.isfile(match)]
    if not files:
        raise CorpusError(
            f"{where} matches no file; check the pattern ('**' crosses folders) "
            "or name a file or directory"
        )
    return _openers(files), os.path.commonpath([os.path.dirname(file) for file in files])


def _openers(paths: list[str]) -> dict[str, Callable[[], BinaryIO]]:
    return {path: functools.partial(open, path, "rb") for path in paths}


def _stdlib_files(where: str) -> _Found:
    # The path belongs to the base interpreter even inside a virtual environment.
    root = sysconfig.get_paths()["stdlib"]
    files = list(_walk(root, (".py",), _NOT_LIBRARY))
    if not files:
        raise CorpusError(
            f"{where}: {root} holds no .py files (a zipped or stripped Python); "
            "set data.source to a file, directory or glob of your own text"
        )
    return _openers(files), root


def _walk(root: str, suffixes: tuple[str, ...], skipped: set[str]) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        # Hidden folders are version control and environments, never text someone wrote.
        subfolders[:] = [d for d in subfolders if d not in skipped and not d.startswith(".")]
        for file in files:
            path = os.path.join(folder, file)
            if file.lower().endswith(suffixes) and os.path.isfile(path):
                yield path


def _remote_files(url: str, scheme: str, where: str) -> _Found:
    try:
        import fsspec
    except ImportError as error:
        raise CorpusError(
            f"{where}: {scheme}:// needs the package fsspec; install it with the driver of "
            f"{scheme}, or copy the files to this machine"
        ) from error
    files = {}
    try:
        for pattern in _braces(url):
            system, path = fsspec.core.url_to_fs(pattern)
            matches = system.glob(path) if glob.has_magic(path) else [path]
            for match in matches:
                if system.isfile(match):
                    files[match] = functools.partial(system.open, match, "rb")
    except Exception as error:  # a driver raises what it likes: no login, no network, no package
        raise CorpusError(
            f"{where} cannot be opened ({type(error).__name__}: {error}); install the driver of "
            f"{scheme}, log in, or copy the files to this machine"
        ) from error
    if not files:
        raise CorpusError(f"{where} matches no file; name a file or a glob such as '{url}/*.txt'")
    return files, os.path.commonpath([os.path.dirname(file) for file in files])
