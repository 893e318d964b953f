"""Published checkpoints: folder of safetensors and config.json -> our configuration and variables.

Published linear weights are [out, in] and heads are flat; ours are [in, heads, width]. Reading is
strict: a missing tensor, and a text tensor that nothing used, are both errors.
"""

import dataclasses
import json
import pathlib

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from k3jax.models.kimi_k3 import depth, model
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.published_config import parse_config

_OTHER_MODALITIES = ("vision_tower.", "mm_projector.")


class PublishedCheckpointError(ValueError):
    """A folder is no released-layout checkpoint, or its tensors do not fit its configuration."""


class _Reader:
    """Tensors of a folder by name without their outer prefix; remembers which were used."""

    def __init__(self, folder: pathlib.Path):
        files = _shards(folder)
        if not files:
            raise PublishedCheckpointError(
                f"{folder}: holds no model*.safetensors; give the folder with "
                "config.json and the weight shards"
            )
        handles = [_open(f) for f in files]
        names = {n: h for h in handles for n in h.keys()}  # noqa: SIM118
        self._published = {_canonical(n): (n, h) for n, h in names.items()}
        self.folder = folder
        self.used: set[str] = set()

    def __call__(self, name: str, *shapes: tuple[int, ...]) -> np.ndarray:
        """The tensor `name`, which must have one of `shapes`."""
        if name not in self._published:
            packed = name.replace(".weight", ".weight_packed")
            hint = "regenerate the folder or check config.json"
            if packed in self._published:
                hint = "experts are packed MXFP4, not read yet: dequantise them to bfloat16 first"
            raise PublishedCheckpointError(f"{self.folder}: tensor {name!r} is missing; {hint}")
        self.used.add(name)
        published, handle = self._published[name]
        try:
            value = handle.get_tensor(published)
        except SafetensorError as error:
            raise PublishedCheckpointError(
                f"{self.folder}: tensor {published!r} cannot be read ({error}); fetch its "
                "shard again"
            ) from error
        if value.shape not in shapes:
            raise PublishedCheckpointError(
                f"{self.folder}: tensor {published!r} has shape {value.shape}, config.json "
                f"implies {' or '.join(map(str, shapes))}; the two files belong to different models"
            )
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._published

    def unused(self) -> list[str]:
        """Text tensors nobody asked for."""
        return sorted(
            n for n in set(self._published) - self.used if not n.startswith(_OTHER_MODALITIES)
        )


