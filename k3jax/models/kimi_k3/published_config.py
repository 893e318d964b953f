"""Published config.json -> `ModelConfig`, for Kimi K3 and Kimi-Linear."""

from collections.abc import Mapping

from k3jax.layers.activations import ActivationConfig
from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.mla import MlaConfig
from k3jax.models.kimi_k3.config import ModelConfig

# Values that select a variant we do not have; the released files agree with the right column.
_REQUIRED_VALUES = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
}


class _Fields:
    """Reads keys; an absent essential one is named, since a default would be another model."""

    def __init__(self, values: Mapping, where: str):
        self._values, self._where = values, where

    def __getitem__(self, key: str):
        if key not in self._values:
            raise ValueError(
                f"{self._where}: essential key {key!r} is missing; it has no safe default, "
                "take the file from the release"
            )
        return self._values[key]

    def get(self, key: str, default=None):
        return self._values.get(key, default)


def parse_config(published: Mapping) -> ModelConfig:
    """Translates a published configuration.

    Layer lists in the file are 1-based. An absent `gate_lower_bound` means the softplus gate.

    Args:
      published: the parsed config.json; a multimodal file's `text_config` is used.

    Raises:
      ValueError: an essential key is missing, or a value names a variant that does not exist here.
    """
    text = _Fields(published.get("text_config", published), "config.json")
    for key, value in _REQUIRED_VALUES.items():
        if text.get(key, value) != value:
            raise ValueError(
                f"config.json: {key}={text[key]!r} is not supported; released models have "
                f"{value!r}, so take a checkpoint with that value"
            )
    ahead = text.get("num_nextn_predict_layers", 0)
    if ahead not in (0, 1):
        raise ValueError(
            f"config.json: num_nextn_predict_layers={ahead!r}: 0 as released, or 1; take a "
            "checkpoint with one of these"
        )
    layers = text["num_hidden_layers"]
    mla_layers = _mla_layers(_Fields(text["linear_attn_config"], "linear_attn_config"), layers)
    return ModelConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=layers,
        mla_layers=mla_layers,
        kda=_kda(_Fields(text["linear_attn_config"], "linear_attn_config"), text),
        mla=_mla(text),
        moe=_moe(text),
        dense_width=text["intermediate_size"],
        dense_layers=text["first_k_dense_replace"],
        activation=_activation(text),
        attn_res_block=text.get("attn_res_block_size"),
        mtp_layers=ahead,
        norm_eps=text["rms_norm_eps"],
        tie_embeddings=text["tie_word_embeddings"],
    )


def _mla_layers(linear: _Fields, layers: int) -> tuple[int, ...]:
    full, kda = sorted(linear["full_attn_layers"]), sorted(linear["kda_layers"])
    if sorted(full + kda) != list(range(1, layers + 1)):
        raise ValueError(
            f"linear_attn_config: full_attn_layers {full} and kda_layers {kda} must name each of "
            f"the layers 1..{layers} once (1-based); correct the lists"
        )
    return tuple(i - 1 for i in full)


def _kda(linear: _Fields, text: _Fields) -> KdaConfig:
    width = linear["head_dim"]
    return KdaConfig(
        heads=linear["num_heads"],
        key_dim=width,
        value_dim=width,
        conv_width=linear["short_conv_kernel_size"],
        decay_rank=width,
        gate_lower_bound=linear.get("gate_lower_bound"),
        output_gate_rank=None if linear.get("use_full_rank_gate", False) else width,
        norm_eps=text["rms_norm_eps"],
    )


def _mla(text: _Fields) -> MlaConfig:
    if text["num_key_value_heads"] != text["num_attention_heads"]:
        raise ValueError(
            f"config.json: num_key_value_heads={text['num_key_value_heads']} differs from "
            f"num_attention_heads={text['num_attention_heads']}; latent attention has one key "
            "head per query head, so make them equal"
        )
    return MlaConfig(
        heads=text["num_attention_heads"],
        q_lora_rank=text["q_lora_rank"],
        kv_lora_rank=text["kv_lora_rank"],
        nope_dim=text["qk_nope_head_dim"],
        shared_dim=text["qk_rope_head_dim"],
        value_dim=text["v_head_dim"],
        output_gate=text.get("mla_use_output_gate", False),
    )


def _moe(text: _Fields) -> MoeConfig:
    return MoeConfig(
        experts=text["num_experts"],
        top_k=text["num_experts_per_token"],
        expert_width=text["moe_intermediate_size"],
        latent_dim=text.get("routed_expert_hidden_size"),
        latent_norm=text.get("latent_moe_use_norm", False),
        shared_experts=text["num_shared_experts"],
        scaling_factor=text["routed_scaling_factor"],
        renormalize=text["moe_renormalize"],
        norm_eps=text["rms_norm_eps"],
    )


def _activation(text: _Fields) -> ActivationConfig:
    kind = text["hidden_act"]
    if kind == "silu":
        return ActivationConfig(kind="swiglu")
    if kind != "situ":
        raise ValueError(f"config.json: hidden_act={kind!r}: choose 'situ' or 'silu'")
    return ActivationConfig(
        "situ", text["activation_situ_beta"], text.get("activation_situ_linear_beta")
    )
