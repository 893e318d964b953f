"""Validation: loss per token and bits per byte over a fixed list of batches."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import jax

from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.train.feed import place
from k3jax.train.loss import Batch, forward_nll
from k3jax.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Sums over a validation set.

    Attributes:
      nll: Σ -log p, nats.
      tokens: Predicted tokens.
      size: Bytes of the text they spell; 0 where the task has no text.
    """

    nll: float
    tokens: float
    size: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Nats / (ln 2 · bytes): comparable between tokenizers, and with compressors."""
        return self.nll / math.log(2) / self.size if self.size else None


@functools.lru_cache(maxsize=8)
def compiled_eval(cfg: ModelConfig) -> Callable:
    """The compiled forward pass: (params, router, batch [B, T]) -> (Σ w·nll, Σ w), float32.

    It counts no router statistics and returns no state: validation cannot move the bias.
    """

    def step(params, router, batch: Batch):
        nll, _ = forward_nll(cfg, params, router, batch, train=False)
        return nll, batch["weights"].sum()

    return jax.jit(step)


def evaluate(step: Callable, state: TrainState, batches: Iterable[dict], size: int) -> Evaluation:
    """Runs a validation set.

    Args:
      step: From `compiled_eval`.
      state: Only `params` and `router` are read.
      batches: Host batches of one shape.
      size: Bytes that the targets of `batches` spell.

    Raises:
      ValueError: `batches` is empty.
    """
    sums = [step(state.params, state.router, place(batch)) for batch in batches]
    if not sums:
        raise ValueError("validation holds no batch; raise data.validation_fraction")
    # Batch sums are float32, their total float64: a long validation set loses nothing.
    nll, tokens = (
        math.fsum(float(value) for value in column) for column in zip(*sums, strict=True)
    )
    return Evaluation(nll, tokens, size)
