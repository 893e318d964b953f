"""The first steps of a recipe on this machine: compilation, step time, utilisation, memory."""

import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from k3jax.data.iterator import ResumableBatches
from k3jax.models.kimi_k3 import counting
from k3jax.parallel.mesh import make_mesh
from k3jax.train.config import RunConfig
from k3jax.train.feed import Feed, Source
from k3jax.train.plan import make_plan
from k3jax.train.state import initial_state
from k3jax.train.step import compiled_step, run_optimizer
from k3jax.train.task import make_task
from k3jax.train.utilisation import GIB, peak_flops, utilisation

SYNTHETIC, TASK = "synthetic", "task"


class SyntheticTokens(ResumableBatches):
    """Batches [B, T] of one document a row, ids drawn log-uniformly: id i has weight ln(1 + 1/i).

    No files and no tokenizer. A model learns the frequencies, so its loss falls from ln V towards
    their entropy within the first steps.
    """

    def __init__(self, vocab: int, batch_size: int, sequence_length: int, seed: int = 0):
        """Starts at batch 0; ids lie in [1, vocab)."""

        def row(index: int) -> dict[str, np.ndarray]:
            draw = np.random.default_rng((seed, index)).random(sequence_length + 1)
            ids = np.minimum(np.floor(vocab**draw), vocab - 1).astype(np.int32)
            ones = np.ones(sequence_length, np.int32)
            return {
                "tokens": ids[:-1],
                "targets": ids[1:],
                "segment_ids": ones,
                "weights": ones.astype(np.float32),
                "document_ids": np.zeros(sequence_length, np.int32),
            }

        identity = {"task": SYNTHETIC, "vocab": vocab, "length": sequence_length, "seed": seed}
        super().__init__(row, batch_size, identity, lambda index, _: f"row {index}")


def source(cfg: RunConfig, kind: str, log: Callable[[str], None] = print) -> Source:
    """Training batches: `synthetic`, or `task` for the recipe's own text or recall lists.

    Raises:
      ValueError: the kind is unknown, or the recipe's text cannot be read.
    """
    if kind == SYNTHETIC:
        sizes = cfg.train.batch_size, cfg.data.sequence_length
        return SyntheticTokens(cfg.model.vocab_size, *sizes, seed=cfg.data.seed)
    if kind == TASK:
        return make_task(cfg, log).batches
    raise ValueError(f"data {kind!r}: choose {SYNTHETIC} or {TASK}")


def measure(cfg: RunConfig, batches: Source, steps: int, clock=time.perf_counter) -> dict[str, Any]:
    """Compiles the recipe's step, runs it `steps` times and waits for each.

    Batches are made beforehand, one at a time, off the clock.

    Args:
      cfg: the run; its schedule is laid out over `cfg.train.steps`, not over `steps`.
      batches: from `source`.
      steps: at least 4: the first is left out of the times, and quartiles need three.
      clock: returns seconds.

    Returns:
      JSON values: seconds to trace, compile and initialise; step_seconds (median, quartiles);
      tokens per second and training FLOPs per token; utilisation with the peak it refers to;
      bytes of memory; losses of the first and the last step.

    Raises:
      ValueError: too few steps, too few devices, or a loss that is no finite number.
    """
    if steps < 4:
        raise ValueError(f"steps={steps}: the first is not timed and three must be; use 4 or more")
    with jax.set_mesh(make_mesh(cfg.train.mesh)):
        devices = list(jax.sharding.get_mesh().devices.flat)
        feed, marks = Feed(batches, cfg.train.micro_batches), [clock()]
        state = jax.block_until_ready(
            initial_state(cfg.model, run_optimizer(cfg.optimizer, cfg.train.steps), cfg.train.seed)
        )
        marks.append(clock())
        lowered = compiled_step(cfg.model, cfg.optimizer, cfg.train.steps).lower(
            state, feed.take()[0]
        )
        marks.append(clock())
        compiled = lowered.compile()
        marks.append(clock())
        rows = list(_run(compiled, state, feed, steps, clock))
    initialise, trace, compile_ = np.diff(marks).tolist()
    return {
        "seconds": {"initialise": initialise, "trace": trace, "compile": compile_},
        **_speed(cfg, rows, devices),
        "memory": _memory(cfg, compiled, devices),
        "losses": {"first": finite(rows[0][2]), "last": finite(rows[-1][2])},
    }


def _run(compiled, state, feed: Feed, steps: int, clock) -> Iterator[tuple[float, int, float]]:
    """(seconds, tokens, loss) of each step."""
    for _ in range(steps):
        pieces = jax.block_until_ready(feed.take()[0])
        start = clock()
        state, measured = jax.block_until_ready(compiled(state, pieces))
        yield clock() - start, int(measured.tokens), float(measured.loss)


def _speed(cfg: RunConfig, rows, devices) -> dict[str, Any]:
    seconds = [row[0] for row in rows[1:]]
    low, median, high = statistics.quantiles(seconds, n=4)
    rate = statistics.median(row[1] for row in rows[1:]) / median
    flops = counting.flops_per_token(cfg.model, cfg.data.sequence_length)
    peak, origin = peak_flops(devices[0])
    # A CPU's peak is measured over the host, however many devices it is cut into.
    count = 1 if devices[0].platform == "cpu" else len(devices)
    return {
        "steps": len(rows),
        "step_seconds": {"median": median, "quartiles": [low, high]},
        "tokens_per_second": rate,
        "flops_per_token": flops,
        "utilisation": None if peak is None else utilisation(rate, flops, peak * count),
        "peak_flops": {"each": peak, "devices": count, "source": origin},
    }


def _memory(cfg: RunConfig, compiled, devices) -> dict[str, int | None]:
    """Bytes on one device: as the allocator saw them, as compiled, and as planned."""
    stats, analysis = devices[0].memory_stats() or {}, compiled.memory_analysis()
    return {
        "peak_in_use": stats.get("peak_bytes_in_use"),
        "compiled_arguments": analysis.argument_size_in_bytes,
        "compiled_temporary": analysis.temp_size_in_bytes,
        "planned_peak": make_plan(cfg, GIB).bytes.peak,
    }


def finite(loss: float) -> float:
    """The loss, unless it is no finite number, which JSON could not hold either.

    Raises:
      ValueError: it is none.
    """
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss}: the run diverged and its times say nothing; lower "
            "optimizer.peak_lr"
        )
    return loss


def device_name(device: jax.Device) -> str:
    """A device's kind as a part of a file name: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_")
