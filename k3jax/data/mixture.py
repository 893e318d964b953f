"""Which source each row of a mixture comes from: a closed form of the row's index.

With weight w of the first source, its rows among the first n are floor(n w + p) for a phase p in
[0, 1) drawn from the seed; the rows that it leaves are shared out among the others in the same
way. So any row is found without walking to it, the state of a run is one index, and the realised
shares are off by a few rows at any time, where random draws would be off by some sqrt(n).

A source that has given its epochs ends a stage. From the next row on the others share its rows,
each in proportion to its weight.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from k3jax.data.ordering import word

_ONE = 1 << 64  # shares and phases are fixed-point numbers of 64 bits
_END = 1 << 62  # a row that no run reaches


@dataclasses.dataclass(frozen=True)
class _Stage:
    """Rows between two ends of sources.

    Attributes:
      start: first row.
      taken: rows of each source before it.
      shares: source, its share of what the sources before it leave, and its phase.
    """

    start: int
    taken: tuple[int, ...]
    shares: tuple[tuple[int, int, int], ...]

    def counts(self, rows: int) -> list[int]:
        """Rows of each source among the first `rows` of all."""
        counts, rest = list(self.taken), rows - self.start
        for source, share, phase in self.shares:
            given = (rest * share + phase) >> 64
            counts[source] += given
            rest -= given
        return counts


class Mixture:
    """Shares rows out among sources. Equal arguments give equal sequences."""

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None], seed: int):
        """Lays out the stages.

        Args:
          weights: relative share of each source, positive.
          limits: rows after which a source ends; None for never.
          seed: of the phases.
        """
        self._limits = limits
        self._stages: list[_Stage] = []
        self.ends: list[tuple[int, int]] = []  # source and the row from which it gives none
        start, taken = 0, (0,) * len(weights)
        active = list(range(len(weights)))
        while active:
            stage = _Stage(start, taken, _shares(active, weights, seed))
            self._stages.append(stage)
            bounded = [source for source in active if limits[source] is not None]
            if not bounded:
                return
            start, ending = min((_full(stage, s, limits[s]), s) for s in bounded)
            self.ends.append((ending, start))
            taken = tuple(stage.counts(start))
            active.remove(ending)

    @property
    def rows(self) -> int | None:
        """Rows until every source has ended; None where one never does."""
        return self.ends[-1][1] if len(self.ends) == len(self._limits) else None

    def counts(self, rows: int) -> list[int]:
        """Rows of each source among the first `rows`."""
        place = bisect.bisect_right(self._stages, rows, key=lambda stage: stage.start) - 1
        return self._stages[place].counts(rows)

    def locate(self, row: int) -> tuple[int, int]:
        """The source of a row, and which of that source's rows it is.

        Raises:
          ValueError: every source has ended before.
        """
        if self.rows is not None and row >= self.rows:
            raise ValueError(
                f"row {row}: every source has given its epochs after {self.rows} rows; raise "
                "data.epochs or train fewer steps"
            )
        before, after = self.counts(row), self.counts(row + 1)
        source = next(s for s, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return source, before[source]


def _shares(
    active: Sequence[int], weights: Sequence[float], seed: int
) -> tuple[tuple[int, int, int], ...]:
    rest = sum(Fraction(weights[source]) for source in active)
    shares = []
    for source in active:
        weight = Fraction(weights[source])
        # The last one's is exactly 1, so that no row is left over.
        shares.append((source, int(weight / rest * _ONE), word("mixture", seed, source)))
        rest -= weight
    return tuple(shares)


def _full(stage: _Stage, source: int, limit: int) -> int:
    """The smallest number of rows that holds `limit` of a source."""
    return bisect.bisect_left(range(_END), limit, key=lambda rows: stage.counts(rows)[source])
