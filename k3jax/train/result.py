"""The end of a run: the table, `result.json` and the picture."""

import json
import pathlib
from collections.abc import Callable, Mapping

from k3jax.models.kimi_k3.evaluate import Evaluation
from k3jax.train.config import RunConfig
from k3jax.train.plot import plot_run
from k3jax.train.task import Task
from k3jax.train.workdir import write_whole


def finish(
    cfg: RunConfig,
    workdir: pathlib.Path,
    task: Task,
    validation: Evaluation,
    log: Callable[[str], None],
) -> dict:
    """Compares the final validation with the baselines, writes and prints it.

    Returns:
      What `result.json` holds: step, loss [nats per token], tokens; with text also
      bits_per_byte, bytes, and baselines, bits per byte by name; with several sources also these
      sums of each in `sources`, and `mix`, the share of the training rows by source.
    """
    result = {"step": cfg.train.steps, **sums(validation), **task.mix(cfg.train.steps)}
    baselines = task.baselines()
    if validation.bits_per_byte is not None:
        result["baselines"] = baselines
        log(table(validation.bits_per_byte, baselines, validation.size))
    if validation.sources:
        result["sources"] = {name: sums(one) for name, one in validation.sources.items()}
        log(sources_table(result["sources"], result["mix"]))
    write_whole(workdir / "result.json", json.dumps(result, indent=1) + "\n")
    drawn = plot_run(workdir / "metrics.jsonl", workdir / "plot.png", baselines)
    log(f"results in {workdir}" if drawn else f"results in {workdir}; no plot: no matplotlib here")
    return result


def sums(validation: Evaluation) -> dict[str, float]:
    """loss [nats per token] and tokens; with text also bits_per_byte and bytes."""
    found = {"loss": validation.loss, "tokens": int(validation.tokens)}
    if validation.bits_per_byte is not None:
        found |= {"bits_per_byte": validation.bits_per_byte, "bytes": validation.size}
    return found


def sources_table(sources: Mapping[str, Mapping[str, float]], mix: Mapping[str, float]) -> str:
    """Validation of each source, and the share that it had of training.

    Example:
        by source  bits per byte    loss        bytes  trained on
        code               1.492  4.0321      612,345       70.0%
    """
    width = max(map(len, [*sources, "by source"]))
    lines = [f"{'by source':{width}}  bits per byte    loss        bytes  trained on"]
    for name, one in sources.items():
        lines.append(
            f"{name:{width}}  {one['bits_per_byte']:13.3f}  {one['loss']:6.4f}  "
            f"{one['bytes']:11,}  {mix[name]:10.1%}"
        )
    return "\n".join(lines)


def table(bits_per_byte: float, baselines: Mapping[str, float], size: int) -> str:
    """The model among the baselines, worst first.

    Example:
        bits per byte of 612,345 bytes of validation text
          gzip concatenated  1.570
        > this model         1.492
    """
    rows = sorted([*baselines.items(), ("this model", bits_per_byte)], key=lambda r: -r[1])
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{'>' if name == 'this model' else ' '} {name.replace('_', ' '):{width}}  {value:.3f}"
        for name, value in rows
    ]
    return "\n".join([f"bits per byte of {size:,} bytes of validation text", *lines])
