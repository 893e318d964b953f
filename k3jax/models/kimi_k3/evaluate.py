"""Validation: loss per token and bits per byte over fixed lists of batches, one a source."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.loss import Batch, forward_nll, place


@dataclasses.dataclass(frozen=True)
class Part:
    """A validation set: `batches()` starts anew each time; `size` is its bytes of text, or 0."""

    batches: Callable[[], Iterator[dict[str, np.ndarray]]]
    size: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Sums over a validation set.

    Attributes:
      nll: Σ -log p, nats.
      tokens: Predicted tokens.
      size: Bytes of the text they spell; 0 where the task has no text.
      sources: The same of each source by name; empty where there is only one.
    """

    nll: float
    tokens: float
    size: int
    sources: Mapping[str, "Evaluation"] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Nats / (ln 2 · bytes): comparable between tokenizers, and with compressors."""
        return self.nll / math.log(2) / self.size if self.size else None

    def record(self) -> dict[str, Any]:
        """loss, bits_per_byte where there is text, and sources likewise, as JSON values."""
        record = {"loss": self.loss}
        if self.bits_per_byte is not None:
            record["bits_per_byte"] = self.bits_per_byte
        if self.sources:
            record["sources"] = {name: one.record() for name, one in self.sources.items()}
        return record

    def line(self) -> str:
        """The same for the console."""
        text = f"validation loss {self.loss:.4f}"
        if self.bits_per_byte is not None:
            text += f"  bits per byte {self.bits_per_byte:.4f}"
        each = [f"{name} {one.bits_per_byte:.4f}" for name, one in self.sources.items()]
        return f"{text}  ({', '.join(each)})" if each else text


@functools.lru_cache(maxsize=8)
def compiled_eval(cfg: ModelConfig) -> Callable:
    """The compiled forward pass: (params, router, batch [B, T]) -> (Σ w·nll, Σ w), float32.

    It counts no router statistics and returns no state: validation cannot move the bias.
    """

    def step(params, router, batch: Batch):
        nll, _ = forward_nll(cfg, params, router, batch, train=False)
        return nll, batch["weights"].sum()

    return jax.jit(step)


def evaluate(step: Callable, variables: Any, parts: Mapping[str, Part]) -> Evaluation:
    """Runs validation sets; the total is that of their text as one.

    Args:
      step: From `compiled_eval`.
      variables: {"params", "router"}.
      parts: Validation sets by source, all batches of one shape.

    Raises:
      ValueError: a set is empty.
    """
    each = {name: _evaluate(step, variables, name, part) for name, part in parts.items()}
    if len(each) == 1:
        return next(iter(each.values()))
    nll, tokens, size = (
        sum(values)
        for values in zip(*((e.nll, e.tokens, e.size) for e in each.values()), strict=True)
    )
    return Evaluation(nll, tokens, size, each)


def _evaluate(step: Callable, variables: Any, name: str, part: Part) -> Evaluation:
    params, router = variables["params"], variables["router"]
    sums = [step(params, router, place(batch)) for batch in part.batches()]
    if not sums:
        raise ValueError(f"validation of {name!r} holds no batch; raise data.validation_fraction")
    # Batch sums are float32, their total float64: a long validation set loses nothing.
    nll, tokens = (
        math.fsum(float(value) for value in column) for column in zip(*sums, strict=True)
    )
    return Evaluation(nll, tokens, part.size)
