"""A small tree with every leaf name of the model, scanned layers in front, all sizes distinct."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

G, D, H, K, V, R = 2, 16, 3, 5, 4, 6
RQ, RKV, ROT, NOPE, L, E, F = 9, 7, 2, 5, 10, 4, 11


def _kda():
    return {
        **{"w_q": (G, D, H, K), "w_k": (G, D, H, K), "w_v": (G, D, H, V)},
        **{"conv_q": (G, H, K, 4), "conv_k": (G, H, K, 4), "conv_v": (G, H, V, 4)},
        **{"w_f_a": (G, D, R), "w_f_b": (G, R, H, K), "dt_bias": (G, H, K), "a_log": (G, H)},
        **{"w_beta": (G, D, H), "w_g_a": (G, D, R), "w_g_b": (G, R, H, V)},
        **{"o_norm": (G, V), "w_o": (G, H, V, D)},
    }


def _mla():
    return {
        **{"w_q_a": (G, D, RQ), "q_norm": (G, RQ), "w_q_b": (G, RQ, H, NOPE + ROT)},
        **{"w_kv_a": (G, D, RKV + ROT), "kv_norm": (G, RKV)},
        **{"w_k_b": (G, RKV, H, NOPE), "w_v_b": (G, RKV, H, V)},
        **{"w_g": (G, D, H, V), "w_o": (G, H, V, D)},
    }


def _site():
    return {"query": (G, D), "key_norm": (G, D)}


def _moe():
    return {
        **{"w_router": (G, D, E), "w_latent_down": (G, D, L), "w_latent_up": (G, L, D)},
        "latent_norm": (G, L),
        "shared": {"w_gate_up": (G, D, 2, F), "w_down": (G, F, D)},
        "experts": {"w_gate_up": (G, E, L, 2, F), "w_down": (G, E, F, L)},
    }


def _layer(mixer, ffn):
    norms = {"input_norm": (G, D), "post_norm": (G, D)}
    return {"mixer": mixer, "ffn": ffn, "mixer_res": _site(), "ffn_res": _site(), **norms}


def _shapes():
    dense = {"w_gate_up": (G, D, 2, F), "w_down": (G, F, D)}
    group = {"layer_0": _layer(_kda(), dense), "layer_1": _layer(_mla(), _moe())}
    backbone = {"block_0": {"group_0": group}, "output_res": _site(), "final_norm": (D,)}
    return {"backbone": backbone, "embedding": (13, D), "lm_head": (D, 13)}


@pytest.fixture(scope="session")
def abstract_params():
    """`jax.ShapeDtypeStruct` tree of the whole model."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        _shapes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.fixture
def draw_params(abstract_params, rng):
    """Function that draws a new tree of normal numbers of the model's shapes."""

    def one():
        return jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), abstract_params
        )

    return one


@pytest.fixture
def newton_schulz():
    """Float64 oracle of one block: normalise, five quintic steps, no transposition trick."""

    def one(block, steps=5):
        x = np.asarray(block, np.float64)
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x

    return one
