"""Named sources of text with their weights and bounds, read from the configuration's words."""

import dataclasses
import difflib
import math
import re
from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Source:
    """One source of a mixture.

    Attributes:
      name: in logs, results and document names; "" for the only source of `data.source`.
      location: what `text.read_documents` takes.
      weight: share of the training rows, relative to the other sources; None is by size.
      epochs: the source gives no more rows after so many passes; None is without end.
    """

    name: str
    location: str
    weight: float | None = None
    epochs: float | None = None

    @property
    def setting(self) -> str:
        """The configuration's words before the location, for messages."""
        return f"data.sources={self.name}" if self.name else "data.source"


def parse(
    source: str, sources: Sequence[str], weights: Sequence[str], epochs: Sequence[str]
) -> tuple[Source, ...]:
    """The sources of a `DataConfig`, in order.

    Args:
      source: location of the only source, for empty `sources`.
      sources: "name=location" each.
      weights: "name=number" for every source, or for none.
      epochs: "name=number" for some sources.

    Raises:
      ValueError: a name is unknown, given twice or without a weight; a number is not positive.
    """
    if not sources:
        for field, entries in (("weights", weights), ("epochs", epochs)):
            if entries:
                raise ValueError(
                    f"data.{field}={','.join(entries)}: there is only data.source, which has no "
                    f"name; name it, for example data.sources=code={source}"
                )
        return (Source("", source),)
    located = _pairs("sources", sources)
    for name, location in located.items():
        if not _NAME.fullmatch(name) or not location:
            raise ValueError(
                f"data.sources={name}={location}: a source is NAME=LOCATION, its name letters, "
                "digits, '.', '_' and '-'; write for example code=src/**/*.py"
            )
    numbers = {
        field: _numbers(field, entries, located)
        for field, entries in (("weights", weights), ("epochs", epochs))
    }
    without = [name for name in located if name not in numbers["weights"]]
    if weights and without:
        raise ValueError(
            f"data.weights={','.join(weights)}: source {without[0]!r} has no weight; give every "
            "source one, or none for shares by size"
        )
    return tuple(
        Source(name, location, numbers["weights"].get(name), numbers["epochs"].get(name))
        for name, location in located.items()
    )


def _pairs(field: str, entries: Sequence[str]) -> dict[str, str]:
    found = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or name in found:
            fault = "comes twice" if equals else "lacks its '='"
            raise ValueError(
                f"data.{field}={','.join(entries)}: {name!r} {fault}; write NAME=VALUE once for "
                "each source, with commas between"
            )
        found[name] = value
    return found


def _numbers(field: str, entries: Sequence[str], present: dict[str, str]) -> dict[str, float]:
    numbers = {}
    for name, text in _pairs(field, entries).items():
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"data.{field}={name}={text}: there is no source {name!r}; data.sources has "
                f"{', '.join(present)}{hint}"
            )
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = math.nan
        if not 0.0 < numbers[name] < math.inf:
            raise ValueError(
                f"data.{field}={name}={text}: must be a positive number; leave a source out of "
                "data.sources to read nothing of it"
            )
    return numbers
