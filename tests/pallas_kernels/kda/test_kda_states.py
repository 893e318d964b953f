"""A state carried from piece to piece equals one run, wherever the row is cut."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kda import kda
from pallas_kernels.numerics import relative_error

TOKENS = ("q", "k", "v", "g", "beta")
T = 200

# Up to four cuts of a row: gradients of T tokens are float32 sums taken piece by piece.
SPLIT_TOLERANCE = 1e-4
# Values only, of 23 tokens: the chunks end elsewhere, a few float32 roundings.
SHORT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def row(draw):
    return draw(T, states=(1,))


@pytest.fixture(scope="module")
def piece(row, evaluate, cotangent):
    """Runs the tokens from `start` to `stop` and treats the others as padding: one program."""

    def run(start, stop, state, d_state, size):
        ids = np.broadcast_to((np.arange(T) >= start) & (np.arange(T) < stop), (2, T))
        return evaluate(
            row | {"initial_state": state},
            segment_ids=ids.astype(np.int32),
            num_segments=1,
            return_final_state=True,
            d_o=cotangent((2, T, 2, 12)) * ids[..., None, None],
            d_state=d_state,
            chunk_size=size,
        )

    return run


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(0, T), min_size=1, max_size=4).map(sorted),
    size=st.sampled_from([16, 32, 64]),
)
def test_any_split_with_a_carried_state_equals_one_run(cuts, size, row, piece, cotangent):
    d_state = cotangent(row["initial_state"].shape)
    expected, wanted = piece(0, T, row["initial_state"], d_state, size)
    edges = [0, *cuts, T]
    spans = list(zip(edges, edges[1:], strict=False))
    states, o = [row["initial_state"]], 0
    for start, stop in spans:
        outputs, _ = piece(start, stop, states[-1], d_state, size)
        states.append(outputs["state"])
        o = o + outputs["o"]
    # The cotangent of a state travels through the pieces in reverse.
    total = dict.fromkeys((*TOKENS, "a_log", "dt_bias"), 0)
    for (start, stop), state in zip(reversed(spans), reversed(states[:-1]), strict=True):
        _, gradients = piece(start, stop, state, d_state, size)
        d_state = gradients["initial_state"]
        total = {name: value + gradients[name] for name, value in total.items()}
    assert relative_error(o, expected["o"]) < SPLIT_TOLERANCE
    assert relative_error(states[-1], expected["state"]) < SPLIT_TOLERANCE
    assert relative_error(d_state, wanted["initial_state"]) < SPLIT_TOLERANCE
    for name, value in total.items():
        assert relative_error(value, wanted[name]) < SPLIT_TOLERANCE, name


def test_pieces_of_one_token_and_the_rest_equal_one_run_without_segment_ids(draw):
    x = draw(23, states=())
    run = jax.jit(lambda x: kda(**x, lower_bound=-5.0, qk_l2norm=True, return_final_state=True))
    expected, final = run(x)
    state, parts = x["initial_state"], []
    for start, stop in ((0, 1), (1, 22), (22, 23)):
        tokens = {n: x[n][:, start:stop] for n in TOKENS}
        o, state = run(x | tokens | {"initial_state": state})
        parts.append(o)
    assert relative_error(np.concatenate(parts, axis=1), expected) < SHORT_TOLERANCE
    assert relative_error(state, final) < SHORT_TOLERANCE


@pytest.mark.parametrize(
    ("implementation", "size"), [("chunked", 16), ("chunked", 32), ("reference", None)]
)
def test_tokens_of_an_id_without_a_state_are_padding_in_every_form(implementation, size, draw):
    x = draw(23, states=(2,))
    ids = np.sort(np.random.default_rng(0).integers(3, 8, (2, 23)), axis=1).astype(np.int32)
    # Of the ids 3..7 the first row has states for 4 and 5, the second for 6 and 7.
    base = np.array([3, 5], np.int32)
    inside = (ids > base[:, None]) & (ids <= base[:, None] + 2)
    assert 0 < inside.sum() < inside.size
    run = jax.jit(
        lambda x, ids: kda(
            **x, lower_bound=-5.0, qk_l2norm=True, segment_ids=ids, segment_base=base,
            num_segments=2, return_final_state=True, chunk_size=size,
            implementation=implementation,
        )
    )  # fmt: skip
    o, state = run(x, ids)
    expected, final = run(x, np.where(inside, ids, 0))
    np.testing.assert_array_equal(o, expected)
    np.testing.assert_array_equal(state, final)
    assert not np.any(np.asarray(o)[~inside]) and np.all(np.any(np.asarray(o)[inside], axis=(1, 2)))
