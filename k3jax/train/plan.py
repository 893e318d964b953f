"""A run before it runs: parameters, FLOPs and bytes per device, on a mesh without devices."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from k3jax.config import override
from k3jax.models.kimi_k3 import counting, depth
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim import optimizer
from k3jax.parallel.mesh import AXES, abstract_mesh
from k3jax.train import activations
from k3jax.train.activations import local_bytes
from k3jax.train.config import RunConfig
from k3jax.train.state import TrainState, create_state
from k3jax.train.utilisation import GIB


class Bytes(NamedTuple):
    """Bytes of one device.

    Attributes:
      parameters: with the router biases; from the real shardings, as is `optimizer`.
      optimizer: its state.
      gradients: float32, sharded like the parameters; twice with micro-batches, a sum and a piece.
      kept: activations that wait for the backward pass; an estimate, as are the next two.
      working: the largest of what one layer, or the head, needs for itself at a time.
      update: the optimizer's update, float32; the activations are gone by then.
    """

    parameters: int
    optimizer: int
    gradients: int
    kept: int
    working: int
    update: int

    @property
    def peak(self) -> int:
        """Most at any one time."""
        held = self.parameters + self.optimizer + self.gradients
        return held + max(self.kept + self.working, self.update)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `make_plan` found.

    Attributes:
      run: the run.
      leaves: parameters of the traced model, router biases included.
      bytes: of one device.
      memory: bytes that a device has.
    """

    run: RunConfig
    leaves: int
    bytes: Bytes
    memory: int

    @property
    def fits(self) -> bool:
        """Whether the estimated peak is within a device's memory."""
        return self.bytes.peak <= self.memory

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all devices."""
        return self.run.train.batch_size * self.run.data.sequence_length


def adapt(
    run: RunConfig,
    assignments: Sequence[str] = (),
    mesh: str = "",
    batch: int | None = None,
    sequence: int | None = None,
) -> RunConfig:
    """The run with fields replaced, on another mesh; validation, which no plan shows, follows it.

    Args:
      run: as the recipe has it.
      assignments: as `config.override` takes them.
      mesh: axis lengths as `data=8,expert=16`; "" leaves the run's own.
      batch: rows of an update, over all devices; None leaves it.
      sequence: tokens in a row; None leaves it.

    Raises:
      ValueError: a field or an axis is unknown, or the mesh cannot split the batch.
    """
    changes = [*assignments, *(f"train.mesh.{axis}" for axis in mesh.split(",") if axis)]
    changes += [] if batch is None else [f"train.batch_size={batch}"]
    changes += [] if sequence is None else [f"data.sequence_length={sequence}"]
    axes = [c for c in changes if c.startswith("train.mesh.")]
    shape = override(run.train.mesh, [c.removeprefix("train.mesh.") for c in axes])
    return override(run, [*changes, f"train.eval_batch_size={shape.data * shape.expert}"])


def make_plan(run: RunConfig, memory: int) -> Plan:
    """Traces the state of `run` on its mesh and estimates a step; allocates nothing.

    Args:
      run: the run, on the mesh `run.train.mesh`, of which no device need exist.
      memory: bytes of one device.

    Raises:
      ValueError: the mesh cannot split a parameter.
    """
    short, copies = distinct_blocks(run.model)
    # First no mesh at all: one in force may have another number of devices, which JAX refuses.
    nothing = jax.sharding.AbstractMesh((), ())
    planned = abstract_mesh(run.train.mesh)
    with jax.sharding.use_abstract_mesh(nothing), jax.sharding.use_abstract_mesh(planned):
        state = _abstract_state(run, short)
        layers = activations.samples(short, state.params)
        rows = run.train.batch_size // run.train.micro_batches
        step = activations.estimate(run.model, layers, rows, run.data.sequence_length)
    sums = functools.partial(_sum, copies)
    wide = sums(lambda a: local_bytes(a) // a.dtype.itemsize * 4, state.params)
    found = Bytes(
        parameters=sums(local_bytes, (state.params, state.router)),
        optimizer=sums(local_bytes, state.opt_state),
        gradients=wide * (1 + (run.train.micro_batches > 1)),
        kept=step.kept,
        working=max(step.layer, step.head),
        update=wide,
    )
    return Plan(run, sums(lambda a: a.size, (state.params, state.router)), found, memory)


def distinct_blocks(cfg: ModelConfig) -> tuple[ModelConfig, dict[str, float]]:
    """A model with each different block of `cfg` once, which traces in less than half the time.

    Returns:
      The short model, and for names in the paths of its state how often the leaf below stands in
      that of `cfg`: its blocks, and the balancing biases, which are rows of one array.
    """
    kinds, size = depth.layer_kinds(cfg), depth.block_size(cfg)
    blocks = [tuple(kinds[i : i + size]) for i in range(0, cfg.num_layers, size)]
    counts = collections.Counter(blocks)  # in order of appearance, so a dense layer stays first
    layers = [kind for block in counts for kind in block]
    short = dataclasses.replace(
        cfg,
        num_layers=len(layers),
        mla_layers=tuple(i for i, kind in enumerate(layers) if kind.mixer == "mla"),
        dense_layers=sum(kind.ffn == "dense" for kind in layers),
    )
    copies = {f"block_{b}": float(count) for b, count in enumerate(counts.values())}
    rows, of_short = (c.moe_layers + c.mtp_layers for c in (cfg, short))
    return short, copies | {"bias": rows / max(of_short, 1)}


def _sum(copies: dict[str, float], measure: Callable[[Any], int], tree: Any) -> int:
    """Sum of `measure(leaf)` over the state of the whole model, given that of the short one."""
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = (str(getattr(entry, "key", "")) for entry in path)
        total += measure(leaf) * math.prod(copies.get(name, 1.0) for name in names)
    return round(total)


def _abstract_state(run: RunConfig, cfg: ModelConfig) -> TrainState:
    # The same parameters in half the time: what remat computes again and how the mixers are
    # computed changes none, and the oracles' programs are short.
    kda = dataclasses.replace(cfg.kda, implementation="reference", chunk_size=None)
    mla = dataclasses.replace(cfg.mla, implementation="reference")
    cfg = dataclasses.replace(cfg, kda=kda, mla=mla, remat=False)
    tx = optimizer.make_optimizer(run.optimizer, run.train.steps)
    return jax.eval_shape(lambda: create_state(cfg, tx, run.train.seed))


def values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    cfg, T = plan.run.model, plan.run.data.sequence_length
    padding = counting.released_padding(cfg)
    return {
        "parts": {name: part._asdict() for name, part in counting.parts(cfg).items()},
        "parameters": plan.leaves,
        "parameters_as_released": plan.leaves + padding,
        "active": counting.active(cfg),
        "active_as_released": counting.active(cfg) + padding,
        "active_with_embedding": counting.active(cfg, with_embedding=True),
        "forward_flops_per_token": counting.forward_flops(cfg, T),
        "training_flops_per_token": counting.flops_per_token(cfg, T),
        "sequence_length": T,
        "tokens_per_step": plan.tokens_per_step,
        "mesh": dict(zip(AXES, plan.run.train.mesh.shape, strict=True)),
        "bytes_per_device": plan.bytes._asdict() | {"peak": plan.bytes.peak},
        "device_memory": plan.memory,
        "fits": plan.fits,
    }


def table(plan: Plan) -> str:
    """The plan as text."""
    return "\n".join([*_counts(plan), "", *_flops(plan), "", *_memory(plan)])


def _counts(plan: Plan) -> list[str]:
    cfg: ModelConfig = plan.run.model
    found, padding = counting.parts(cfg), counting.released_padding(cfg)
    lines = [f"{'part':<26}{'each':>16}{'copies':>9}{'active':>8}{'parameters':>22}"]
    lines += [
        f"{name:<26}{p.size:>16,}{p.copies:>9,}{p.active:>8,}{p.total:>22,}"
        for name, p in found.items()
    ]
    met = counting.active(cfg)
    rows = {
        "parameters here": plan.leaves,
        "in the released layout": plan.leaves + padding,
        "active, with the head": met,
        "  in the released layout": met + padding,
        "  and input embedding": counting.active(cfg, with_embedding=True),
    }
    return lines + [f"{name:<26}{number:>55,}" for name, number in rows.items()]


def _flops(plan: Plan) -> list[str]:
    T = plan.run.data.sequence_length
    flops = counting.forward_flops(plan.run.model, T)
    total = sum(flops.values())
    lines = [f"{f'FLOPs per token, T = {T:,}':<40}{'forward':>14}{'share':>9}"]
    lines += [f"{name:<40}{n:>14.4g}{n / total:>9.1%}" for name, n in flops.items()]
    train = counting.flops_per_token(plan.run.model, T)
    step = train * plan.tokens_per_step
    return [
        *lines,
        f"{'all; training is three times that':<40}{total:>14.4g}{train:>14.4g}",
        f"{'tokens and training FLOPs of a step':<40}{plan.tokens_per_step:>14,}{step:>14.4g}",
    ]


def _memory(plan: Plan) -> list[str]:
    shape = plan.run.train.mesh
    axes = ", ".join(f"{a}={n}" for a, n in zip(AXES, shape.shape, strict=True))
    remat = "recomputed, inputs kept" if plan.run.model.remat else "kept"
    rows = {
        "parameters": plan.bytes.parameters,
        "optimizer state": plan.bytes.optimizer,
        "gradients": plan.bytes.gradients,
        f"activations (layers {remat}), estimate": plan.bytes.kept,
        "largest layer or head at work, estimate": plan.bytes.working,
        "update, after the activations": plan.bytes.update,
        "peak, estimate": plan.bytes.peak,
    }
    lines = [f"GiB on each device of mesh {axes}"]
    lines += [f"{name:<56}{size / GIB:>12,.3f}" for name, size in rows.items()]
    share = plan.bytes.peak / plan.memory
    verdict = "fits" if plan.fits else "does not fit"
    return [*lines, f"{verdict}: {share:.1%} of a device's {plan.memory / GIB:g} GiB"]
