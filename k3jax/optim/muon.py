"""Per-Head Muon (§2.5): which leaves are matrices, which of their axes, and the update rule.

`RULES` is the one table that decides: leaf name -> group, matrix axes, weight decay. A name that is
not in it is an error, so a renamed parameter cannot change its optimizer unnoticed.

The update of a block with gradient G_t at step t = 1, 2, ... is

  published:  M_t = mu M_{t-1} + G_t,               N_t = mu M_t + G_t
  ema:        M_t = mu M_{t-1} + (1 - mu) G_t,
              N_t = mu M_t / (1 - mu^{t+1}) + (1 - mu) G_t / (1 - mu^t)
  O_t = NewtonSchulz(N_t / (|N_t|_F + eps)),   update = -lr (rms sqrt(max(m, n)) O_t + decay W)

"published" is the rule of Moonshot's Muon, "ema" that of `optax.contrib.muon`. Up to a factor,
which Newton-Schulz removes, they differ by the two bias corrections alone: those make the last
gradient's own share larger by (1 - mu^{t+1}) / (1 - mu^t), which is 1.07 at step 10 and 1.002 at
step 60; at step 1 both rules take the direction of G_1. Without Nesterov N_t is M_t, and both rules
are one. Newton-Schulz runs in the gradients' dtype, so in float32 here.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import optax

from k3jax.optim import groups
from k3jax.optim.owners import by_owner

MomentumRule = Literal["published", "ema"]

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_FROBENIUS_EPS = 1e-7
_STACKED = optax.contrib.MuonDimensionNumbers((1,), (2,))  # of a stack [N, m, n]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one kind of leaf is updated.

    Attributes:
      group: optimizer of the leaf.
      reduction: axes, counted from the right, that multiply the layer's input.
      output: axes that index the layer's output. All axes in neither count separate blocks.
      decay: whether weight decay applies.
    """

    group: Literal["muon", "adamw"]
    reduction: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    decay: bool = True


MATRIX = Rule("muon", (-2,), (-1,))  # [D, F]; experts [E, F, L] are E blocks
PER_HEAD = Rule("muon", (-3,), (-1,))  # [D, H, K] is H blocks [D, K]
GATE_AND_UP = Rule("muon", (-3,), (-1,))  # [D, 2, F] is two blocks [D, F]
TO_HEADS = Rule("muon", (-3,), (-2, -1))  # [D, H, K] is one block [D, H K]
FROM_HEADS = Rule("muon", (-3, -2), (-1,))  # [H, V, D] is one block [H V, D]
ADAMW = Rule("adamw")
UNDECAYED = Rule("adamw", decay=False)

# The paper names Q, K and V for per-head blocks; every other matrix is one block. Query, key and
# value of MLA are made from latents, so there the up-projections are the per-head ones.
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("w_q", "w_k", "w_v"), PER_HEAD),
    **dict.fromkeys(("w_q_b", "w_k_b", "w_v_b"), PER_HEAD),
    **dict.fromkeys(("w_q_a", "w_kv_a", "w_f_a", "w_g_a", "w_eh"), MATRIX),
    **dict.fromkeys(("w_f_b", "w_g", "w_g_b"), TO_HEADS),
    "w_o": FROM_HEADS,
    "w_gate_up": GATE_AND_UP,
    **dict.fromkeys(("w_down", "w_latent_down", "w_latent_up"), MATRIX),
    # One row a head or an expert, each a direction of its own: a whole matrix, never per head.
    **dict.fromkeys(("w_beta", "w_router"), MATRIX),
    **dict.fromkeys(("embedding", "lm_head"), ADAMW),
    **dict.fromkeys(("conv_q", "conv_k", "conv_v"), ADAMW),
    "query": ADAMW,
    **dict.fromkeys(("a_log", "dt_bias", "norm"), UNDECAYED),  # norm: any name that ends so
}


def rules(
    *, router_muon: bool = True, beta_muon: bool = True, per_head: bool = True
) -> dict[str, Rule]:
    """`RULES` with its choices made.

    Args:
      router_muon: Muon for the router's matrix, else AdamW.
      beta_muon: Muon for the matrix of beta, else AdamW.
      per_head: a block for each head of Q, K and V, else one block [D, H K] for all of them: plain
        Muon, the paper's comparison (§2.5).
    """
    chosen = dict(RULES)
    if not per_head:
        chosen = {n: TO_HEADS if rule is PER_HEAD else rule for n, rule in chosen.items()}
    for name, use_muon in (("w_router", router_muon), ("w_beta", beta_muon)):
        chosen[name] = RULES[name] if use_muon else ADAMW
    return chosen


