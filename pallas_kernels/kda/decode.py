"""One token for every running sequence, its state read from and written to a pool of slots."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kda.checks import check_gate, check_pool, check_tokens
from pallas_kernels.kda.inputs import GateWeights, Options, Tokens, prepare
from pallas_kernels.kda.reference import recurrence_step

# The one statement of the pool's physical axes, for whoever allocates, copies or ships states.
# Shapes alone do not tell: a value-first pool is refused only where K ≠ V.
POOL_LAYOUT = ("slot", "head", "key", "value")


def kda_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slots: jax.Array,
    *,
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, jax.Array]:
    """One step of Eq. 1 per sequence; equal to `kda` on the same tokens to rounding.

    A negative slot marks an idle entry of the batch: its output is zero, no state is read or
    written, and its inputs may hold anything, NaN included. Live slots must differ from each
    other and lie inside the pool: of two entries that share a slot both read the old state and
    either one's write wins; a slot past the end is clipped for the read and dropped for the write.
    Donate the pool under jit and the update is made in place.

    Bound by memory: per live sequence and head 8 K V bytes of state read and written, against about
    7 K V FLOPs; its time is not measured here.

    Args:
      q: [B, H, K].
      k: [B, H, K].
      v: [B, H, V].
      g: [B, H, K], log-decay, or gate logits with `a_log`.
      beta: [B, H], float32 in a model: rounding it would enter the state at every token.
      pool: float32 [slots, H, K, V], axes as in `POOL_LAYOUT`.
      slots: int32 [B], the pool entry of each sequence, negative when idle.
      a_log: [H]; this and the arguments below as in `kda`.
      dt_bias: [H, K].
      lower_bound: in [-5, 0) or None.
      scale: K^-0.5 by default.
      qk_l2norm: normalise q and k.
      implementation: "reference", or None for the best.

    Returns:
      (o [B, H, V] in v's dtype, the updated pool).

    Raises:
      ValueError: shapes or dtypes do not fit together, the pool is not float32 (or float64), slots
        are not int32, or an argument breaks a rule of `kda`.
      UnsupportedError: the implementation named is unknown.
    """
    tokens = Tokens(q, k, v, g, beta)
    check_tokens(tokens, "B, H")
    check_gate(tokens, a_log, dt_bias, lower_bound)
    check_pool(tokens, pool, slots)
    options = Options(
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
        lower_bound=lower_bound,
    )
    return dispatch.call(
        "kda_decode",
        CANDIDATES,
        implementation,
        tokens,
        GateWeights(a_log, dt_bias),
        jnp.asarray(pool),
        jnp.asarray(slots),
        options,
    )


def _gather_step_scatter(
    tokens: Tokens, gate: GateWeights, pool: jax.Array, slots: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    live = slots >= 0
    ready = prepare(tokens, live, gate, options)
    state = pool.at[jnp.maximum(slots, 0)].get(mode="clip")
    state, o = recurrence_step(state, ready)
    # A negative index would count from the end, so an idle entry is sent past it and dropped.
    target = jnp.where(live, slots, pool.shape[0])
    pool = pool.at[target].set(state.astype(pool.dtype), mode="drop")
    return jnp.where(live[:, None, None], o, 0).astype(tokens.v.dtype), pool


CANDIDATES = {"reference": dispatch.Implementation(_gather_step_scatter)}
