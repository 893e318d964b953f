"""Files that can be made again: read if good, else made and kept, and said so either way."""

import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def load_or_make(
    path: pathlib.Path,
    load: Callable[[pathlib.Path], Value],
    make: Callable[[], Value],
    save: Callable[[Value, pathlib.Path], None],
    notes: list[str],
) -> Value:
    """Returns the cached value at `path`, or makes it and tries to cache it.

    A damaged file is made again; a folder that cannot be written costs time, not the run. Both
    add a sentence to `notes`. Writers may race: the last complete file wins, none is half written.

    Args:
      path: file whose name holds a hash of everything that the value depends on.
      load: reads a file that `save` wrote; ValueError, KeyError, TypeError, OSError or
        EOFError mean damage.
      make: computes the value.
      save: writes the value to a path.
      notes: receives what went other than planned.
    """
    if path.exists():
        try:
            return load(path)
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            notes.append(f"cache: {path.name} is damaged ({error}); made again")
    value = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            # The same file name, because numpy appends a suffix of its own to any other.
            fresh = pathlib.Path(folder, path.name)
            save(value, fresh)
            os.replace(fresh, path)
    except OSError as error:
        notes.append(f"cache: {path.parent} cannot be written ({error}); set data.cache_dir")
    return value
