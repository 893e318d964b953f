"""Host batches, built ahead by a thread, to device batches, one step ahead of the device."""

import zlib
from typing import Any, NamedTuple, Protocol

import numpy as np

from k3jax.models.kimi_k3.loss import FIELDS, Batch, place
from k3jax.train.ahead import Ahead


class Source(Protocol):
    """An endless stream of host batches that knows where it is."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch, arrays [B, T]."""

    def get_state(self) -> Any:
        """A JSON value: the position after the last batch given."""

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""


class _Built(NamedTuple):
    """A host batch, its fingerprint, and the position of the source behind it."""

    batch: dict[str, np.ndarray]
    mark: str
    state: Any


class Feed:
    """Takes batches from a source and cuts them into micro-batches on the device.

    A thread builds `ahead` host batches before they are asked for, and `prefetch` places one more
    while the device computes. The state that a checkpoint stores is still that after the last
    batch *used*, so a resumed run repeats and skips nothing. While a feed is open nothing else may
    take from its source or move it.
    """

    def __init__(self, source: Source, micro_batches: int, ahead: int = 0):
        """Starts at the source's present position; takes nothing yet.

        Args:
          source: Of host batches.
          micro_batches: Pieces of a batch.
          ahead: Host batches to build in a thread; 0 builds each when it is asked for.
        """
        self._source, self._pieces, self._depth = source, micro_batches, ahead
        self._state = source.get_state()
        self._ahead: Ahead[_Built] | None = None
        self._next: tuple[tuple[Batch, ...], str, Any] | None = None

    def state(self) -> Any:
        """Position after the last batch that `take` returned."""
        return self._state

    def prefetch(self) -> None:
        """Places the next batch on the device, if it is not there yet.

        Raises:
          BaseException: what the source raised for this batch, unchanged.
        """
        if self._next is None:
            if self._depth and self._ahead is None:
                self._ahead = Ahead(self._build, self._depth)
            built = self._ahead.take() if self._ahead else self._build()
            split = {name: np.split(built.batch[name], self._pieces) for name in FIELDS}
            # Here and not in the thread: the mesh in force belongs to the thread that set it.
            pieces = tuple(
                place({name: split[name][i] for name in FIELDS}) for i in range(self._pieces)
            )
            self._next = (pieces, built.mark, built.state)

    def take(self) -> tuple[tuple[Batch, ...], str]:
        """The next batch as micro-batches, and its fingerprint."""
        self.prefetch()
        assert self._next is not None
        pieces, mark, self._state = self._next
        self._next = None
        return pieces, mark

    def close(self) -> None:
        """Ends the thread."""
        if self._ahead is not None:
            self._ahead.close()

    def _build(self) -> _Built:
        batch = next(self._source)
        return _Built(batch, fingerprint(batch), self._source.get_state())


def fingerprint(batch: dict[str, np.ndarray]) -> str:
    """Eight hex digits of a batch's tokens, to see in the log that no batch came twice."""
    return f"{zlib.crc32(np.ascontiguousarray(batch['tokens'])):08x}"
