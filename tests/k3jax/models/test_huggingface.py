"""Reading published configurations and checkpoints, and refusing what does not fit."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from k3jax.models.kimi_k3 import depth, huggingface, model
from k3jax.models.kimi_k3.huggingface import PublishedCheckpointError
from k3jax.models.kimi_k3.published_config import parse_config


@pytest.fixture
def published(k3) -> dict:
    """A published configuration, free to edit."""
    return json.loads((k3.folder / "config.json").read_text())


def test_one_based_layer_lists_become_the_right_layers(published):
    cfg = parse_config(published)
    assert cfg.mla_layers == (3, 7, 8)
    assert cfg.attn_res_block == 4 and cfg.kda.gate_lower_bound == -5.0
    assert cfg.mla.latent_norm_eps == 1e-6 and cfg.norm_eps == 1e-5


@pytest.mark.parametrize(
    "key",
    ["num_experts_per_token", "intermediate_size", "rms_norm_eps", "hidden_act", "v_head_dim"],
)
def test_a_missing_essential_key_is_refused_by_name(published, key):
    del published["text_config"][key]
    with pytest.raises(ValueError, match=f"{key}.*missing"):
        parse_config(published)


def test_absent_lower_bound_selects_softplus_and_is_not_minus_five(published):
    del published["text_config"]["linear_attn_config"]["gate_lower_bound"]
    assert parse_config(published).kda.gate_lower_bound is None
    published["text_config"]["linear_attn_config"]["gate_lower_bound"] = 0
    with pytest.raises(ValueError, match="gate_lower_bound=0"):
        parse_config(published)


@pytest.mark.parametrize(
    "key,value",
    [
        ("mla_use_nope", False),
        ("hidden_act", "gelu"),
        ("topk_group", 2),
        ("rope_scaling", {}),
        ("num_nextn_predict_layers", 2),
    ],
)
def test_a_variant_that_does_not_exist_here_is_refused_with_its_value(published, key, value):
    published["text_config"][key] = value
    with pytest.raises(ValueError, match=key):
        parse_config(published)


def test_layer_lists_must_name_every_layer_once(published):
    published["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 3, 4]
    with pytest.raises(ValueError, match="name each of the layers 1..9 once"):
        parse_config(published)


def edited(k3, tmp_path, change):
    """A copy of the tiny checkpoint whose second shard `change` has edited."""
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        shutil.copy(k3.folder / name, tmp_path / name)
    tensors = load_file(k3.folder / "model-00002-of-00002.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_a_missing_tensor_is_refused_by_name(k3, tmp_path):
    folder = edited(k3, tmp_path, lambda t: t.pop("language_model.model.norm.weight"))
    with pytest.raises(ValueError, match="model.norm.weight.*missing"):
        huggingface.load(folder)


def test_an_unused_tensor_is_refused_by_name(k3, tmp_path):
    def add(tensors):
        tensors["language_model.model.layers.3.self_attn.sink"] = np.zeros(3, np.float32)

    with pytest.raises(ValueError, match="unused.*sink"):
        huggingface.load(edited(k3, tmp_path, add))


def test_a_bias_of_ten_in_a_published_folder_still_chooses_its_expert(k3, tmp_path):
    def favour(tensors):
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] = np.float32([10] + [0] * (tensors[name].size - 1))

    cfg, variables = huggingface.load(edited(k3, tmp_path, favour))
    tokens = jax.random.randint(jax.random.key(0), (1, 20), 0, cfg.vocab_size)
    run = jax.jit(lambda v: model.forward(cfg, v, tokens, train=True).stats.load)
    load = np.asarray(run(variables))
    # The second shard holds the last three layers; the first layer has no experts.
    assert np.all(load[-3:, 0] == 20) and np.all(load[:-3, 0] < 20)
    assert np.all(load.sum(axis=1) == 20 * cfg.moe.top_k)


def test_the_bias_of_a_published_folder_arrives_with_its_sign(k3, tmp_path):
    drawn = np.random.default_rng(0)
    written = {}

    def scatter(tensors):
        for name in sorted(tensors):
            if name.endswith("e_score_correction_bias"):
                tensors[name] = drawn.normal(size=tensors[name].size).astype(np.float32)
                written[int(name.split(".layers.")[1].split(".")[0])] = tensors[name]

    _, variables = huggingface.load(edited(k3, tmp_path, scatter))
    bias = np.asarray(variables["router"]["backbone"]["bias"])
    assert sorted(written) == [6, 7, 8] and np.any(written[8] < 0)
    np.testing.assert_array_equal(bias[-3:], [written[layer] for layer in sorted(written)])


PREFIX = "language_model.model.layers."


def with_ahead(k3, tmp_path, change=lambda tensors: None):
    """The tiny checkpoint with layer 8 again as layer 9, the one of multi-token prediction."""
    drawn = np.random.default_rng(0)

    def add(tensors):
        D = k3.cfg.hidden_size
        for name in [n for n in tensors if n.startswith(PREFIX + "8.") and "_res_" not in n]:
            tensors[name.replace("layers.8.", "layers.9.")] = tensors[name]
        for name, shape in (
            ("enorm", (D,)), ("hnorm", (D,)), ("shared_head.norm", (D,)), ("eh_proj", (D, 2 * D)),
        ):  # fmt: skip
            value = drawn.normal(size=shape).astype(np.float32)
            tensors[f"{PREFIX}9.{name}.weight"] = value
        tensors[PREFIX + "9.shared_head.head.weight"] = tensors["language_model.lm_head.weight"]
        change(tensors)

    folder = edited(k3, tmp_path, add)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_layer_of_multi_token_prediction_is_read_by_vllms_names(k3, tmp_path):
    folder = with_ahead(k3, tmp_path)
    cfg, variables = huggingface.load(folder)
    assert cfg == dataclasses.replace(k3.cfg, mtp_layers=1, remat=cfg.remat)
    mtp = variables["params"].pop("mtp")
    chex.assert_trees_all_equal(variables["params"], k3.variables["params"], strict=True)
    tensors = load_file(folder / "model-00002-of-00002.safetensors")
    np.testing.assert_array_equal(mtp["w_eh"], tensors[PREFIX + "9.eh_proj.weight"].T)
    np.testing.assert_array_equal(mtp["embed_norm"], tensors[PREFIX + "9.enorm.weight"])
    np.testing.assert_array_equal(mtp["hidden_norm"], tensors[PREFIX + "9.hnorm.weight"])
    np.testing.assert_array_equal(mtp["final_norm"], tensors[PREFIX + "9.shared_head.norm.weight"])
    layer = mtp["block"]["group_0"]["layer_0"]
    last = list(depth.layer_paths(cfg))[-1]
    node = k3.variables["params"]["backbone"]
    for name in last[2]:
        node = node[name]
    kept = {n: p for n, p in node.items() if not n.endswith("_res")}
    chex.assert_trees_all_equal(layer, jax.tree.map(lambda a: a[last[3] :][:1], kept))
    bias = variables["router"]["backbone"]["bias"]
    assert bias.shape[0] == cfg.moe_layers + 1
    np.testing.assert_array_equal(bias[-1], bias[-2])


def test_a_head_of_its_own_in_the_layer_of_multi_token_prediction_is_refused(k3, tmp_path):
    def other(tensors):
        tensors[PREFIX + "9.shared_head.head.weight"] = 2 * tensors["language_model.lm_head.weight"]

    with pytest.raises(PublishedCheckpointError, match="shared_head.head.*differs from the main"):
        huggingface.load(with_ahead(k3, tmp_path, other))


def test_a_misshapen_tensor_is_refused_with_both_shapes(k3, tmp_path):
    def cut(tensors):
        head = tensors["language_model.lm_head.weight"]
        tensors["language_model.lm_head.weight"] = np.ascontiguousarray(head[:100])

    with pytest.raises(ValueError, match=r"\(100, 128\).*\(512, 128\)"):
        huggingface.load(edited(k3, tmp_path, cut))


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.g_proj.weight",
        "self_attn.A_log",
        "block_sparse_moe.experts.1.w2.weight",
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "mlp_res_proj.weight",
        "input_layernorm.weight",
    ],
)
def test_every_misshapen_tensor_of_a_layer_is_refused_by_name(k3, tmp_path, name):
    def cut(tensors):
        full = next(n for n in sorted(tensors) if n.endswith(name))
        tensors[full] = np.ascontiguousarray(tensors[full][..., :-1])

    with pytest.raises(PublishedCheckpointError, match=rf"{name}' has shape.*implies") as refusal:
        huggingface.load(edited(k3, tmp_path, cut))
    assert "\n" not in str(refusal.value)


def test_a_truncated_shard_is_refused_in_one_line_with_its_name(k3, tmp_path):
    folder = edited(k3, tmp_path, lambda tensors: None)
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for length in (0, 100, len(whole) - 1):
        shard.write_bytes(whole[:length])
        with pytest.raises(PublishedCheckpointError, match=f"{shard.name}.*again") as refusal:
            huggingface.load(folder)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", [b"", b'{"text_config": {', b"[1, 2]", b"\xff\xfe"])
def test_a_broken_config_is_refused_in_one_line(k3, tmp_path, text):
    folder = edited(k3, tmp_path, lambda tensors: None)
    (folder / "config.json").write_bytes(text)
    with pytest.raises(PublishedCheckpointError, match="config.json.*again") as refusal:
        huggingface.load(folder)
    assert "\n" not in str(refusal.value)


def test_the_older_naming_without_the_inner_model_is_read_too(k3, tmp_path):
    def rename(tensors):
        for name in list(tensors):
            older = name.replace("language_model.model.", "language_model.")
            tensors[older] = tensors.pop(name)

    _, variables = huggingface.load(edited(k3, tmp_path, rename))
    chex.assert_trees_all_equal(variables, k3.variables, strict=True)


def test_a_folder_without_weights_or_config_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        huggingface.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="hidden_size|linear_attn_config|num_hidden_layers"):
        huggingface.load(tmp_path)
    assert not huggingface.is_published(tmp_path)
