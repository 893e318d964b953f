"""Refusals of calls that do not fit: the value got, the rule, and the way out, in one line."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import chunked
from pallas_kernels.kda.gate import check_lower_bound
from pallas_kernels.kda.inputs import Tokens

_STATE_AXES = "keys come before values, swap the last two axes of a value-first state"


def check_shape(
    name: str, array: jax.Array, axes: str, wanted: tuple[int, ...], way_out: str
) -> None:
    """Refuses an array that is not of the wanted shape.

    Raises:
      ValueError: it is not; the message gives both shapes, their axes and `way_out`.
    """
    if array.shape != wanted:
        raise ValueError(f"{name} has shape {array.shape}, must be [{axes}] = {wanted}; {way_out}")


def check_tokens(tokens: Tokens, lead: str = "B, T, H") -> None:
    """Shapes and dtypes of one call's tokens: [*lead, K], [*lead, V] and [*lead].

    Raises:
      ValueError: a shape does not fit v's, or a dtype is not a float.
    """
    q, k, v, g, beta = tokens
    rank = len(lead.split(", ")) + 1
    for name, x, width in (("k", k, "K"), ("v", v, "V")):
        if x.ndim != rank:
            raise ValueError(
                f"{name} has shape {x.shape}, must be [{lead}, {width}]; reshape it to {rank} axes"
            )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k has {k.shape[-2]} heads and v has {v.shape[-2]}: they must agree; "
            "repeat q, k and g to the heads of v"
        )
    keys, betas = (*v.shape[:-1], k.shape[-1]), v.shape[:-1]
    check_shape("k", k, f"{lead}, K", keys, f"cut or transpose it to the {lead} of v {v.shape}")
    for name, x in (("q", q), ("g", g)):
        check_shape(name, x, f"{lead}, K", keys, "repeat or transpose it to the shape of k")
    check_shape("beta", beta, lead, betas, "pass one write strength per token and head of v")
    for name, x in (("k", k), ("v", v), ("q", q), ("g", g), ("beta", beta)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: a float dtype is needed; cast it")


def check_gate(
    tokens: Tokens,
    a_log: jax.Array | None,
    dt_bias: jax.Array | None,
    lower_bound: float | None,
) -> None:
    """Gate arguments that belong together, and their shapes.

    Raises:
      ValueError: the bound is out of range, `a_log` is missing beside another, or a shape is wrong.
    """
    check_lower_bound(lower_bound)
    H, K = tokens.k.shape[-2:]
    if a_log is None:
        given = {"dt_bias": dt_bias, "lower_bound": lower_bound}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is given without a_log: g is then log-decay already, which no gate "
                    f"shapes; pass a_log as well, or leave {name} out"
                )
        return
    check_shape("a_log", a_log, "H", (H,), "pass one rate per head of k")
    if dt_bias is not None:
        check_shape("dt_bias", dt_bias, "H, K", (H, K), "reshape it to the heads and width of k")


def check_chunk_size(chunk_size: int | None) -> None:
    """Refuses a chunk size that the chunked form would have to replace silently.

    Raises:
      ValueError: `chunk_size` is neither None nor one of `chunked.CHUNK_SIZES`.
    """
    if chunk_size is not None and chunk_size not in chunked.CHUNK_SIZES:
        raise ValueError(
            f"chunk_size={chunk_size} is not one of {chunked.CHUNK_SIZES}; "
            "choose one, or None for the default"
        )


def check_segment_ids(tokens: Tokens, segment_ids: jax.Array | None) -> None:
    """Shape and dtype of segment ids; their values are checked on the host, where rows are made.

    Raises:
      ValueError: they are not int32 [B, T].
    """
    if segment_ids is None:
        return
    wanted = tokens.v.shape[:2]
    check_shape("segment_ids", segment_ids, "B, T", wanted, "pass one id per token, 0 at padding")
    if segment_ids.dtype != jnp.int32:
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}: int32 is needed; cast it")


def check_states(
    tokens: Tokens,
    segment_ids: jax.Array | None,
    num_segments: int | None,
    initial_state: jax.Array | None,
    keeps_states: bool,
) -> None:
    """Segment ids, the number of states per row, and the states that come in.

    Raises:
      ValueError: ids are not int32 [B, T], `num_segments` is missing, superfluous or below 1, or
        `initial_state` has another shape than these imply.
    """
    check_segment_ids(tokens, segment_ids)
    if segment_ids is None and num_segments is not None:
        raise ValueError(
            f"num_segments={num_segments} is given without segment_ids; a row without ids has one "
            "state: pass segment_ids, or leave num_segments out"
        )
    if num_segments is not None and num_segments < 1:
        raise ValueError(f"num_segments={num_segments} is below 1; leave it out without states")
    if segment_ids is not None and keeps_states and num_segments is None:
        raise ValueError(
            "num_segments=None with segment_ids and states: the number of states per row must be "
            "static; pass num_segments"
        )
    if initial_state is not None:
        B, _, H, V = tokens.v.shape
        K = tokens.k.shape[-1]
        axes, wanted = "B, H, K, V", (B, H, K, V)
        if num_segments is not None:
            axes, wanted = "B, N, H, K, V", (B, num_segments, H, K, V)
        check_shape("initial_state", initial_state, axes, wanted, _STATE_AXES)


def check_pool(tokens: Tokens, pool: jax.Array, slots: jax.Array) -> None:
    """Shapes and dtypes of a decoding step's pool of states and of the slots to step.

    Raises:
      ValueError: the pool is not key-first float32 (or float64), or slots are not int32 [B].
    """
    B, H, K = tokens.k.shape
    wanted = (*pool.shape[:1], H, K, tokens.v.shape[-1])
    check_shape("pool", pool, "slots, H, K, V", wanted, _STATE_AXES)
    check_shape("slots", slots, "B", (B,), "pass one slot per sequence, negative when idle")
    if pool.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"pool has dtype {pool.dtype}: a carried state rounded at every token drifts; "
            "use float32"
        )
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots has dtype {slots.dtype}: int32 is needed; cast it")
