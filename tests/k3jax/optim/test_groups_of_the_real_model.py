"""The optimizer's table against the model that is really trained, not a list of expected names."""

import jax
import pytest

from configs import kimi_k3, tiny
from k3jax.models.kimi_k3 import model
from k3jax.optim.optimizer import describe


@pytest.fixture(scope="module")
def rows():
    """One row per parameter leaf of the tiny recipe."""
    run = tiny.config()
    shapes = jax.eval_shape(lambda key: model.init(run.model, key), jax.random.key(0))
    return shapes, describe(shapes["params"], run.optimizer)


def test_every_parameter_is_in_exactly_one_group_and_the_router_bias_in_none(rows):
    shapes, table = rows
    assert len(table) == len(jax.tree.leaves(shapes["params"]))
    assert len({row.path for row in table}) == len(table)
    assert {row.group for row in table} == {"muon", "adamw"}
    assert jax.tree.leaves(shapes["router"]) and not any("router/" in row.path for row in table)


def test_matrices_of_the_real_model_go_to_muon_and_the_rest_to_adamw(rows):
    by_leaf = {}
    for row in rows[1]:
        by_leaf.setdefault(row.path.split("/")[-1], set()).add((row.group, row.decay))
    muon = {
        "w_q", "w_k", "w_v", "w_f_a", "w_f_b", "w_beta", "w_g", "w_o", "w_q_a", "w_q_b", "w_kv_a",
        "w_k_b", "w_v_b", "w_gate_up", "w_down", "w_router", "w_latent_down", "w_latent_up",
    }  # fmt: skip
    decayed = {"embedding", "lm_head", "query", "conv_q", "conv_k", "conv_v"}
    undecayed = {
        "input_norm", "post_norm", "final_norm", "key_norm", "o_norm", "q_norm", "kv_norm",
        "latent_norm", "a_log", "dt_bias",
    }  # fmt: skip
    assert set(by_leaf) == muon | decayed | undecayed
    assert all(by_leaf[name] == {("muon", True)} for name in muon)
    assert all(by_leaf[name] == {("adamw", True)} for name in decayed)
    assert all(by_leaf[name] == {("adamw", False)} for name in undecayed)


def test_heads_experts_and_gate_branches_are_blocks_of_their_own(rows):
    blocks = {row.path: row.blocks for row in rows[1] if row.blocks}
    m = tiny.MODEL
    for path, (count, r, c) in blocks.items():
        leaf = path.split("/")[-1]
        if leaf in ("w_q", "w_k"):
            assert (count % m.kda.heads, sorted((r, c))) == (0, sorted((192, m.kda.key_dim)))
        if "/experts/w_gate_up" in path:
            assert count == 2 * m.moe.experts
        if "/experts/w_down" in path:
            assert count == m.moe.experts


def test_the_released_models_leaves_are_all_known_to_the_table():
    run = kimi_k3.config()
    shapes = jax.eval_shape(lambda key: model.init(run.model, key), jax.random.key(0))
    table = describe(shapes["params"], run.optimizer)
    assert len(table) == len(jax.tree.leaves(shapes["params"]))
