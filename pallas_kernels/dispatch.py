"""Chooses one implementation of an op: `implementation=None | name | names`, one rule for all ops.

* `None` takes the first candidate that supports the call and warns once, with the reasons, when
  that is not the first candidate for this platform.
* One name uses exactly that candidate or raises `UnsupportedError` with the reason (strict).
* A sequence of names tries them in order and warns once on every fallback.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = str | Sequence[str] | None

_announced: set[str] = set()


class UnsupportedError(ValueError):
    """A named implementation cannot serve this call; the message says why and what can."""


class FallbackWarning(UserWarning):
    """A faster implementation was passed over; announced once per reason."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      run: the function itself, with the op's signature less `implementation`.
      unsupported: called with `run`'s arguments; returns why it cannot serve them, or None.
    """

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = lambda *_, **__: None


def announce(message: str) -> None:
    """Warns with `FallbackWarning`, once per distinct message in a process."""
    if message not in _announced:
        _announced.add(message)
        warnings.warn(message, FallbackWarning, stacklevel=3)


def call(
    op: str,
    candidates: Mapping[str, Implementation],
    implementation: Choice,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `op` with the chosen candidate.

    Args:
      op: name used in messages.
      candidates: name -> implementation, best first.
      implementation: see the module docstring.
      *args: passed to the candidate's `unsupported` and `run`.
      **kwargs: likewise.

    Raises:
      UnsupportedError: a name is unknown, or no allowed candidate supports the call.
    """
    if implementation is None:
        names = list(candidates)
    elif isinstance(implementation, str):
        names = [implementation]
    else:
        names = list(implementation)
    reasons = []
    for name in names:
        if name not in candidates:
            raise UnsupportedError(
                f"{op}: implementation {name!r} is unknown; choose from {', '.join(candidates)}"
            )
        reason = candidates[name].unsupported(*args, **kwargs)
        if reason is None:
            if reasons:
                announce(f"{op} falls back to {name!r}: {'; '.join(reasons)}")
            return candidates[name].run(*args, **kwargs)
        reasons.append(f"{name!r} {reason}")
    raise UnsupportedError(
        f"{op}: no allowed implementation supports this call: "
        f"{'; '.join(reasons) or 'none named'}; known: {', '.join(candidates)}; "
        "pass implementation=None to take the best that works"
    )
