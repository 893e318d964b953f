"""How many parameters a model has and how many FLOPs a token costs, by part, in closed form.

Parameters are grouped as the report counts them: a mixer or feed-forward holds its own norms and,
for experts, the balancing bias of its router; the norms between layers and the reads over depth
are one part of their own. "Active" is what one token meets: of the routed experts its top_k, and
the head but not the rows of the input embedding (the report's 104.2 B). The layer of multi-token
prediction runs in training only: it has parameters and training FLOPs, and none of it is active.

A product of a token with a matrix of n numbers is 2n FLOPs. Counted are products with parameters,
attention over the causal average of (T + 1)/2 keys, the convolution, the chunked delta rule and
the mixtures over depth; not counted are norms, activations, softmax and anything computed twice.
"""

from typing import NamedTuple

from k3jax.models.kimi_k3 import depth
from k3jax.models.kimi_k3.config import ModelConfig

# Chunk of the delta rule in `forward_flops`, that of the published kernels. It is fixed so that a
# run with another chunk is measured against the same work.
KDA_CHUNK = 64

# Backward needs two products for each of the forward pass: one for either operand.
TRAINING_FACTOR = 3


class Part(NamedTuple):
    """Equal pieces of the model.

    Attributes:
      size: parameters of one piece.
      products: how many of them multiply a token as entries of a matrix.
      copies: pieces in the model.
      active: pieces that one token meets.
    """

    size: int
    products: int
    copies: int
    active: int

    @property
    def total(self) -> int:
        """Parameters of all pieces."""
        return self.size * self.copies


def parts(cfg: ModelConfig) -> dict[str, Part]:
    """The model's parts, in the order of the forward pass; parts that it lacks are left out.

    Sums of `total` equal the leaves of `model.init`, router biases included. With tied embeddings
    the one table counts as the head, which every token meets whole.
    """
    kinds = depth.layer_kinds(cfg)
    count = {name: sum(name in kind for kind in kinds) for name in ("kda", "mla", "dense", "moe")}
    table = cfg.vocab_size * cfg.hidden_size
    found = {
        "embedding": Part(table, 0, int(not cfg.tie_embeddings), 0),
        "KDA mixer": Part(*_kda(cfg), count["kda"], count["kda"]),
        "MLA mixer": Part(*_mla(cfg), count["mla"], count["mla"]),
        "dense feed-forward": Part(
            *_gated(cfg.hidden_size, cfg.dense_width), count["dense"], count["dense"]
        ),
        "MoE, not routed": Part(*_moe(cfg), count["moe"], count["moe"]),
        "routed expert": Part(
            *_gated(_expert_input(cfg), cfg.moe.expert_width),
            count["moe"] * cfg.moe.experts, count["moe"] * cfg.moe.top_k,
        ),
        "norms, reads over depth": Part(_between_layers(cfg), 0, 1, 1),
        "head": Part(table, table, 1, 1),
        "multi-token layer": Part(*_multi_token(cfg), cfg.mtp_layers, 0),
    }  # fmt: skip
    return {name: part for name, part in found.items() if part.copies}


def total(cfg: ModelConfig) -> int:
    """Parameters of the model, router biases included."""
    return sum(part.total for part in parts(cfg).values())


def active(cfg: ModelConfig, *, with_embedding: bool = False) -> int:
    """Parameters that one token meets.

    Args:
      cfg: the model.
      with_embedding: count the input embedding as well; the report does not. A tied one is the
        head and counts once either way.
    """
    met = sum(part.size * part.active for part in parts(cfg).values())
    return met + (parts(cfg)["embedding"].total if with_embedding and not cfg.tie_embeddings else 0)


def released_padding(cfg: ModelConfig) -> int:
    """Zeros that a released K3 file holds beyond `total`: decay rates padded to 128 a layer.

    Kimi-Linear's files, known by their plain residuals, pad nothing.
    """
    if cfg.attn_res_block is None or "KDA mixer" not in parts(cfg):
        return 0
    return parts(cfg)["KDA mixer"].copies * (-cfg.kda.heads % 128)


def forward_flops(cfg: ModelConfig, sequence_length: int) -> dict[str, float]:
    """FLOPs of one token's forward pass, by part; the mean over a row that is one document.

    Packed documents shorter than the row see fewer keys, so that this is an upper bound for them.

    Args:
      cfg: the model.
      sequence_length: T, tokens in a row.
    """
    found = parts(cfg)
    flops = {n: 2.0 * p.products * p.active for n, p in found.items() if p.products * p.active}
    if "KDA mixer" in found:
        k = cfg.kda
        flops["delta rule"] = float(found["KDA mixer"].copies * k.heads * _delta_rule(cfg))
    if "MLA mixer" in found:
        flops["attention"] = found["MLA mixer"].copies * _attention(cfg, sequence_length)
    if cfg.attn_res_block is not None:
        # For each source its score, 2D, and its share of the mixture, 2D.
        flops["mixtures over depth"] = 4.0 * cfg.hidden_size * depth_reads(cfg)
    return flops


