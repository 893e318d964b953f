"""An infinite sequence of batches, defined by an index, that resumes exactly."""

import json
from collections.abc import Callable

import grain
import numpy as np

from k3jax.data.packing import Row

VERSION = 1

# In process, without threads: the rows are in memory, and one order is the only order.
_READ = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class ResumableBatches:
    """Batch n stacks the rows n * B to (n + 1) * B - 1 of an endless sequence.

    `next` gives a dict of arrays [B, ...]. `get_state` is small and JSON-able; a new iterator of
    the same identity that takes it goes on with the very next batch.

    Attributes:
      batch_size: B.
    """

    def __init__(
        self,
        row: Callable[[int], Row],
        batch_size: int,
        identity: dict,
        name: Callable[[int, int], str],
    ):
        """Starts at row 0.

        Args:
          row: index -> row; depends on the index alone.
          batch_size: B.
          identity: JSON-able values that decide the sequence; a state with others is refused.
          name: (index of a row, one of its document_ids) -> name of the document.

        Raises:
          ValueError: batch_size is not positive.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1; raise it")
        self._row, self._name, self.batch_size = row, name, batch_size
        self._identity = {"version": VERSION, "batch_size": batch_size, **identity}
        rows = grain.MapDataset.range(np.iinfo(np.int64).max // (2 * batch_size)).map(row)
        self._batches = iter(rows.batch(batch_size, batch_fn=stack).to_iter_dataset(_READ))

    def __iter__(self):
        return self

    def __next__(self) -> Row:
        return next(self._batches)

    def documents(self, batch_index: int) -> list[tuple[str, ...]]:
        """Names of the documents in a batch: for each row, in their order. Moves nothing.

        Args:
          batch_index: from 0, so the batch of update n has the index n - 1.

        Raises:
          ValueError: batch_index is negative.
        """
        if batch_index < 0:
            raise ValueError(f"batch_index={batch_index}: batches count from 0; raise it")
        first = batch_index * self.batch_size
        named = []
        for index in range(first, first + self.batch_size):
            ids = self._row(index)["document_ids"]
            # A dict keeps the first place of each id.
            there = dict.fromkeys(ids[ids >= 0].tolist())
            named.append(tuple(self._name(index, document) for document in there))
        return named

    def get_state(self) -> dict:
        """What `set_state` needs to go on after the last batch taken."""
        return {**self._identity, "position": self._batches.get_state()}

    def set_state(self, state: dict) -> None:
        """Goes on where `get_state` was called.

        Raises:
          ValueError: the state belongs to another sequence; names the first difference.
        """
        # Through JSON and back, as the state itself has gone: tuples become lists.
        for name, mine in json.loads(json.dumps(self._identity)).items():
            theirs = state.get(name)
            if theirs != mine:
                raise ValueError(
                    f"data iterator state has {name}={theirs!r}, this run has {mine!r}: a resumed "
                    f"run must read the same sequence; restore {name} or start a new --workdir"
                )
        self._batches.set_state(state["position"])


def stack(rows: list[Row]) -> Row:
    """Rows of arrays [T] as one batch of arrays [B, T]."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
