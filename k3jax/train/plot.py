"""The picture at the end of a run: training loss, validation against baselines, learning rate."""

import os
import pathlib
from collections.abc import Mapping

from k3jax.train.metrics import read_records


def plot_run(
    metrics: os.PathLike, output: os.PathLike, baselines: Mapping[str, float] | None = None
) -> bool:
    """Draws a metrics file into a PNG.

    Args:
      metrics: A file written by `MetricsFile`.
      output: The PNG to write.
      baselines: Bits per byte of other predictors of the same text, drawn as lines.

    Returns:
      False when matplotlib is not installed: a run must not fail at its last line for a picture.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # no display on the machines that train
    from matplotlib import pyplot

    records = list(read_records(metrics))
    train = [r for r in records if r["kind"] == "train"]
    figure, (loss, validation, rate) = pyplot.subplots(
        3, 1, figsize=(8, 10), height_ratios=(3, 3, 1), sharex=True, constrained_layout=True
    )
    loss.plot([r["step"] for r in train], [r["loss"] for r in train], linewidth=0.8)
    loss.set_ylabel("training loss [nats / token]")
    _validation(validation, [r for r in records if r["kind"] == "validation"], baselines or {})
    rate.plot([r["step"] for r in train], [r["learning_rate"] for r in train])
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    for axes in (loss, validation, rate):
        axes.grid(alpha=0.3)
    figure.savefig(pathlib.Path(output), dpi=120)
    pyplot.close(figure)
    return True


def _validation(axes, records: list[dict], baselines: Mapping[str, float]) -> None:
    """Bits per byte where the text has bytes, loss per token otherwise."""
    by_byte = [r for r in records if "bits_per_byte" in r]
    field = "bits_per_byte" if by_byte else "loss"
    shown = by_byte or records
    subset = [r for r in shown if not r.get("full")]
    full = [r for r in shown if r.get("full")]
    axes.plot([r["step"] for r in subset], [r[field] for r in subset], marker=".", label="subset")
    axes.plot([r["step"] for r in full], [r[field] for r in full], "k*", label="all validation")
    for index, (name, value) in enumerate(baselines.items()):
        axes.axhline(value, linestyle="--", linewidth=1, color=f"C{index + 1}", label=name)
    unit = "bits / byte" if by_byte else "nats / token"
    axes.set_ylabel(f"validation [{unit}]")
    axes.legend(fontsize=8)