def rule_of(table: Mapping[str, Rule], path: Any, x: Any) -> Rule:
    """Rule of one leaf.

    Args:
      table: result of `rules`.
      path: key path as `jax.tree_util` gives it.
      x: the leaf, or anything with its shape.

    Raises:
      ValueError: no rule has this leaf's name, or the leaf has too few axes for it.
    """
    where = path_text(path)
    name = where.rsplit("/", 1)[-1]
    rule = table.get("norm" if name.endswith("norm") else name)
    if rule is None:
        raise ValueError(
            f"{where}: no optimizer rule for a parameter named {name!r}; add it to RULES in "
            f"k3jax/optim/muon.py, which knows {', '.join(sorted(table))}"
        )
    needed = -min((*rule.reduction, *rule.output), default=0)
    if len(x.shape) < needed:
        raise ValueError(
            f"{where}: shape {tuple(x.shape)} has fewer than the {needed} axes of {name!r}; "
            "give the parameter another name with a rule of its own"
        )
    return rule


def path_text(path: Any) -> str:
    """Key path as `backbone/block_0/w_q`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def matrix_axes(rule: Rule, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reduction and output axes of a Muon leaf of `ndim` axes, counted from the left."""
    return tuple(ndim + a for a in rule.reduction), tuple(ndim + a for a in rule.output)


def blocks(rule: Rule, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(count, rows, columns) of the blocks that are orthogonalised alone; None under AdamW."""
    if rule.group != "muon":
        return None
    rows, columns = (
        math.prod(shape[axis] for axis in axes) for axes in matrix_axes(rule, len(shape))
    )
    return math.prod(shape) // (rows * columns), rows, columns


def check_momentum_rule(rule: str) -> None:
    """Refuses a rule that does not exist.

    Raises:
      ValueError: `rule` is not one of `MomentumRule`.
    """
    if rule not in get_args(MomentumRule):
        raise ValueError(
            f"muon_momentum_rule={rule!r}: choose from {', '.join(get_args(MomentumRule))}"
        )


def orthogonalise(
    table: Mapping[str, Rule],
    *,
    momentum: float,
    rule: MomentumRule,
    steps: int,
    nesterov: bool,
    rms: float,
) -> optax.GradientTransformation:
    """Gradients of Muon leaves -> rms sqrt(max(m, n)) O_t, block by block (module docstring).

    Not yet multiplied by the learning rate or decayed. For a tree that holds Muon leaves only;
    the state is optax's `MuonState` over that tree, under either rule.
    """

    def axes_of(path, x):
        return matrix_axes(rule_of(table, path, x), x.ndim)

    stacks = _stacks(momentum, rule, steps, nesterov)

    def update(grads, state, params=None):
        del params
        of_stacks = state._replace(mu=groups.join(state.mu, axes_of))
        directions, after = stacks.update(groups.join(grads, axes_of), of_stacks)
        sized = jax.tree.map(lambda o: rms * math.sqrt(o.shape[-1]) * o, directions)
        mu = groups.split(after.mu, state.mu, axes_of)
        return groups.split(sized, grads, axes_of), after._replace(mu=mu)

    return by_owner(
        optax.GradientTransformation(stacks.init, update),
        block_axes=lambda path, x: sum(axes_of(path, x), ()),
    )


def _stacks(
    momentum: float, rule: MomentumRule, steps: int, nesterov: bool
) -> optax.GradientTransformation:
    """Gradients of stacks [N, m, n] -> directions O_t, with a `MuonState` of the rule's M."""

    def scale_by_muon(beta, nesterov):
        return optax.contrib.scale_by_muon(
            ns_coeffs=(_NEWTON_SCHULZ,) * steps,  # a list is scanned, a single triple unrolled
            ns_steps=steps,
            beta=beta,
            eps=_FROBENIUS_EPS,
            nesterov=nesterov,
            weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: _STACKED, tree),
        )

    if rule == "ema":
        return scale_by_muon(momentum, nesterov)
    # optax has the published momentum apart from Muon (`trace`); with beta = 0 its Muon forgets
    # every earlier step, so that it orthogonalises what it is given.
    published = optax.trace(momentum, nesterov)
    plain = scale_by_muon(0.0, nesterov=False)

    def update(grads, state, params=None):
        del params
        ahead, trace = published.update(grads, optax.TraceState(state.mu))
        directions, after = plain.update(ahead, state)
        return directions, after._replace(mu=trace.trace)

    return optax.GradientTransformation(plain.init, update)
