"""Every PartitionSpec of the model, by role; `tokens.whole` and `optim/owners.py` derive others.

Activations are split by sequence over `data` x `expert` and by position over `context`.
Parameters are split over `data` x `expert` along the model width (or their first axis), experts
over `expert`. Stacked layers carry one more leading axis, which stays whole.
"""

from jax.sharding import PartitionSpec as P

BATCH = ("data", "expert")  # both axes carry sequences outside the experts
WIDTH = ("data", "expert")  # fully sharded parameters: the axis that is gathered for use
TOKEN_AXES = ("data", "expert", "context")  # everything that splits tokens: axes of token sums

TOKENS = P(BATCH, "context")  # [B, T]
ACTIVATION = P(BATCH, "context", None)  # [B, T, D]
HEADS = P(BATCH, "context", None, None)  # [B, T, H, K]
SEQUENCE_STATE = P(BATCH, None, None, None)  # [B, H, K, V]
SEQUENCE_CACHE = P(BATCH, None, None)  # [B, S, C]
PER_SEQUENCE = P(BATCH)  # [B]
STACKED_STATE = P(None, BATCH, None, None, None)  # [layers, B, H, K, V]
STACKED_CACHE = P(None, BATCH, None, None)  # [layers, B, S, C]

REPLICATED = P()
VECTOR = P(None)  # [D], [H]
PER_CHANNEL = P(None, None)  # [H, K]
CONVOLUTION = P(None, None, None)  # [H, K, W]
IN_MATRIX = P(WIDTH, None)  # [D, F]
IN_HEADS = P(WIDTH, None, None)  # [D, H, K] and [D, 2, F]
OUT_MATRIX = P(None, WIDTH)  # [F, D]
OUT_HEADS = P(None, None, WIDTH)  # [H, V, D]
EXPERT_IN = P("expert", "data", None, None)  # [E, L, 2, F]
EXPERT_OUT = P("expert", None, "data")  # [E, F, L]
EMBEDDING = P(None, WIDTH)  # [V, D]
HEAD = P(WIDTH, None)  # [D, V]
ROUTER_BIAS = P(None, None)  # [layers, E]
