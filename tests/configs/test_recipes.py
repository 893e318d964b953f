"""Every recipe builds, and the larger ones have the sizes they name."""

import pathlib

import pytest

from configs import kimi_linear_48b, r1, small
from k3jax.config import load_recipe
from k3jax.models.kimi_k3 import counting
from k3jax.models.kimi_k3.published_config import parse_config

RECIPES = sorted(p.stem for p in pathlib.Path(small.__file__).parent.glob("[!_]*.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_a_run(name):
    assert load_recipe(name).train.steps > 0


def test_r1_has_the_public_records_totals():
    assert counting.total(r1.MODEL) == 1_023_600_228  # "1.02B total"
    assert counting.active(r1.MODEL) == 145_008_228  # "145M active"


def test_kimi_linear_has_the_published_totals():
    model = kimi_linear_48b.MODEL
    assert counting.total(model) == 49_122_681_728  # 49.12 B
    assert counting.active(model) == 3_106_972_544  # 3.11 B
    assert counting.active(model, with_embedding=True) == 3_484_459_904  # 3.48 B
    assert counting.released_padding(model) == 0


def test_kimi_linear_is_what_its_published_file_says():
    # Values of the release's config.json that decide the model.
    published = {
        "vocab_size": 163_840, "hidden_size": 2304, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 9216,
        "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_renormalize": True, "routed_scaling_factor": 2.446, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "mla_use_nope": True, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "kda_layers": [i for i in range(1, 27) if i % 4],
        },
    }  # fmt: skip
    stored = dict(param_dtype="bfloat16", compute_dtype="bfloat16")
    assert vars(parse_config(published)) | stored == vars(kimi_linear_48b.MODEL)


def test_small_has_a_hundred_million_parameters_in_the_proportions_of_k3():
    model = small.MODEL
    assert counting.total(model) == 105_902_948 and counting.active(model) == 38_531_940
    assert {len(model.mla_layers), model.num_layers} == {3, 9}
    assert model.mla_layers[-2:] == (7, 8) and model.moe.latent_dim * 2 == model.hidden_size