def multi_token_flops(cfg: ModelConfig, sequence_length: int) -> float:
    """FLOPs that the layer of multi-token prediction adds to a token's forward pass in training.

    Its products, of the routed experts those of top_k, its attention, and the head once more.
    """
    if not cfg.mtp_layers:
        return 0.0
    idle = (cfg.moe.experts - cfg.moe.top_k) * _gated(_expert_input(cfg), cfg.moe.expert_width)[1]
    products = _multi_token(cfg)[1] - idle + cfg.vocab_size * cfg.hidden_size
    return 2.0 * products + _attention(cfg, sequence_length)


def flops_per_token(cfg: ModelConfig, sequence_length: int) -> float:
    """FLOPs of training on one token: forward and backward, without recomputation."""
    forward = sum(forward_flops(cfg, sequence_length).values())
    return TRAINING_FACTOR * (forward + multi_token_flops(cfg, sequence_length))


def depth_reads(cfg: ModelConfig) -> int:
    """Sources read by all mixtures over depth (§2.2), the always shut prefix of a block included.

    Block b holds b + 1 frozen rows and the prefix; a layer reads twice, the output once.
    """
    if cfg.attn_res_block is None:
        return 0
    if cfg.attn_res_block == "full":  # sublayer n reads the embedding and all n before it
        return (cfg.num_layers + 1) * (2 * cfg.num_layers + 1)
    reads = sum(2 * (i // cfg.attn_res_block + 2) for i in range(cfg.num_layers))
    return reads + len(depth.blocks(cfg)) + 1


def _delta_rule(cfg: ModelConfig) -> int:
    """One token and head: the chunked form's products, each triangle counted once, and taps.

    With C tokens a chunk: K Kᵀ and Q Kᵀ under their diagonals, 2CK; the triangular solve and A U,
    2CV; three products with the state, 6KV.
    """
    K, V, C = cfg.kda.key_dim, cfg.kda.value_dim, KDA_CHUNK
    return 6 * K * V + 2 * C * (K + V) + 2 * cfg.kda.conv_width * (2 * K + V)


def _kda(cfg: ModelConfig) -> tuple[int, int]:
    c, D = cfg.kda, cfg.hidden_size
    H, K, V = c.heads, c.key_dim, c.value_dim
    rank = c.output_gate_rank
    gate = D * H * V if rank is None else D * rank + rank * H * V
    decay_and_beta = D * c.decay_rank + c.decay_rank * H * K + D * H
    products = D * H * (2 * K + V) + decay_and_beta + gate + H * V * D
    taps, constants = c.conv_width * H * (2 * K + V), H + H * K + V  # a_log, dt_bias, o_norm
    return products + taps + constants, products


def _mla(cfg: ModelConfig) -> tuple[int, int]:
    c, D = cfg.mla, cfg.hidden_size
    H, Q, R = c.heads, c.q_lora_rank, c.kv_lora_rank
    queries = D * H * c.query_dim if Q is None else D * Q + Q * H * c.query_dim
    keys_and_values = D * (R + c.shared_dim) + R * H * (c.nope_dim + c.value_dim)
    outputs = D * H * c.value_dim * (1 + c.output_gate)
    products = queries + keys_and_values + outputs
    return products + (Q or 0) + R, products  # and the two latent norms


def _attention(cfg: ModelConfig, sequence_length: int) -> float:
    """FLOPs of one layer and token: q·k, then the weight times v, over the mean number of keys."""
    pair = 2 * (cfg.mla.query_dim + cfg.mla.value_dim)
    return cfg.mla.heads * pair * (sequence_length + 1) / 2


def _multi_token(cfg: ModelConfig) -> tuple[int, int]:
    """The joining matrix, a layer of latent attention and experts, and five norms."""
    experts = _gated(_expert_input(cfg), cfg.moe.expert_width)[0] * cfg.moe.experts
    inner = [_mla(cfg), _moe(cfg), (experts, experts), (2 * cfg.hidden_size**2,) * 2]
    size, products = (sum(column) for column in zip(*inner, strict=True))
    return size + 5 * cfg.hidden_size, products


def _gated(width: int, hidden: int) -> tuple[int, int]:
    return 3 * width * hidden, 3 * width * hidden


def _expert_input(cfg: ModelConfig) -> int:
    return cfg.hidden_size if cfg.moe.latent_dim is None else cfg.moe.latent_dim


def _moe(cfg: ModelConfig) -> tuple[int, int]:
    c, D = cfg.moe, cfg.hidden_size
    latent = 0 if c.latent_dim is None else 2 * D * c.latent_dim
    products = D * c.experts + latent + 3 * D * c.shared_total
    norm = _expert_input(cfg) if c.latent_norm else 0
    return products + norm + c.experts, products  # and the balancing bias


def _between_layers(cfg: ModelConfig) -> int:
    norms = 2 * cfg.num_layers + 1
    reads = 0 if cfg.attn_res_block is None else 2 * cfg.num_layers + 1  # a query and a key norm
    return (norms + 2 * reads) * cfg.hidden_size
