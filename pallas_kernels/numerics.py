"""Error measures, tolerances and golden fills that the tests share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Relative L2 error allowed against a float64 oracle, by dtype of the inputs and by quantity.
# float32: a few hundred roundings of 2^-24 with mild amplification; bfloat16: operands of 2^-9.
FORWARD_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
GRADIENT_TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def relative_error(actual: jax.Array, expected: jax.Array) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64 (absolute when `expected` is zero)."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    norm = np.linalg.norm(e)
    return float(np.linalg.norm(a - e) / (norm if norm > 0 else 1.0))


def cosine(actual: jax.Array, expected: jax.Array) -> float:
    """Cosine of the angle between two arrays taken as vectors, in float64."""
    a, e = np.asarray(actual, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    return float(a @ e / (np.linalg.norm(a) * np.linalg.norm(e)))


def det(shape: tuple[int, ...], a: float, b: float) -> np.ndarray:
    """Deterministic fill sin(a·n + b), n the flat index; the golden vectors' inputs. float64."""
    return np.sin(a * np.arange(np.prod(shape)) + b).reshape(shape)


def tree_relative_error(actual: Any, expected: Any) -> dict[str, float]:
    """Relative error per leaf, keyed by the leaf's path in `expected`.

    Raises:
      ValueError: the trees differ in their number of leaves.
    """
    flat = jax.tree_util.tree_flatten_with_path(expected)[0]
    leaves = jax.tree.leaves(actual)
    return {
        jax.tree_util.keystr(path): relative_error(jnp.asarray(a), e)
        for (path, e), a in zip(flat, leaves, strict=True)
    }
