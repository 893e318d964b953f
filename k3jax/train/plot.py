"""Pictures of runs: loss, validation, learning rate, throughput, and the balance of the experts."""

import os
import pathlib
from collections.abc import Mapping, Sequence

from k3jax.train.metrics import read_records

Runs = Mapping[str, Sequence[dict]]  # name -> records of its metrics file


def plot_run(
    metrics: os.PathLike, output: os.PathLike, baselines: Mapping[str, float] | None = None
) -> bool:
    """Draws one metrics file into a PNG; see `plot_runs`."""
    return plot_runs({"": metrics}, output, baselines)


def plot_runs(
    metrics: Mapping[str, os.PathLike],
    output: os.PathLike,
    baselines: Mapping[str, float] | None = None,
) -> bool:
    """Draws several runs over each other into one PNG.

    Curves share their axes; each run with experts gets a map of its last recorded load, layers
    down and experts across, in units of the mean load: an evenly spread layer is 1 everywhere.

    Args:
      metrics: Name in the legend -> a file written by `MetricsFile`.
      output: The PNG to write.
      baselines: Bits per byte of other predictors of the same text, drawn as lines.

    Returns:
      False when matplotlib is not installed: a run must not fail at its last line for a picture.

    Raises:
      ValueError: a file is missing or holds no step.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # no display on the machines that train
    from matplotlib import pyplot

    runs = {name: _records(path) for name, path in metrics.items()}
    loads = {name: load for name, records in runs.items() if (load := last_load(records))}
    heights = (3, 3, 1, 1, *(1.5,) * len(loads))
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=(8, 1.6 * sum(heights) / 1.4), height_ratios=heights,
        constrained_layout=True,
    )  # fmt: skip
    loss, validation, rate, speed, *maps = axes
    _curves(loss, runs, "loss", "training loss\n[nats / token]", linewidth=0.8)
    _validation(validation, runs, baselines or {})
    _curves(rate, runs, "learning_rate", "learning rate")
    _curves(speed, runs, "tokens_per_second", "tokens / s")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("step")
    for other in (loss, validation, rate):
        other.sharex(speed)
    for plain in (loss, validation, rate, speed):
        plain.grid(alpha=0.3)
    for place, (name, (step, load)) in zip(maps, loads.items(), strict=True):
        _balance(figure, place, name, step, load)
    figure.savefig(pathlib.Path(output), dpi=120)
    pyplot.close(figure)
    return True


def last_load(records: Sequence[dict]) -> tuple[int, list[list[float]]] | None:
    """(step, load / mean load [L_moe][E]) of the last `balance` record, or None."""
    found = [r for r in records if r["kind"] == "balance"]
    if not found:
        return None
    rows = found[-1]["load"]
    means = [max(sum(row) / len(row), 1e-9) for row in rows]
    return found[-1]["step"], [[n / m for n in row] for row, m in zip(rows, means, strict=True)]


def _records(path: os.PathLike) -> list[dict]:
    records = list(read_records(path))
    if not any(r["kind"] == "train" for r in records):
        raise ValueError(
            f"{str(path)!r} holds no training step; give the workdir of a run that has trained"
        )
    return records


def _curves(axes, runs: Runs, field: str, label: str, **style) -> None:
    for name, records in runs.items():
        shown = [r for r in records if r["kind"] == "train" and r.get(field) is not None]
        axes.plot([r["step"] for r in shown], [r[field] for r in shown], label=name, **style)
    axes.set_ylabel(label)
    if len(runs) > 1:
        axes.legend(fontsize=8)


def _validation(axes, runs: Runs, baselines: Mapping[str, float]) -> None:
    """Bits per byte where the text has bytes, loss per token otherwise."""
    checks = {n: [r for r in records if r["kind"] == "validation"] for n, records in runs.items()}
    by_byte = all(any("bits_per_byte" in r for r in records) for records in checks.values())
    field = "bits_per_byte" if by_byte else "loss"
    for number, (name, records) in enumerate(checks.items()):
        shown = [r for r in records if field in r]
        for full, marker, label in ((False, ".-", "subset"), (True, "*", "all validation")):
            part = [r for r in shown if bool(r.get("full")) == full]
            color = "k" if full and len(runs) == 1 else f"C{number}"
            axes.plot(
                [r["step"] for r in part], [r[field] for r in part], marker, color=color,
                label=f"{name} {label}".strip(),
            )  # fmt: skip
    for index, (name, value) in enumerate(baselines.items()):
        color = f"C{len(runs) + index}"
        axes.axhline(value, linestyle="--", linewidth=1, color=color, label=name)
    unit = "bits / byte" if by_byte else "nats / token"
    axes.set_ylabel(f"validation\n[{unit}]")
    axes.legend(fontsize=8)


def _balance(figure, axes, name: str, step: int, load: list[list[float]]) -> None:
    """Colours from 0 to twice the mean; a hotter expert has the last colour."""
    image = axes.imshow(load, aspect="auto", cmap="coolwarm", vmin=0, vmax=2, interpolation="none")
    axes.set_yticks(range(0, len(load), max(1, len(load) // 8)))
    axes.set_ylabel("MoE layer")
    axes.set_xlabel(f"{name + ': ' if name else ''}expert; load / mean load at step {step}")
    figure.colorbar(image, ax=axes, extend="max")
