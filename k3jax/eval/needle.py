"""Needle retrieval: does the model repeat a value that it has read, by length and by depth?

Every cell of the table is judged twice: greedy cached generation must give the answer's tokens
exactly, and the answer's log-probability is taken teacher-forced, which tells weak models apart.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax.eval.haystack import Case, Haystack
from k3jax.eval.score import Pair, fill, score
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.generate import Generator
from k3jax.models.kimi_k3.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class NeedleConfig:
    """The table to fill.

    Attributes:
      lengths: Tokens of a prompt, <|bos|> and question included.
      depths: Where the needle stands, 0 (beginning) to 1 (right before the question).
      trials: Prompts in a cell.
      seed: Of keys, values and filling.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 10
    seed: int = 0

    def __post_init__(self):
        if not self.lengths or not self.depths:
            raise ValueError(
                f"needle_lengths={self.lengths}, needle_depths={self.depths}: give one at least"
            )
        for depth in self.depths:
            if not 0.0 <= depth <= 1.0:
                raise ValueError(f"needle_depths={depth}: a depth lies in [0, 1]; 1 is the end")
        if self.trials < 1:
            raise ValueError(f"needle_trials={self.trials}: must be at least 1; raise it")


class Cell(NamedTuple):
    """One length and depth.

    Attributes:
      length: Tokens of the prompt.
      depth: 0 to 1.
      accuracy: Share of trials whose greedy answer is exact.
      log_probability: Mean over trials of Σ log p of the answer's tokens, nats.
    """

    length: int
    depth: float
    accuracy: float
    log_probability: float


Cases = dict[tuple[int, float], list[Case]]  # by length and depth


def prepare(haystack: Haystack, wanted: NeedleConfig) -> Cases:
    """All prompts, lengths outermost; nothing runs yet.

    Args:
      haystack: Makes the prompts.
      wanted: The table.

    Raises:
      ValueError: a length does not hold needle and question.
    """
    trials = range(wanted.trials)
    return {
        (length, depth): [_case(haystack, wanted.seed, length, depth, trial) for trial in trials]
        for length in wanted.lengths
        for depth in wanted.depths
    }


def run(
    cfg: ModelConfig, variables: Any, vocab_size: int, cases: Cases, batch_size: int
) -> list[Cell]:
    """Fills the table, in the order of `cases`. One bucket of lengths compiles once.

    A prompt is read in one pass through the cache: KDA keeps a state of constant size, latent
    attention a row per token, and logits exist for the last token alone.

    Args:
      cfg: The model.
      variables: {"params", "router"}.
      vocab_size: Ids that may be generated.
      cases: From `prepare`.
      batch_size: Prompts that run together.

    Raises:
      ValueError: the logits are not finite.
    """
    table = []
    for length in dict.fromkeys(length for length, _ in cases):
        here = {cell: cases[cell] for cell in cases if cell[0] == length}
        flat = [case for trials in here.values() for case in trials]
        pairs = [Pair(case.prompt, case.answer) for case in flat]
        scores = score(cfg, variables, pairs, batch_size)  # first: it says where NaN is
        exact = _exact(Generator(cfg, vocab_size), variables, flat, batch_size)
        accuracy = np.reshape(exact, (len(here), -1)).mean(axis=1)
        nats = np.reshape([s.log_probability for s in scores], (len(here), -1)).mean(axis=1)
        columns = zip(here, accuracy.tolist(), nats.tolist(), strict=True)
        table += [Cell(*cell, right, logp) for cell, right, logp in columns]
    return table


def _case(haystack: Haystack, seed: int, length: int, depth: float, trial: int) -> Case:
    # Other depths and lengths may be added without changing this cell.
    draw = np.random.default_rng((seed, length, round(depth * 10**6), trial))
    return haystack.case(length, depth, draw)


def _exact(
    generator: Generator, variables: Any, cases: Sequence[Case], batch_size: int
) -> list[bool]:
    """Whether greedy generation gives each answer; every batch has the same number of rows."""
    count = max(len(case.answer) for case in cases)
    size = fill(batch_size)
    exact = []
    for start in range(0, len(cases), size):
        batch = list(cases[start : start + size])
        prompts = [case.prompt.tolist() for case in batch]
        prompts += prompts[-1:] * (size - len(batch))
        made = generator.generate(variables, prompts, count, Sampling(0.0), jax.random.key(0))
        for case, row in zip(batch, made, strict=False):
            exact.append(row[: len(case.answer)].tolist() == case.answer.tolist())
    return exact


def format_table(cells: Sequence[Cell], field: str, form: str) -> str:
    """A table of one field, a row per length and a column per depth.

    Args:
      cells: From `run`.
      field: "accuracy" or "log_probability".
      form: Format of a number, as ".2f".
    """
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    lines = ["length  " + "".join(f"{depth:>9g}" for depth in depths)]
    for length in dict.fromkeys(cell.length for cell in cells):
        row = [getattr(cell, field) for cell in cells if cell.length == length]
        lines.append(f"{length:>6}  " + "".join(f"{value:>9{form}}" for value in row))
    return "\n".join(lines)


def report(cells: Sequence[Cell], log: Callable[[str], None]) -> None:
    """Prints both tables."""
    log("needle: share of exact answers, by prompt length and depth")
    log(format_table(cells, "accuracy", ".2f"))
    log("needle: mean log-probability of the answer [nats]")
    log(format_table(cells, "log_probability", ".2f"))
