"""One table decides each leaf's optimizer: every parameter is in exactly one group."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from k3jax.optim import optimizer
from k3jax.optim.optimizer import OptimizerConfig

CFG = OptimizerConfig(peak_lr=1e-3)

# path below backbone/block_0/group_0, or whole path | group | blocks under Muon | decay
SNAPSHOT = """
layer_0/ffn/w_down           muon  2 x [11, 16]  decay
layer_0/ffn/w_gate_up        muon  4 x [16, 11]  decay
layer_0/ffn_res/key_norm     adamw -             no
layer_0/ffn_res/query        adamw -             decay
layer_0/input_norm           adamw -             no
layer_0/mixer/a_log          adamw -             no
layer_0/mixer/conv_k         adamw -             decay
layer_0/mixer/conv_q         adamw -             decay
layer_0/mixer/conv_v         adamw -             decay
layer_0/mixer/dt_bias        adamw -             no
layer_0/mixer/o_norm         adamw -             no
layer_0/mixer/w_beta         muon  2 x [16, 3]   decay
layer_0/mixer/w_f_a          muon  2 x [16, 6]   decay
layer_0/mixer/w_f_b          muon  2 x [6, 15]   decay
layer_0/mixer/w_g_a          muon  2 x [16, 6]   decay
layer_0/mixer/w_g_b          muon  2 x [6, 12]   decay
layer_0/mixer/w_k            muon  6 x [16, 5]   decay
layer_0/mixer/w_o            muon  2 x [12, 16]  decay
layer_0/mixer/w_q            muon  6 x [16, 5]   decay
layer_0/mixer/w_v            muon  6 x [16, 4]   decay
layer_0/mixer_res/key_norm   adamw -             no
layer_0/mixer_res/query      adamw -             decay
layer_0/post_norm            adamw -             no
layer_1/ffn/experts/w_down   muon  8 x [11, 10]  decay
layer_1/ffn/experts/w_gate_up muon 16 x [10, 11] decay
layer_1/ffn/latent_norm      adamw -             no
layer_1/ffn/shared/w_down    muon  2 x [11, 16]  decay
layer_1/ffn/shared/w_gate_up muon  4 x [16, 11]  decay
layer_1/ffn/w_latent_down    muon  2 x [16, 10]  decay
layer_1/ffn/w_latent_up      muon  2 x [10, 16]  decay
layer_1/ffn/w_router         muon  2 x [16, 4]   decay
layer_1/ffn_res/key_norm     adamw -             no
layer_1/ffn_res/query        adamw -             decay
layer_1/input_norm           adamw -             no
layer_1/mixer/kv_norm        adamw -             no
layer_1/mixer/q_norm         adamw -             no
layer_1/mixer/w_g            muon  2 x [16, 12]  decay
layer_1/mixer/w_k_b          muon  6 x [7, 5]    decay
layer_1/mixer/w_kv_a         muon  2 x [16, 9]   decay
layer_1/mixer/w_o            muon  2 x [12, 16]  decay
layer_1/mixer/w_q_a          muon  2 x [16, 9]   decay
layer_1/mixer/w_q_b          muon  6 x [9, 7]    decay
layer_1/mixer/w_v_b          muon  6 x [7, 4]    decay
layer_1/mixer_res/key_norm   adamw -             no
layer_1/mixer_res/query      adamw -             decay
layer_1/post_norm            adamw -             no
backbone/final_norm          adamw -             no
backbone/output_res/key_norm adamw -             no
backbone/output_res/query    adamw -             decay
embedding                    adamw -             decay
lm_head                      adamw -             decay
"""


def as_snapshot(row):
    path = row.path.removeprefix("backbone/block_0/group_0/")
    blocks = "-" if row.blocks is None else "{} x [{}, {}]".format(*row.blocks)
    return f"{path} {row.group} {blocks} {'decay' if row.decay else 'no'}"


def test_every_leaf_is_in_the_group_and_the_blocks_of_the_snapshot(abstract_params):
    rows = optimizer.describe(abstract_params, CFG)
    expected = [" ".join(line.split()) for line in SNAPSHOT.strip().splitlines()]
    assert [as_snapshot(row) for row in rows] == expected


def test_every_leaf_has_state_in_exactly_one_group(abstract_params):
    state = jax.eval_shape(optimizer.make_optimizer(CFG, 10).init, abstract_params)
    groups = state[1].inner_states
    rows = optimizer.describe(abstract_params, CFG)
    for name, moments in (("muon", 1), ("adamw", 2)):
        shapes = [x.shape for x in jax.tree.leaves(groups[name]) if len(x.shape) > 0]
        # optax keeps the Newton-Schulz coefficients in its state.
        held = sorted(shape for shape in shapes if shape != (CFG.muon_ns_steps, 3))
        assert held == sorted([r.shape for r in rows if r.group == name] * moments)


def test_the_router_and_beta_move_to_adamw_by_choice_and_nothing_else_does(abstract_params):
    chosen = dataclasses.replace(CFG, router_muon=False, beta_muon=False)
    before, after = (optimizer.describe(abstract_params, c) for c in (CFG, chosen))
    moved = {b.path.rsplit("/", 1)[-1] for b, a in zip(before, after, strict=True) if a != b}
    assert moved == {"w_router", "w_beta"}
    assert all(a.decay == b.decay for b, a in zip(before, after, strict=True))


def test_a_renamed_parameter_is_refused_with_its_path():
    params = {"backbone": {"ffn": {"w_up_gate": jnp.ones((1, 4, 2, 3))}}}
    with pytest.raises(ValueError, match=r"backbone/ffn/w_up_gate: no optimizer rule .* RULES"):
        optimizer.make_optimizer(CFG, 10).init(params)


def test_the_router_bias_has_no_group():
    with pytest.raises(ValueError, match=r"router/bias: no optimizer rule"):
        optimizer.describe({"router": {"bias": jnp.zeros((2, 4))}}, CFG)


def test_a_leaf_with_too_few_axes_for_its_name_is_refused():
    with pytest.raises(ValueError, match=r"ffn/w_gate_up: shape \(4, 6\) has fewer than the 3"):
        optimizer.describe({"ffn": {"w_gate_up": jnp.zeros((4, 6))}}, CFG)


def test_the_rows_print_one_leaf_a_line(abstract_params):
    lines = optimizer.format_rows(optimizer.describe(abstract_params, CFG)).splitlines()
    assert len(lines) == len(jax.tree.leaves(abstract_params))
    line = next(line for line in lines if "experts/w_gate_up" in line)
    assert line.split("w_gate_up")[1].split() == (
        "muon decay [2, 4, 10, 2, 11] 16 x [10, 11]".split()
    )
