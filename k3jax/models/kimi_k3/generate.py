"""Cached generation: prefill once, then one compiled step per token.

Prompts of different lengths share a batch by padding on the left (segment id 0). Lengths are
rounded up to buckets, so a new prompt rarely compiles again; the settings of the sampler are
traced and never do.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from k3jax.models.kimi_k3 import cache as decoding
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.sampling import Sampling, sample
from k3jax.parallel import specs
from k3jax.parallel import tokens as mesh_tokens

BUCKET = 64  # prompt and cache lengths are multiples of it


class Generator:
    """Holds the two compiled functions of one model; parameters are arguments of each call."""

    def __init__(self, cfg: ModelConfig, vocab_size: int | None = None):
        """Compiles nothing yet; ids from `vocab_size` on (the model's by default) are not drawn."""
        self._cfg, self._vocab_size = cfg, vocab_size or cfg.vocab_size
        self._prefill, self._decode = _compiled(cfg)

    def stream(
        self,
        variables: Any,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: Sampling,
        key: jax.Array,
    ) -> Iterator[np.ndarray]:
        """Iterates over int32 [B], the next token of each prompt, `count` times.

        The device computes one token ahead of the one that is yielded. Equal arguments give equal
        tokens; so does the same prompt in the same row of another batch, up to rounding of logits.

        Args:
          variables: {"params", "router"}.
          prompts: Token ids, at least one each.
          count: Tokens to generate.
          sampling: How to choose.
          key: Typed PRNG key, the root of the draws.

        Raises:
          ValueError: an empty batch, an empty prompt, an id outside the vocabulary, count < 1;
            and, when that token is asked for, logits that are not finite.
        """
        _check(prompts, count, self._vocab_size)  # now, not when the first token is asked for
        return self._stream(variables, prompts, count, sampling, key)

    def _stream(self, variables, prompts, count, sampling, key) -> Iterator[np.ndarray]:
        settings = (
            jnp.int32(self._vocab_size),
            jnp.float32(sampling.temperature),
            jnp.int32(min(sampling.top_k, self._cfg.vocab_size)),  # more than all is all
            jnp.float32(sampling.top_p),
        )
        tokens, segments = _left_pad(prompts)
        cache = decoding.init_cache(self._cfg, len(tokens), _round_up(tokens.shape[1] + count))
        token, cache = self._prefill(variables, tokens, segments, cache, key, settings)
        for index in range(1, count):
            ready = token
            token, cache = self._decode(
                variables, token, cache=cache, key=key, index=jnp.int32(index), settings=settings
            )
            yield _finite(np.asarray(ready)[: len(prompts)], index)
        yield _finite(np.asarray(token)[: len(prompts)], count)

    def generate(self, *args, **kwargs) -> np.ndarray:
        """All tokens of `stream` at once, int32 [B, count]."""
        return np.stack(list(self.stream(*args, **kwargs)), axis=1)


@functools.lru_cache(maxsize=8)
def _compiled(cfg: ModelConfig):
    """The jitted prefill and decoding step, shared by all generators of a model."""
    # The cache is the large array of decoding: it is updated in place.
    decode = jax.jit(functools.partial(_decode, cfg), donate_argnames="cache")
    return jax.jit(functools.partial(_prefill, cfg)), decode


def _prefill(cfg, variables, tokens, segments, cache, key, settings):
    logits, cache = decoding.prefill(cfg, variables, tokens, segments, cache)
    return _choose(logits, key, 0, settings), cache


def _decode(cfg, variables, token, cache, key, index, settings):
    logits, cache = decoding.decode_step(cfg, variables, token, cache)
    return _choose(logits, key, index, settings), cache


def _choose(logits, key, index, settings):
    vocab_size, *sampling = settings
    # Whole rows on every device: B x V floats are received, nothing beside a forward pass.
    logits = mesh_tokens.whole(logits)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    known = jnp.arange(logits.shape[-1]) < vocab_size
    logits = jnp.where(known, logits, -jnp.inf)
    token = jnp.where(finite, sample(logits, jax.random.fold_in(key, index), *sampling), -1)
    return jax.sharding.reshard(token, specs.PER_SEQUENCE)  # each device keeps its rows


def _finite(tokens: np.ndarray, index: int) -> np.ndarray:
    """`tokens` [B], the `index`-th of their rows; refuses the -1 of logits that are no numbers."""
    if np.any(tokens < 0):
        row = int(np.argmax(tokens < 0))
        raise ValueError(
            f"the logits of token {index} after prompt {row} are not finite: the model's numbers "
            "overflow there; use an earlier checkpoint"
        )
    return tokens


def _left_pad(prompts) -> tuple[jax.Array, jax.Array]:
    """Tokens and segment ids [B, T], T a multiple of BUCKET, rows a multiple of the batch axes."""
    mesh, shards = jax.sharding.get_mesh(), mesh_tokens.smallest_batch()[0]
    rows = [prompts[min(i, len(prompts) - 1)] for i in range(-(-len(prompts) // shards) * shards)]
    tokens = np.zeros((len(rows), _round_up(max(map(len, rows)))), np.int32)
    segments = np.zeros_like(tokens)
    for row, ids in enumerate(rows):
        tokens[row, tokens.shape[1] - len(ids) :] = ids
        segments[row, tokens.shape[1] - len(ids) :] = 1
    place = NamedSharding(mesh, specs.TOKENS)
    return jax.device_put(tokens, place), jax.device_put(segments, place)


def _round_up(length: int) -> int:
    return -(-length // BUCKET) * BUCKET


def _check(prompts, count: int, vocab_size: int) -> None:
    if count < 1:
        raise ValueError(f"tokens={count}: generate at least 1 token")
    if not len(prompts):
        raise ValueError("no prompt: give at least one, of at least one token")
    for row, ids in enumerate(prompts):
        if not len(ids):
            raise ValueError(f"prompt {row} is empty: give at least one token to continue from")
        wrong = [i for i in ids if not 0 <= i < vocab_size]
        if wrong:
            raise ValueError(
                f"prompt {row} holds token id {wrong[0]}; ids of this model are "
                f"0..{vocab_size - 1}: encode with its own tokenizer"
            )
