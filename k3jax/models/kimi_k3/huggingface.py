"""Published checkpoints: folder of safetensors and config.json -> our configuration and variables.

Published linear weights are [out, in] and heads are flat; ours are [in, heads, width]. Reading is
strict: a missing tensor, and a text tensor that nothing used, are both errors.
"""

import json
import pathlib

import jax
import numpy as np
from safetensors import safe_open

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
        self._handles = [safe_open(f, framework="numpy") for f in files]
        names = {n: h for h in self._handles for n in h.keys()}  # noqa: SIM118
        self._published = {_canonical(n): (n, h) for n, h in names.items()}
        self.folder = folder
        self.used: set[str] = set()

    def __call__(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        if name not in self._published:
            packed = name.replace(".weight", ".weight_packed")
            hint = "regenerate the folder or check config.json"
            if packed in self._published:
                hint = "its experts are packed MXFP4, which this reader does not decode"
            raise PublishedCheckpointError(f"{self.folder}: tensor {name!r} is missing; {hint}")
        self.used.add(name)
        published, handle = self._published[name]
        value = handle.get_tensor(published)
        if shape is not None and value.shape != shape:
            raise PublishedCheckpointError(
                f"{self.folder}: tensor {published!r} has shape {value.shape}, config.json "
                f"implies {shape}; the two files belong to different models"
            )
        return value

    def unused(self) -> list[str]:
        """Text tensors nobody asked for."""
        return sorted(
            n for n in set(self._published) - self.used if not n.startswith(_OTHER_MODALITIES)
        )


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
      PublishedCheckpointError: no such folder, missing, misshapen or unused tensors.
      ValueError: config.json lacks an essential key or names an unknown variant.
    """
    folder = pathlib.Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise PublishedCheckpointError(
            f"{folder}: holds no config.json; give a released-layout folder"
        )
    cfg = parse_config(json.loads(path.read_text()))
    read = _Reader(folder)
    tree = _assemble(cfg, read)
    if read.unused():
        extra = read.unused()
        raise PublishedCheckpointError(
            f"{folder}: {len(extra)} tensors are unused, first {extra[0]!r}; config.json does not "
            "describe these weights"
        )
    target = jax.eval_shape(lambda key: model.init(cfg, key), jax.random.key(0))
    return cfg, jax.tree.map(_place, target, tree)


def _place(target: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
    assert target.shape == value.shape, (target.shape, value.shape)
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
        backbone["output_res"] = _mixture(read, "model.output_attn_res")
    params = {
        "backbone": backbone,
        "embedding": read("model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size)),
        "final_norm": read("model.norm.weight"),
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = read("lm_head.weight", (cfg.vocab_size, cfg.hidden_size)).T
    return {"params": params, "router": {"backbone": {"bias": np.stack(biases)}}}


def _layer(cfg: ModelConfig, kind: depth.LayerKind, read: _Reader, at: str):
    leaves = {
        "input_norm": read(at + "input_layernorm.weight"),
        "post_norm": read(at + "post_attention_layernorm.weight"),
    }
    if cfg.attn_res_block is not None:
        leaves["mixer_res"] = _mixture(read, at + "self_attention_res")
        leaves["ffn_res"] = _mixture(read, at + "mlp_res")
    mixer = _kda if kind.mixer == "kda" else _mla
    leaves["mixer"] = mixer(cfg, read, at + "self_attn.")
    if kind.ffn == "dense":
        leaves["ffn"] = _feed_forward(read, at + "mlp.")
        return leaves, None
    leaves["ffn"], bias = _moe(cfg, read, at + "block_sparse_moe.")
    return leaves, bias


def _mixture(read: _Reader, at: str) -> dict:
    return {"query": read(at + "_proj.weight")[0], "key_norm": read(at + "_norm.weight")}


def _into_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H·K, D] -> [D, H, K]."""
    return weight.T.reshape(weight.shape[1], heads, -1)


def _out_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[D, H·V] -> [H, V, D]."""
    return weight.T.reshape(heads, -1, weight.shape[0])


def _kda(cfg: ModelConfig, read: _Reader, at: str) -> dict:
    c, D = cfg.kda, cfg.hidden_size
    H, widths = c.heads, {"q": c.key_dim, "k": c.key_dim, "v": c.value_dim}
    leaves = {}
    for n, width in widths.items():
        leaves[f"w_{n}"] = _into_heads(read(f"{at}{n}_proj.weight", (H * width, D)), H)
        conv = read(f"{at}{n}_conv1d.weight", (H * width, 1, c.conv_width))
        leaves[f"conv_{n}"] = conv.reshape(H, width, c.conv_width)
    leaves |= {
        "w_f_a": read(at + "f_a_proj.weight", (c.decay_rank, D)).T,
        "w_f_b": _into_heads(read(at + "f_b_proj.weight"), H),
        "dt_bias": read(at + "dt_bias", (H * c.key_dim,)).reshape(H, c.key_dim),
        # One scalar per head; the release pads the vector with zeros to a multiple of 128.
        "a_log": read(at + "A_log").reshape(-1)[:H],
        "w_beta": read(at + "b_proj.weight", (H, D)).T,
        "o_norm": read(at + "o_norm.weight", (c.value_dim,)),
        "w_o": _out_of_heads(read(at + "o_proj.weight", (D, H * c.value_dim)), H),
    }
    if c.output_gate_rank is None:
        return leaves | {"w_g": _into_heads(read(at + "g_proj.weight"), H)}
    return leaves | {
        "w_g_a": read(at + "g_a_proj.weight").T,
        "w_g_b": _into_heads(read(at + "g_b_proj.weight"), H),
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
        leaves["w_g"] = _into_heads(read(at + "g_proj.weight"), H)
    if c.q_lora_rank is None:
        return leaves | {"w_q": _into_heads(read(at + "q_proj.weight", (H * c.query_dim, D)), H)}
    return leaves | {
        "w_q_a": read(at + "q_a_proj.weight", (c.q_lora_rank, D)).T,
        "q_norm": read(at + "q_a_layernorm.weight"),
        "w_q_b": _into_heads(read(at + "q_b_proj.weight", (H * c.query_dim, c.q_lora_rank)), H),
    }


def _feed_forward(read: _Reader, at: str) -> dict:
    both = [read(f"{at}{n}_proj.weight").T for n in ("gate", "up")]
    return {"w_gate_up": np.stack(both, axis=1), "w_down": read(at + "down_proj.weight").T}


def _moe(cfg: ModelConfig, read: _Reader, at: str) -> tuple[dict, np.ndarray]:
    c, D = cfg.moe, cfg.hidden_size
    experts = [f"{at}experts.{e}." for e in range(c.experts)]
    gate_up = [
        np.stack([read(e + "w1.weight").T, read(e + "w3.weight").T], axis=1) for e in experts
    ]
    leaves = {
        "w_router": read(at + "gate.weight", (c.experts, D)).T,
        "experts": {
            "w_gate_up": np.stack(gate_up),
            "w_down": np.stack([read(e + "w2.weight").T for e in experts]),
        },
        "shared": _feed_forward(read, at + "shared_experts."),
    }
    if c.latent_dim is not None:
        leaves["w_latent_down"] = read(at + "routed_expert_down_proj.weight", (c.latent_dim, D)).T
        leaves["w_latent_up"] = read(at + "routed_expert_up_proj.weight", (D, c.latent_dim)).T
    if c.latent_norm:
        leaves["latent_norm"] = read(at + "routed_expert_norm.weight", (c.latent_dim,))
    bias = read(at + "gate.e_score_correction_bias", (c.experts,))
    return leaves, np.asarray(bias, np.float32)


def is_published(folder: str | pathlib.Path) -> bool:
    """Whether a folder looks like a released-layout checkpoint."""
    folder = pathlib.Path(folder)
    return (folder / "config.json").is_file() and bool(_shards(folder))


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("model*.safetensors"))
