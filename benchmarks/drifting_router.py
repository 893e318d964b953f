"""A synthetic router whose experts' popularity drifts, and each balancing rule's answer to it.

Every step draws new tokens. A logit is a token's own part, of deviation 1, plus the expert's
popularity, of deviation `SPREAD`; popularity and token directions both drift. No task is learned:
what is measured is balance alone.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.layers import router
from k3jax.layers.latent_moe import MoeConfig
from k3jax.optim import quantile_balancing
from k3jax.train import balance

FEATURES = 32
SPREAD = 1.0
DRIFT = 0.01  # of every router weight, per step
AUX_STEP = 0.01  # RMS of the router's step against the balancing loss, as of an optimizer of RMS 1
RULES = {
    "none": dict(balancing="none"),
    "aux loss": dict(balancing="aux_loss"),
    "sign 1e-3": dict(balancing="sign", balancing_rate=1e-3),
    "sign 1e-2": dict(balancing="sign", balancing_rate=1e-2),
    "QB exact": dict(balancing="quantile"),
    "QB histogram": dict(balancing="histogram"),
    "QB exact, EMA 0.5": dict(balancing="quantile", balancing_ema=0.5),
}


def floor(experts: int, top_k: int, tokens: int) -> float:
    """sqrt(2 ln n / q): the violation that sampling leaves to the best bias on fresh tokens."""
    return float(np.sqrt(2 * np.log(experts) / (tokens * top_k / experts)))


def simulate(
    experts: int, top_k: int, tokens: int, steps: int, rules: Iterable[str] = tuple(RULES)
) -> dict:
    """Violations of every rule on the same tokens and the same drift; needs a mesh in force.

    Args:
      experts: n.
      top_k: k.
      tokens: m, of each step.
      steps: length.
      rules: names in `RULES`; "QB exact" is always among them.

    Returns:
      floor; max_violation, a list over steps by rule; and `histogram_error_bins`, the largest
      difference in a step between the histogram's estimate and the exact one of the same
      margins, in bins, before the mean is taken off.
    """
    rules = dict.fromkeys([*rules, "QB exact"])
    cfgs = {name: _config(experts, top_k, RULES[name]) for name in rules}
    counting = _config(experts, top_k, RULES["QB histogram"])
    rng = np.random.default_rng(0)
    drift = _popularity(rng, experts)
    moved = jnp.zeros_like(drift)  # what the balancing loss did to the router
    bias = dict.fromkeys(rules, jnp.zeros(experts))
    violations: dict[str, list[float]] = {name: [] for name in rules}
    errors = []
    for _ in range(steps):
        x = jnp.asarray(rng.standard_normal((tokens, FEATURES + 1)), jnp.float32).at[:, 0].set(1)
        for name, cfg in cfgs.items():
            w = drift + moved if name == "aux loss" else drift
            bias[name], violation, gradient = _step(cfg, x, w, bias[name])
            violations[name].append(float(violation))
            if gradient is not None:
                moved -= AUX_STEP * gradient / jnp.sqrt(jnp.mean(gradient**2))
        errors.append(float(_histogram_error(counting, x, drift, bias["QB exact"])))
        drift += DRIFT * jnp.asarray(rng.standard_normal(drift.shape), jnp.float32)
    return {
        "floor": floor(experts, top_k, tokens),
        "max_violation": violations,
        "histogram_error_bins": max(errors),
    }


def _config(experts: int, top_k: int, options: dict) -> MoeConfig:
    return MoeConfig(experts, top_k, expert_width=1, latent_norm=False, **options)


def _popularity(rng: np.random.Generator, experts: int) -> jax.Array:
    """Router weights: first a row of popularity, then the token's own part, of deviation 1."""
    w = rng.standard_normal((FEATURES + 1, experts)) / np.sqrt(FEATURES)
    w[0] = SPREAD * rng.standard_normal(experts)
    return jnp.asarray(w, jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _step(cfg: MoeConfig, x: jax.Array, w: jax.Array, bias: jax.Array):
    """(next bias, violation of this step, gradient of the balancing loss or None)."""

    def loss(w):
        stats = _statistics(cfg, x, w, bias)
        aux = None if stats.score_sum is None else balance.aux_loss(cfg, stats, None)
        return (0.0 if aux is None else aux), stats

    if cfg.balancing == "aux_loss":
        gradient, stats = jax.grad(loss, has_aux=True)(w)
    else:
        gradient, stats = None, loss(w)[1]
    new = balance.next_bias(cfg, bias[None], stats)[0]
    return new, quantile_balancing.max_violation(stats.load)[0], gradient


def _statistics(cfg: MoeConfig, x: jax.Array, w: jax.Array, bias: jax.Array) -> router.RouterStats:
    """Of one layer, with its leading axis."""
    routing = router.route(x, w, bias, cfg.top_k)
    counted = jnp.ones(x.shape[0], bool)
    stats = router.statistics(routing, bias, counted, cfg.histogram_bins, cfg.balancing)
    return jax.tree.map(lambda a: a[None], stats)


@functools.partial(jax.jit, static_argnums=0)
def _histogram_error(cfg: MoeConfig, x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    """Largest distance of the histogram's quantile from the order statistics beside q, in bins."""
    routing = router.route(x, w, bias, cfg.top_k)
    stats = router.statistics(routing, bias, jnp.ones(x.shape[0], bool), cfg.histogram_bins)
    estimate = quantile_balancing.histogram_quantile(
        stats.histogram, stats.low, stats.width, cfg.top_k
    )
    ascending = jnp.sort(routing.cutoff[:, None] - routing.scores, axis=0)
    q = x.shape[0] * cfg.top_k // cfg.experts
    # Between the q-th and the next every value is an exact minimiser of the dual problem.
    below, above = ascending[q - 1], ascending[q]
    outside = jnp.maximum(below - estimate, estimate - above)
    return jnp.max(jnp.maximum(outside, 0.0)) / stats.width
