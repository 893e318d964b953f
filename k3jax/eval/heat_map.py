"""The picture of a needle table."""

import os
from collections.abc import Sequence

import numpy as np

from k3jax.eval.needle import Cell


def draw(cells: Sequence[Cell], output: os.PathLike) -> bool:
    """Draws accuracy by depth and length into a PNG.

    Args:
      cells: From `needle.run`: every length with the same depths.
      output: The PNG to write.

    Returns:
      False when matplotlib is not installed: numbers must not be lost for a picture.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = list(dict.fromkeys(cell.length for cell in cells))
    depths = list(dict.fromkeys(cell.depth for cell in cells))
    shares = np.reshape([cell.accuracy for cell in cells], (len(lengths), len(depths))).T
    size = (2.5 + 0.8 * len(lengths), 2.0 + 0.5 * len(depths))
    figure, axes = pyplot.subplots(figsize=size, constrained_layout=True)
    image = axes.imshow(shares, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("prompt [tokens]")
    axes.set_ylabel("depth of the needle")
    for (row, column), share in np.ndenumerate(shares):
        axes.text(column, row, f"{share:.2f}", ha="center", va="center")
    figure.colorbar(image, label="exact answers")
    figure.savefig(output, dpi=120)
    pyplot.close(figure)
    return True
