"""Runs a main function so that a user's mistake ends in one line and a bug keeps its traceback."""

import functools
import pathlib
import sys
import traceback
from collections.abc import Callable

from absl import flags, logging

from k3jax.parallel import host

ROOT = pathlib.Path(__file__).resolve().parents[1]


def one_line_errors(main: Callable) -> Callable:
    """Wraps `main`: a refusal raised by this repository prints one line and exits with 2.

    So does a word that is no flag, and a file that the system refuses. A refusal is a ValueError
    whose raise statement is in one of our own files, where the message states value, rule and way
    out. A ValueError from inside JAX or NumPy is a bug and is raised.
    """

    @functools.wraps(main)
    def guarded(argv):
        host.prepare()
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.ERROR)  # the libraries log every file they write
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected argument {argv[1]!r}; write flags as --name=value")
            return main(argv)
        except (ValueError, OSError) as error:
            if not is_refusal(error):
                raise
            text = str(error)
            if isinstance(error, OSError):
                text = f"{error.filename!r} cannot be used ({error.strerror}); give another path"
            print(f"error: {' '.join(text.split())}", file=sys.stderr)
            sys.exit(2)

    return guarded


def is_refusal(error: BaseException) -> bool:
    """Whether a raise statement of ours made the error, or the system refused a file."""
    if isinstance(error, OSError):
        return error.filename is not None  # without: a pipe, a socket, something of a library
    origin = traceback.extract_tb(error.__traceback__)[-1]
    return is_ours(origin.filename) and (origin.line or "").startswith("raise ")


def is_ours(filename: str) -> bool:
    """Whether a source file belongs to this repository and not to an environment inside it."""
    path = pathlib.Path(filename).resolve()
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts
