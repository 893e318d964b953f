"""Cached generation against the whole-sequence model, and its determinism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL

from k3jax.data.prompt import encode_prompt, text_pieces
from k3jax.data.tokenizer import Tokenizer
from k3jax.models.kimi_k3 import generate, model
from k3jax.models.kimi_k3.generate import Generator
from k3jax.models.kimi_k3.sampling import Sampling
from k3jax.parallel.mesh import AXES

GREEDY = Sampling(temperature=0.0)
PROMPTS = [[5, 17, 200], [9, 8, 7, 6, 5, 4, 3]]
COUNT = 6


@pytest.fixture(scope="module")
def variables():
    draw = jax.jit(lambda: model.init(MODEL, jax.random.key(0)))
    with jax.set_mesh(jax.make_mesh((1, 1, 1, 1), AXES, devices=jax.devices()[:1])):
        return draw()


@pytest.fixture(scope="module")
def generator():
    return Generator(MODEL)


def test_greedy_generation_follows_the_argmax_of_the_uncached_model(generator, variables):
    # Two prompts of different lengths in one batch: left padding and caches change no choice.
    made = generator.generate(variables, PROMPTS, COUNT, GREEDY, jax.random.key(0))
    assert made.shape == (2, COUNT) and made.dtype == np.int32
    tokens, segments = np.zeros((2, 16), np.int32), np.zeros((2, 16), np.int32)
    for row, prompt in enumerate(PROMPTS):
        ids = [*prompt, *made[row].tolist()]
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    logits = jax.jit(lambda t, s: model.logits(MODEL, variables, t, s))(tokens, segments)
    for row, prompt in enumerate(PROMPTS):
        at = slice(len(prompt) - 1, len(prompt) - 1 + COUNT)
        assert jnp.argmax(logits[row, at], axis=-1).tolist() == made[row].tolist()


def test_equal_keys_give_equal_tokens_and_other_keys_do_not(generator, variables):
    def draw(seed):
        key = jax.random.key(seed)
        return generator.generate(variables, PROMPTS, COUNT, Sampling(), key).tolist()

    assert draw(1) == draw(1) != draw(2)


def test_top_k_of_one_is_greedy_at_any_temperature(generator, variables):
    greedy = generator.generate(variables, PROMPTS, COUNT, GREEDY, jax.random.key(0))
    every = Sampling(temperature=0.0, top_k=2**40)
    made = generator.generate(variables, PROMPTS, COUNT, every, jax.random.key(0))
    assert made.tolist() == greedy.tolist()
    narrow = Sampling(temperature=5.0, top_k=1)
    made = generator.generate(variables, PROMPTS, COUNT, narrow, jax.random.key(3))
    assert made.tolist() == greedy.tolist()


def test_settings_prompts_and_counts_of_one_bucket_share_one_compilation(generator, variables):
    def programs():
        return [f._cache_size() for f in generate._compiled(MODEL)]

    generator.generate(variables, PROMPTS, COUNT, GREEDY, jax.random.key(0))
    before = programs()
    for count, prompts, sampling in (
        (1, PROMPTS, GREEDY),
        (3, [[1], [2]], Sampling(top_p=0.5)),
        (20, [[4] * 30, [2]], Sampling(temperature=0.3, top_k=7)),
    ):
        generator.generate(variables, prompts, count, sampling, jax.random.key(0))
    assert programs() == before


def test_logits_that_are_no_numbers_are_refused_where_they_occur(generator, variables):
    large = {"lm_head": 1e30, "final_norm": 1e20}
    params = {**variables["params"]}
    params |= {name: params[name] * factor for name, factor in large.items()}
    broken = {**variables, "params": params}
    stream = generator.stream(broken, PROMPTS, COUNT, GREEDY, jax.random.key(0))
    with pytest.raises(ValueError, match="logits of token 1 after prompt 0 are not finite"):
        next(stream)


def test_ids_beyond_the_tokenizer_are_never_drawn(variables):
    small = Generator(MODEL, vocab_size=10)
    made = small.generate(variables, [[1], [2]], 40, Sampling(temperature=9.0), jax.random.key(0))
    assert made.max() < 10 and len(np.unique(made)) > 5


@pytest.mark.parametrize(
    "prompts, count, message",
    [
        ([], 3, "no prompt: give at least one"),
        ([[1], []], 3, "prompt 1 is empty"),
        ([[1, 288]], 3, r"token id 288.*0\.\.287"),
        ([[-1]], 3, "token id -1"),
        ([[1]], 0, "tokens=0"),
    ],
)
def test_what_cannot_be_continued_is_refused(generator, variables, prompts, count, message):
    with pytest.raises(ValueError, match=message):
        generator.generate(variables, prompts, count, GREEDY, jax.random.key(0))


def test_text_streams_in_whole_characters_and_stops_at_the_end_of_the_document():
    tokenizer = Tokenizer([])
    ids = encode_prompt(tokenizer, "é🙂!")
    assert ids[0] == tokenizer.bos_id
    stream = [np.array([i]) for i in [*ids[1:], tokenizer.eos_id, *ids[1:]]]
    assert list(text_pieces(tokenizer, stream)) == ["é", "🙂", "!"]
