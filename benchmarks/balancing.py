"""Compares the balancing rules: `python benchmarks/balancing.py`.

On a drifting synthetic router of two sizes, and in the first steps of the tiny recipe.
"""

import dataclasses
import json
import pathlib
import sys

import jax
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import drifting_router
from benchmarks.environment import environment
from k3jax import config
from k3jax.parallel import host
from k3jax.parallel.mesh import make_mesh
from k3jax.train.feed import Feed
from k3jax.train.state import initial_state
from k3jax.train.step import compiled_step, run_optimizer
from k3jax.train.task import make_task

CONFIG = flags.DEFINE_string("config", "configs/tiny.py", "Recipe file.")
OUTPUT = flags.DEFINE_string("output", "benchmarks/results/balancing_cpu.json", "Result file.")
STEPS = flags.DEFINE_integer("steps", 40, "Steps of the recipe under each rule.")
SIZES = ((64, 6, 4096, 40), (896, 16, 16384, 20))  # experts, top_k, tokens, steps
IN_TRAINING = ("none", "aux_loss", "sign", "quantile", "histogram")


def train(recipe, balancing: str, steps: int) -> dict:
    """Loss and largest violation over layers of each step of a recipe under one rule."""
    moe = dataclasses.replace(recipe.model.moe, balancing=balancing)
    cfg = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, moe=moe))
    update = compiled_step(cfg.model, cfg.optimizer, cfg.train.steps)
    tx = run_optimizer(cfg.optimizer, cfg.train.steps)
    state = initial_state(cfg.model, tx, cfg.train.seed)
    feed = Feed(make_task(cfg, lambda line: None).batches, 1)
    seen = []
    for _ in range(steps):
        state, measured = update(state, feed.take()[0])
        seen.append((float(measured.loss), max(measured.max_violation.tolist())))
    loss, violation = zip(*seen, strict=True)
    return {"loss": loss, "max_violation": violation}


def in_training(recipe, steps: int) -> dict:
    """`train` under every rule, on batches of 8 rows."""
    short = dataclasses.replace(recipe.train, batch_size=8)
    recipe = dataclasses.replace(recipe, train=short)
    moe, tokens = recipe.model.moe, 8 * recipe.data.sequence_length
    runs = {rule: train(recipe, rule, steps) for rule in IN_TRAINING}
    return {
        "floor": drifting_router.floor(moe.experts, moe.top_k, tokens),
        "tokens": tokens,
        **{name: {rule: run[name] for rule, run in runs.items()} for name in runs["none"]},
    }


def draw(parts: dict[str, dict], output: pathlib.Path) -> None:
    """One panel a part: violation by step and rule, and the sampling floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(parts), figsize=(15, 5), constrained_layout=True)
    for axes, (title, part) in zip(panels, parts.items(), strict=True):
        for rule, curve in part["max_violation"].items():
            axes.plot(curve, label=rule, linestyle="--" if "hist" in rule else "-")
        axes.axhline(part["floor"], color="black", linestyle=":", label="sampling floor")
        axes.set(title=title, yscale="log", xlabel="step", ylabel="max load / mean load - 1")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(output, dpi=110)
    pyplot.close(figure)


def main(argv):
    """Runs everything, then writes the result and its picture."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; write flags as --name=value")
    host.prepare()
    with jax.set_mesh(make_mesh()):
        parts = {
            f"{n} experts, top {k}, {m} tokens": drifting_router.simulate(n, k, m, steps)
            for n, k, m, steps in SIZES
        }
        parts["tiny recipe"] = in_training(config.load_recipe(CONFIG.value), STEPS.value)
    output = pathlib.Path(OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    values = {**environment(sys.argv), **parts}
    output.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    draw(parts, output.with_suffix(".png"))


if __name__ == "__main__":
    app.run(main)
