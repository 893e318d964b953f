"""Norms of gradients and updates by kind of parameter: where a run goes wrong first."""

from typing import Any

import jax
import jax.numpy as jnp


def norms_by_name(tree: Any) -> dict[str, jax.Array]:
    """Euclidean norm of all leaves of one name, over all layers together.

    Names are those of the optimizer's table (`muon.RULES`): `w_q`, `w_gate_up`, `embedding` and so
    on, some thirty for a model of any depth.

    Args:
      tree: nested dicts of arrays, shaped like the parameters.

    Returns:
      Leaf name -> float32 [].
    """
    squares: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path[-1].key
        square = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        squares[name] = squares[name] + square if name in squares else square
    return {name: jnp.sqrt(square) for name, square in sorted(squares.items())}
