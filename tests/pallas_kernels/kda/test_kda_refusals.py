"""Wrong calls end in one line with the value, the rule and the way out."""

import re

import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.kda import kda, kda_segment


@pytest.fixture
def x(draw):
    return draw(4)


def ids(dtype=np.int32):
    return np.ones((2, 4), dtype)


@pytest.mark.parametrize("size", [0, 8, 17, 48, 128])
def test_a_chunk_size_that_is_not_supported_is_refused_not_replaced(size, x):
    for call in (kda, kda_segment):
        arrays = x if call is kda else {n: a for n, a in x.items() if n != "q"}
        with pytest.raises(ValueError, match=rf"chunk_size={size} is not one of \(16, 32, 64\)"):
            call(**arrays, chunk_size=size)


def test_different_numbers_of_heads_are_refused_with_both_named(x):
    x["v"] = np.repeat(x["v"], 2, axis=2)
    with pytest.raises(ValueError, match="k has 2 heads and v has 4"):
        kda(**x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_segments": 2}, "num_segments=2 is given without segment_ids"),
        ({"segment_ids": ids(), "return_final_state": True}, "num_segments=None with segment_ids"),
        (
            {"segment_ids": ids(), "initial_state": np.zeros((2, 1, 2, 8, 12), np.float32)},
            "pass num_segments",
        ),
        ({"segment_ids": ids(), "num_segments": 0}, "num_segments=0 is below 1"),
        ({"segment_ids": ids(np.int64)}, "segment_ids has dtype int64: int32 is needed"),
    ],
)
def test_segment_arguments_that_do_not_fit_together_are_refused(options, message, x):
    with pytest.raises(ValueError, match=message):
        kda(**x, **options)


def test_a_gate_without_its_rate_is_refused(x):
    del x["a_log"]
    with pytest.raises(ValueError, match="dt_bias is given without a_log"):
        kda(**x)
    del x["dt_bias"]
    with pytest.raises(ValueError, match="lower_bound is given without a_log"):
        kda(**x, lower_bound=-5.0)


def test_integer_inputs_are_refused(x):
    x["beta"] = np.ones(x["beta"].shape, np.int32)
    with pytest.raises(ValueError, match="beta has dtype int32: a float dtype is needed"):
        kda(**x)


@pytest.mark.parametrize(
    ("name", "got", "rule"),
    [
        ("q", (2, 4, 2, 1), "[B, T, H, K] = (2, 4, 2, 8)"),
        ("g", (2, 4, 2, 1), "[B, T, H, K] = (2, 4, 2, 8)"),
        ("beta", (2, 4, 1), "[B, T, H] = (2, 4, 2)"),
        ("a_log", (1,), "[H] = (2,)"),
        ("dt_bias", (2, 1), "[H, K] = (2, 8)"),
    ],
)
def test_shapes_that_disagree_are_refused_with_both(name, got, rule, x):
    x[name] = x[name][..., :1]
    with pytest.raises(ValueError, match=re.escape(f"{name} has shape {got}, must be {rule}; ")):
        kda(**x)


def test_tokens_without_a_time_axis_are_refused_by_name(x):
    x["v"] = x["v"][:, 0]
    with pytest.raises(ValueError, match=r"v has shape \(2, 2, 12\), must be \[B, T, H, V\]"):
        kda(**x)


def test_keys_of_another_length_are_refused_in_a_segment_map_too(x):
    del x["q"]
    x["k"] = x["k"][:, 1:]
    with pytest.raises(ValueError, match=r"k has shape \(2, 3, 2, 8\), must be \[B, T, H, K\]"):
        kda_segment(**x)


def test_segment_ids_of_another_length_are_refused(x):
    with pytest.raises(
        ValueError, match=r"segment_ids has shape \(2, 3\), .* = \(2, 4\); pass one"
    ):
        kda(**x, segment_ids=ids()[:, 1:])


def test_a_state_with_key_and_value_swapped_is_refused_with_the_way_out(x):
    with pytest.raises(ValueError, match=r"must be \[B, H, K, V\] = .*swap the last two axes"):
        kda(**x, initial_state=np.zeros((2, 2, 12, 8), np.float32))


def test_the_recurrence_refuses_a_chunk_size_and_an_unnamed_choice_serves_it(x):
    with pytest.raises(UnsupportedError, match="'reference' has no chunks, got chunk_size 16"):
        kda(**x, chunk_size=16, implementation="reference")
    chunked = kda(**x, chunk_size=16, implementation="chunked")[0]
    np.testing.assert_array_equal(kda(**x, chunk_size=16)[0], chunked)


def test_an_unknown_implementation_is_refused_with_the_known_ones(x):
    with pytest.raises(UnsupportedError, match="'cuda' is unknown; choose from chunked, reference"):
        kda(**x, implementation="cuda")
