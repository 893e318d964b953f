"""A run's output folder: made, tried and held by one run at a time; its text files."""

import contextlib
import fcntl
import os
import pathlib
import tempfile
from collections.abc import Callable, Generator

LOCK = ".lock"  # inside the folder; says which process holds it


@contextlib.contextmanager
def opened(
    folder: str | os.PathLike, log: Callable[[str], None]
) -> Generator[pathlib.Path, None, None]:
    """Holds a workdir; the system lets go of it when the process ends, however it ends.

    Args:
      folder: Made if need be.
      log: Told when the file system has no locks; the run then goes on without one.

    Raises:
      ValueError: the folder is a file, cannot be written, or another run is at work in it.
    """
    path = pathlib.Path(folder)
    _make(path)
    with (path / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ValueError(
                f"workdir {str(path)!r} is in use by process {holder}: one run at a time may "
                "write there; wait for it or give another --workdir"
            ) from error
        except OSError as error:
            log(f"workdir {path} cannot be locked ({error.strerror}); run only once in it")
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield path


def write_whole(path: os.PathLike, text: str) -> None:
    """Replaces a text file at once: a kill leaves the old file or the new one, never a part."""
    path = pathlib.Path(path)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _make(path: pathlib.Path) -> None:
    """Makes the folder and writes to it once: before the text is prepared, not an hour later."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"workdir {str(path)!r} is a file; give a folder, new or of this run")
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"workdir {str(path)!r} cannot be written ({error.strerror}); give a folder on a "
            "disk with room where you may write"
        ) from error