def _open(shard: pathlib.Path):
    try:
        return safe_open(shard, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise PublishedCheckpointError(
            f"{shard}: is no complete safetensors file ({error}); fetch this shard again"
        ) from error


def _read_config(path: pathlib.Path) -> ModelConfig:
    if not path.is_file():
        raise PublishedCheckpointError(
            f"{path.parent}: holds no config.json; give a released-layout folder"
        )
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor, as bytes, UTF-8
        raise PublishedCheckpointError(
            f"{path}: is no JSON ({error}); take the file from the release again"
        ) from error
    if not isinstance(published, dict):
        raise PublishedCheckpointError(
            f"{path}: holds a {type(published).__name__} instead of an object; take the file from "
            "the release again"
        )
    return parse_config(published)


def _canonical(name: str) -> str:
    """One name for `language_model.model.layers`, `language_model.layers` and `model.layers`."""
    name = name.removeprefix("language_model.")
    if name.startswith(("layers.", "embed_tokens.", "norm.", "output_attn_res")):
        name = "model." + name
    return name


def load(folder: str | pathlib.Path) -> tuple[ModelConfig, dict]:
    """Reads a released-layout folder.

    Returns:
      The configuration and {"params", "router"}: float32 parameters placed as `model.init` places
      them (released bfloat16 values are exact in float32).

    Raises:
      PublishedCheckpointError: no such folder, a file that cannot be read, missing, misshapen or
        unused tensors.
      ValueError: config.json lacks an essential key or names an unknown variant.
    """
    folder = pathlib.Path(folder)
    cfg = _read_config(folder / "config.json")
    read = _Reader(folder)
    tree = _assemble(cfg, read)
    if read.unused():
        extra = read.unused()
        raise PublishedCheckpointError(
            f"{folder}: {len(extra)} tensors are unused, first {extra[0]!r}; config.json does not "
            "describe these weights"
        )
    target = model.abstract(cfg)
    return cfg, jax.tree.map(_place, target, tree)


def _place(target: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
    assert target.shape == value.shape, (target.shape, value.shape)  # `read` checked each tensor
    mesh = jax.sharding.get_mesh()
    spec = target.sharding.spec
    return jax.device_put(value.astype(target.dtype), jax.sharding.NamedSharding(mesh, spec))


def _assemble(cfg: ModelConfig, read: _Reader) -> dict:
    backbone: dict = {}
    biases = []
    for layer, kind, (block, group, name), copy in depth.layer_paths(cfg):
        leaves, bias = _layer(cfg, kind, read, f"model.layers.{layer}.")
        stack = backbone.setdefault(block, {}).setdefault(group, {}).setdefault(name, [])
        assert len(stack) == copy
        stack.append(leaves)
        if bias is not None:
            biases.append(bias)
    for groups in backbone.values():
        for layers in groups.values():
            for name, stack in layers.items():
                layers[name] = jax.tree.map(lambda *a: np.stack(a), *stack)
    if cfg.attn_res_block is not None:
        backbone["output_res"] = _mixture(cfg, read, "model.output_attn_res")
    params = {
        "backbone": backbone,
        "embedding": read("model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size)),
        "final_norm": read("model.norm.weight", (cfg.hidden_size,)),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = read("lm_head.weight", (cfg.vocab_size, cfg.hidden_size)).T
    if cfg.mtp_layers:
        params["mtp"], bias = _mtp(cfg, read, params)
        biases.append(bias)
    return {"params": params, "router": {"backbone": {"bias": np.stack(biases)}}}


def _mtp(cfg: ModelConfig, read: _Reader, params: dict) -> tuple[dict, np.ndarray]:
    """The layer of multi-token prediction, which vLLM names as one past the last layer."""
    at, D = f"model.layers.{cfg.num_layers}.", cfg.hidden_size
    plain = dataclasses.replace(cfg, attn_res_block=None)
    leaves, bias = _layer(plain, depth.mtp_group(cfg).kinds[0], read, at)
    # Files may repeat the embedding and the head in the layer; ours are the main ones.
    head = params["embedding"] if cfg.tie_embeddings else params["lm_head"].T
    for name, ours in (("embed_tokens", params["embedding"]), ("shared_head.head", head)):
        if at + name + ".weight" not in read:
            continue
        if not np.array_equal(read(at + name + ".weight", (cfg.vocab_size, D)), ours):
            raise PublishedCheckpointError(
                f"{read.folder}: tensor '{at}{name}.weight' differs from the main one, which this "
                "model uses in its place; set num_nextn_predict_layers to 0 and drop the layer"
            )
    return {
        "block": {"group_0": {"layer_0": jax.tree.map(lambda a: a[None], leaves)}},
        "embed_norm": read(at + "enorm.weight", (D,)),
        "hidden_norm": read(at + "hnorm.weight", (D,)),
        "w_eh": read(at + "eh_proj.weight", (D, 2 * D)).T,
        "final_norm": read(at + "shared_head.norm.weight", (D,)),
    }, bias


def _layer(cfg: ModelConfig, kind: depth.LayerKind, read: _Reader, at: str):
    leaves = {
        "input_norm": read(at + "input_layernorm.weight", (cfg.hidden_size,)),
        "post_norm": read(at + "post_attention_layernorm.weight", (cfg.hidden_size,)),
    }
    if cfg.attn_res_block is not None:
        leaves["mixer_res"] = _mixture(cfg, read, at + "self_attention_res")
        leaves["ffn_res"] = _mixture(cfg, read, at + "mlp_res")
    mixer = _kda if kind.mixer == "kda" else _mla
    leaves["mixer"] = mixer(cfg, read, at + "self_attn.")
    if kind.ffn == "dense":
        leaves["ffn"] = _feed_forward(cfg, read, at + "mlp.", cfg.dense_width)
        return leaves, None
    leaves["ffn"], bias = _moe(cfg, read, at + "block_sparse_moe.")
    return leaves, bias


def _mixture(cfg: ModelConfig, read: _Reader, at: str) -> dict:
    D = cfg.hidden_size
    return {
        "query": read(at + "_proj.weight", (1, D))[0],
        "key_norm": read(at + "_norm.weight", (D,)),
    }


def _into_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H·K, D] -> [D, H, K]."""
    return weight.T.reshape(weight.shape[1], heads, -1)


def _out_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[D, H·V] -> [H, V, D]."""
    return weight.T.reshape(heads, -1, weight.shape[0])


def _kda(cfg: ModelConfig, read: _Reader, at: str) -> dict:
    c, D = cfg.kda, cfg.hidden_size
    H, widths = c.heads, {"q": c.key_dim, "k": c.key_dim, "v": c.value_dim}
    padded = -(-H // 128) * 128
    leaves = {}
    for n, width in widths.items():
        leaves[f"w_{n}"] = _into_heads(read(f"{at}{n}_proj.weight", (H * width, D)), H)
        conv = read(f"{at}{n}_conv1d.weight", (H * width, 1, c.conv_width))
        leaves[f"conv_{n}"] = conv.reshape(H, width, c.conv_width)
    leaves |= {
        "w_f_a": read(at + "f_a_proj.weight", (c.decay_rank, D)).T,
        "w_f_b": _into_heads(read(at + "f_b_proj.weight", (H * c.key_dim, c.decay_rank)), H),
        "dt_bias": read(at + "dt_bias", (H * c.key_dim,)).reshape(H, c.key_dim),
        # One scalar per head; K3 pads the vector with zeros to a multiple of 128, Kimi-Linear and
        # older files of K3 have [1, 1, H, 1].
        "a_log": read(at + "A_log", (padded,), (H,), (1, 1, H, 1)).reshape(-1)[:H],
        "w_beta": read(at + "b_proj.weight", (H, D)).T,
        "o_norm": read(at + "o_norm.weight", (c.value_dim,)),
        "w_o": _out_of_heads(read(at + "o_proj.weight", (D, H * c.value_dim)), H),
    }
    rank, out = c.output_gate_rank, H * c.value_dim
    if rank is None:
        return leaves | {"w_g": _into_heads(read(at + "g_proj.weight", (out, D)), H)}
    return leaves | {
        "w_g_a": read(at + "g_a_proj.weight", (rank, D)).T,
        "w_g_b": _into_heads(read(at + "g_b_proj.weight", (out, rank)), H),
    }


def _mla(cfg: ModelConfig, read: _Reader, at: str) -> dict:
    c, D = cfg.mla, cfg.hidden_size
    H, R = c.heads, c.kv_lora_rank
    up = read(at + "kv_b_proj.weight", (H * (c.nope_dim + c.value_dim), R))
    up = _into_heads(up, H)  # per head: content keys, then values
    leaves = {
        "w_kv_a": read(at + "kv_a_proj_with_mqa.weight", (R + c.shared_dim, D)).T,
        "kv_norm": read(at + "kv_a_layernorm.weight", (R,)),
        "w_k_b": up[..., : c.nope_dim],
        "w_v_b": up[..., c.nope_dim :],
        "w_o": _out_of_heads(read(at + "o_proj.weight", (D, H * c.value_dim)), H),
    }
    if c.output_gate:
        leaves["w_g"] = _into_heads(read(at + "g_proj.weight", (H * c.value_dim, D)), H)
    if c.q_lora_rank is None:
        return leaves | {"w_q": _into_heads(read(at + "q_proj.weight", (H * c.query_dim, D)), H)}
    return leaves | {
        "w_q_a": read(at + "q_a_proj.weight", (c.q_lora_rank, D)).T,
        "q_norm": read(at + "q_a_layernorm.weight", (c.q_lora_rank,)),
        "w_q_b": _into_heads(read(at + "q_b_proj.weight", (H * c.query_dim, c.q_lora_rank)), H),
    }


def _feed_forward(cfg: ModelConfig, read: _Reader, at: str, width: int) -> dict:
    D = cfg.hidden_size
    both = [read(f"{at}{n}_proj.weight", (width, D)).T for n in ("gate", "up")]
    down = read(at + "down_proj.weight", (D, width)).T
    return {"w_gate_up": np.stack(both, axis=1), "w_down": down}


def _moe(cfg: ModelConfig, read: _Reader, at: str) -> tuple[dict, np.ndarray]:
    c, D = cfg.moe, cfg.hidden_size
    F, L = c.expert_width, D if c.latent_dim is None else c.latent_dim
    experts = [f"{at}experts.{e}." for e in range(c.experts)]
    gate_up = [
        np.stack([read(f"{e}{n}.weight", (F, L)).T for n in ("w1", "w3")], axis=1) for e in experts
    ]
    leaves = {
        "w_router": read(at + "gate.weight", (c.experts, D)).T,
        "experts": {
            "w_gate_up": np.stack(gate_up),
            "w_down": np.stack([read(e + "w2.weight", (L, F)).T for e in experts]),
        },
        "shared": _feed_forward(cfg, read, at + "shared_experts.", c.shared_total),
    }
    if c.latent_dim is not None:
        leaves["w_latent_down"] = read(at + "routed_expert_down_proj.weight", (L, D)).T
        leaves["w_latent_up"] = read(at + "routed_expert_up_proj.weight", (D, L)).T
    if c.latent_norm:
        leaves["latent_norm"] = read(at + "routed_expert_norm.weight", (L,))
    bias = read(at + "gate.e_score_correction_bias", (c.experts,))
    return leaves, np.asarray(bias, np.float32)


def is_published(folder: str | pathlib.Path) -> bool:
    """Whether a folder looks like a released-layout checkpoint."""
    folder = pathlib.Path(folder)
    return (folder / "config.json").is_file() and bool(_shards(folder))


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("model*.safetensors"))
