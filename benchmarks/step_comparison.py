"""The training step of a recipe beside the same step with every op's reference implementation.

The reference is what a straightforward port would be: KDA one token after another, attention with
all scores, every expert on every token, all logits at once. Parameters, optimizer, batches and the
rest of the program are the same. All arms live in one process and take turns, so that what else
the machine does falls on each of them.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from k3jax.optim import optimizer
from k3jax.parallel.mesh import make_mesh
from k3jax.train.config import RunConfig
from k3jax.train.feed import Feed
from k3jax.train.state import initial_state
from k3jax.train.step import run_optimizer, train_step
from k3jax.train.task import make_task

OPS = ("kda", "attention", "experts", "cross_entropy")
ARMS: dict[str, tuple[str, ...]] = {"ours": (), "reference": OPS}
EACH = {f"reference {op}": (op,) for op in OPS}
# The arms compute one function; float32 sums in another order through five layers.
SAME_LOSS = 1e-3


def with_references(cfg: RunConfig, ops: Sequence[str]) -> tuple[RunConfig, str | None]:
    """The run with the references of `ops`, and the cross-entropy's implementation.

    Raises:
      ValueError: an op is unknown.
    """
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise ValueError(f"op {unknown[0]!r} is unknown; there are {', '.join(OPS)}")
    parts = {"kda": "kda", "attention": "mla", "experts": "moe"}
    changes = {
        field: dataclasses.replace(getattr(cfg.model, field), implementation="reference")
        for op, field in parts.items()
        if op in ops
    }
    model = dataclasses.replace(cfg.model, **changes)
    loss = "reference" if "cross_entropy" in ops else None
    return dataclasses.replace(cfg, model=model), loss


def with_row_length(cfg: RunConfig, length: int) -> RunConfig:
    """The run with rows of `length` tokens and as many tokens in a batch as before.

    Raises:
      ValueError: the batch is no multiple of the length.
    """
    tokens = cfg.train.batch_size * cfg.data.sequence_length
    if length < 2 or tokens % length:
        raise ValueError(
            f"row length {length} does not divide the batch of {tokens} tokens; choose a divisor"
        )
    return dataclasses.replace(
        cfg,
        data=dataclasses.replace(cfg.data, sequence_length=length),
        train=dataclasses.replace(cfg.train, batch_size=tokens // length),
    )


class Arm:
    """One compiled step and its own training state."""

    def __init__(self, cfg: RunConfig, ops: Sequence[str], pieces):
        """Compiles for batches like `pieces`."""
        cfg, loss = with_references(cfg, ops)
        tx = run_optimizer(cfg.optimizer, cfg.train.steps)
        rate = optimizer.learning_rate(cfg.optimizer, cfg.train.steps)
        step = jax.jit(
            train_step(cfg.model, tx, rate, qk_clip=cfg.optimizer.qk_clip, implementation=loss),
            donate_argnums=0,
        )
        self._state = initial_state(cfg.model, tx, cfg.train.seed)
        start = time.perf_counter()
        self._step = step.lower(self._state, pieces).compile()
        self.compile_seconds = time.perf_counter() - start
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def run(self, pieces) -> int:
        """One update, timed; returns the tokens it read."""
        start = time.perf_counter()
        self._state, measured = jax.block_until_ready(self._step(self._state, pieces))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(measured.loss))
        return int(measured.tokens)


def compare(
    cfg: RunConfig,
    arms: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    warmup: int = 2,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Times the arms in turn on the run's own batches.

    Args:
      cfg: The run; its rows, batch and optimizer are taken as they are.
      arms: Name -> the ops that use their reference; the first is the one others are held against.
      rounds: Updates of every arm that count.
      warmup: Updates before them.
      log: Receives every console line.

    Returns:
      JSON values: row length, batch, tokens of a step, and for every arm compile_seconds,
      step_seconds (median, quartiles), tokens_per_second (of the median), and times_slower, the
      ratio to the first arm within a round (median, quartiles).

    Raises:
      ValueError: too few rounds, or the arms' first losses differ: they are not one model.
    """
    if rounds < 3:
        raise ValueError(f"rounds={rounds}: quartiles need at least 3; raise it")
    with jax.set_mesh(make_mesh(cfg.train.mesh)):
        feed = Feed(make_task(cfg, log).batches, cfg.train.micro_batches)
        first, _ = feed.take()
        made = {}
        for name, ops in arms.items():
            made[name] = Arm(cfg, ops, first)
            log(f"{name}: compiled in {made[name].compile_seconds:.1f} s")
        tokens = 0
        for index in range(warmup + rounds):
            pieces = first if index == 0 else feed.take()[0]
            for arm in made.values():
                tokens = arm.run(pieces)
            if index == 0:
                _check_same(made)
    result = {
        "sequence_length": cfg.data.sequence_length,
        "batch_size": cfg.train.batch_size,
        "tokens_per_step": tokens,
        "rounds": rounds,
        "arms": {},
    }
    base = next(iter(made.values())).seconds[warmup:]
    for name, arm in made.items():
        seconds = arm.seconds[warmup:]
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        result["arms"][name] = {
            "reference_ops": list(arms[name]),
            "compile_seconds": arm.compile_seconds,
            "step_seconds": spread(seconds),
            "tokens_per_second": tokens / statistics.median(seconds),
            "times_slower": spread(ratios),
            "first_loss": arm.losses[0],
        }
        log(line(name, result["arms"][name]))
    return result


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "quartiles": [low, high]}


def line(name: str, arm: Mapping[str, Any]) -> str:
    """One arm for the console."""
    low, high = arm["times_slower"]["quartiles"]
    return (
        f"{name}: {arm['step_seconds']['median'] * 1e3:.1f} ms a step, "
        f"{arm['tokens_per_second']:,.0f} tokens/s, {arm['times_slower']['median']:.2f} "
        f"({low:.2f} to {high:.2f}) times the first arm's time"
    )


def _check_same(arms: Mapping[str, Arm]) -> None:
    losses = {name: arm.losses[0] for name, arm in arms.items()}
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        if not abs(loss - first) < SAME_LOSS:
            raise ValueError(
                f"the first loss of {name!r} is {loss}, of the first arm {first}: they do not "
                "compute one model, so their times say nothing; find the op that differs"
            )
