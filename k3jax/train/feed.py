"""Host batches to device batches, one step ahead of the device."""

import zlib
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.parallel import specs
from k3jax.train.loss import Batch

FIELDS = ("tokens", "targets", "segment_ids", "weights")


class Source(Protocol):
    """An endless stream of host batches that knows where it is."""

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch, arrays [B, T]."""

    def get_state(self) -> Any:
        """A JSON value: the position after the last batch given."""

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""


class Feed:
    """Takes batches from a source and cuts them into micro-batches on the device.

    `prefetch` builds the following batch while the device computes; the state that a checkpoint
    stores is still that after the last batch *used*, so a resumed run repeats and skips nothing.
    """

    def __init__(self, source: Source, micro_batches: int):
        """Starts at the source's present position."""
        self._source, self._pieces = source, micro_batches
        self._state = source.get_state()
        self._ahead: tuple[tuple[Batch, ...], str, Any] | None = None

    def state(self) -> Any:
        """Position after the last batch that `take` returned."""
        return self._state

    def prefetch(self) -> None:
        """Builds the next batch now, if it is not there yet."""
        if self._ahead is None:
            batch = next(self._source)
            split = {name: np.split(batch[name], self._pieces) for name in FIELDS}
            pieces = tuple(
                place({name: split[name][i] for name in FIELDS}) for i in range(self._pieces)
            )
            self._ahead = (pieces, fingerprint(batch), self._source.get_state())

    def take(self) -> tuple[tuple[Batch, ...], str]:
        """The next batch as micro-batches, and its fingerprint."""
        self.prefetch()
        assert self._ahead is not None
        pieces, mark, self._state = self._ahead
        self._ahead = None
        return pieces, mark


def place(batch: dict[str, np.ndarray]) -> Batch:
    """Puts the arrays a step reads, [B, T], on the mesh, rows split over its batch axes."""
    sharding = NamedSharding(jax.sharding.get_mesh(), specs.TOKENS)
    return {name: jax.device_put(batch[name], sharding) for name in FIELDS}


def fingerprint(batch: dict[str, np.ndarray]) -> str:
    """Eight hex digits of a batch's tokens, to see in the log that no batch came twice."""
    return f"{zlib.crc32(np.ascontiguousarray(batch['tokens'])):08x}"
