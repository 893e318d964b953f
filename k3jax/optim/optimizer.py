"""The optimizer of a run: Per-Head Muon for matrices, AdamW for the rest (§2.5, §3.3)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from k3jax.optim import muon, schedules, weight_clip


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Hyper-parameters; the report fixes the decay, the warm-up and the cosine only.

    Attributes:
      peak_lr: learning rate after the warm-up, shared by both groups (Muon's update has AdamW's
        size, see `muon_rms`).
      min_lr_ratio: final learning rate over the peak.
      warmup_fraction: share of all steps with a rising rate, at least one step.
      schedule: `cosine`, `wsd` or `constant` after the warm-up, see `schedules.make_schedule`; each
        needs its own `peak_lr` to be compared.
      decay_fraction: share of all steps in which the rate falls under `wsd`; the others ignore it.
      weight_decay: decoupled, times the learning rate; not on norms, a_log, dt_bias.
      qk_clip: largest attention logit that a latent-attention head may keep, see `weight_clip.py`;
        none for no clipping.
      clip_norm: bound of the gradient's norm over all parameters together; none for no bound.
      muon_momentum: decay of Muon's momentum.
      muon_momentum_rule: `published`, M <- mu M + G and N = G + mu M, or `ema`, optax's
        bias-corrected average (`muon.py`).
      muon_ns_steps: Newton-Schulz iterations.
      muon_rms: an update block's root mean square over the learning rate, before decay.
      per_head: Muon's blocks of Q, K and V are single heads; else one block of all heads.
      nesterov: whether Muon looks ahead by the current gradient. AdamW never does.
      adam_b1, adam_b2, adam_eps: AdamW.
      adamw_lr_multiplier: AdamW's learning rate (and so its decay) over Muon's.
      router_muon: Muon for the router's matrix, else AdamW.
      beta_muon: Muon for the matrix of beta [D, H] (as a whole), else AdamW.
    """

    peak_lr: float
    min_lr_ratio: float = 0.1
    warmup_fraction: float = 0.01
    schedule: schedules.Kind = "cosine"
    decay_fraction: float = 0.1
    weight_decay: float = 0.1
    qk_clip: float | None = 100.0
    clip_norm: float | None = 1.0
    muon_momentum: float = 0.95
    muon_momentum_rule: muon.MomentumRule = "published"
    muon_ns_steps: int = 5
    muon_rms: float = 0.2
    per_head: bool = True
    nesterov: bool = True
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    adamw_lr_multiplier: float = 1.0
    router_muon: bool = True
    beta_muon: bool = True

    def __post_init__(self):
        schedules.check_kind(self.schedule)
        weight_clip.check_threshold(self.qk_clip)
        muon.check_momentum_rule(self.muon_momentum_rule)
        for name in ("peak_lr", "muon_ns_steps", "muon_rms", "adam_eps", "adamw_lr_multiplier"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be above 0; {_usual(name)} is usual"
                )
        for name in ("muon_momentum", "adam_b1", "adam_b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: a decay rate lies in [0, 1); "
                    f"{_usual(name)} is usual"
                )
        for name in ("min_lr_ratio", "warmup_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: a share lies in [0, 1]; {_usual(name)} is usual"
                )
        if not self.weight_decay >= 0:
            raise ValueError(
                f"weight_decay={self.weight_decay}: must not be negative; 0 for no decay"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: must be above 0; none for no clipping")

    @property
    def rules(self) -> dict[str, muon.Rule]:
        """Leaf name -> rule, under this configuration's choices."""
        return muon.rules(
            router_muon=self.router_muon, beta_muon=self.beta_muon, per_head=self.per_head
        )


def _usual(name: str) -> float:
    """What a message offers in the place of a refused value; the peak alone has no default."""
    return getattr(OptimizerConfig, name, 2e-4)


class Row(NamedTuple):
    """One leaf in `describe`: `blocks` is (count, rows, columns) under Muon, None under AdamW."""

    path: str
    shape: tuple[int, ...]
    group: str
    blocks: tuple[int, int, int] | None
    decay: bool


def learning_rate(cfg: OptimizerConfig, total_steps: int) -> schedules.Schedule:
    """Step -> learning rate of the Muon group, as `make_optimizer` uses it."""
    return schedules.make_schedule(
        cfg.schedule, cfg.peak_lr, total_steps, cfg.warmup_fraction, cfg.min_lr_ratio,
        cfg.decay_fraction,
    )  # fmt: skip


def make_optimizer(cfg: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then Muon or AdamW by the table in `muon.py`.

    Parameters are nested dicts whose leaf names are the model's; the router bias is not among them.
    Works under any explicit mesh and without one, and its state is sharded like the parameters or
    like the owners of their blocks (`owners.py`). `update` needs the parameters for weight decay.

    Raises:
      ValueError: from `init` and `update`, when a leaf's name has no rule.
    """
    table, rate = cfg.rules, learning_rate(cfg, total_steps)

    def labels(tree):
        return _map_rules(table, tree, lambda rule: rule.group)

    def decayed(tree):
        return _map_rules(table, tree, lambda rule: rule.decay)

    def adamw_rate(step):
        return cfg.adamw_lr_multiplier * rate(step)

    per_head_muon = optax.chain(
        muon.orthogonalise(
            table,
            momentum=cfg.muon_momentum,
            rule=cfg.muon_momentum_rule,
            steps=cfg.muon_ns_steps,
            nesterov=cfg.nesterov,
            rms=cfg.muon_rms,
        ),
        optax.add_decayed_weights(cfg.weight_decay, decayed),
        optax.scale_by_learning_rate(rate),
    )
    adamw = optax.adamw(
        adamw_rate,
        b1=cfg.adam_b1,
        b2=cfg.adam_b2,
        eps=cfg.adam_eps,
        weight_decay=cfg.weight_decay,
        mask=decayed,
    )
    clip = optax.identity() if cfg.clip_norm is None else optax.clip_by_global_norm(cfg.clip_norm)
    return optax.chain(clip, optax.partition({"muon": per_head_muon, "adamw": adamw}, labels))


def apply_updates(params: Any, updates: Any) -> Any:
    """Parameters plus updates, leaf by leaf, in the parameters' dtype and sharding."""
    return optax.apply_updates(params, updates)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves. As a metric: of the gradients before clipping."""
    return optax.tree.norm(tree)


def describe(params: Any, cfg: OptimizerConfig) -> list[Row]:
    """One row per leaf, in the tree's order: what the optimizer does to it.

    `params` may be abstract (`jax.eval_shape`).
    """
    rows = []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        rule, shape = muon.rule_of(cfg.rules, path, x), tuple(x.shape)
        blocks = muon.blocks(rule, shape)
        rows.append(Row(muon.path_text(path), shape, rule.group, blocks, rule.decay))
    return rows


def format_rows(rows: Sequence[Row]) -> str:
    """`describe`'s rows as aligned text, one leaf a line."""
    lines = []
    width = max((len(row.path) for row in rows), default=0)
    for row in rows:
        blocks = "" if row.blocks is None else "{} x [{}, {}]".format(*row.blocks)
        decay = "decay" if row.decay else "no decay"
        lines.append(f"{row.path:{width}}  {row.group:5}  {decay:8}  {list(row.shape)}  {blocks}")
    return "\n".join(line.rstrip() for line in lines)


def _map_rules(table: Any, tree: Any, value: Any) -> Any:
    """Tree of `value(rule)` in the place of each leaf."""
    return jax.tree_util.tree_map_with_path(lambda p, x: value(muon.rule_of(table, p, x)), tree)
