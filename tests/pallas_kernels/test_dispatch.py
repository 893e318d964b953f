"""Dispatch: what `implementation=` means, and that a slower path is never taken in silence."""

import warnings

import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import FallbackWarning, Implementation, UnsupportedError, call

# A fast path that gives up above so many elements without a word makes a large run many times
# slower, and nobody learns why.
LIMIT = 2**28


def fast_unsupported(size, **_):
    """The fast path's own limit."""
    return f"holds at most {LIMIT} elements, got {size}" if size > LIMIT else None


CANDIDATES = {
    "fast": Implementation(lambda size, scale=1: ("fast", size * scale), fast_unsupported),
    "slow": Implementation(lambda size, scale=1: ("slow", size * scale)),
    "never": Implementation(lambda size, scale=1: ("never", size), lambda *_, **__: "is broken"),
}


@pytest.fixture(autouse=True)
def fresh_announcements(monkeypatch):
    """Every test starts as a process that has warned of nothing."""
    monkeypatch.setattr(dispatch, "_announced", set())


def run(size, implementation=None, **options):
    """The op under test."""
    return call("resize", CANDIDATES, implementation, size, **options)


def silent(size, implementation=None):
    """Runs with every warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(size, implementation)


def test_none_takes_the_first_candidate_in_silence_when_it_serves():
    assert silent(LIMIT) == ("fast", LIMIT)
    assert run(3, scale=2) == ("fast", 6)


def test_none_warns_of_the_path_and_the_reason_when_the_fast_one_is_unavailable():
    with pytest.warns(FallbackWarning, match="resize falls back to 'slow'.*at most 268435456"):
        assert run(LIMIT + 1) == ("slow", LIMIT + 1)


def test_the_same_fallback_is_announced_once_and_another_reason_again():
    with pytest.warns(FallbackWarning):
        run(LIMIT + 1)
    assert silent(LIMIT + 1) == ("slow", LIMIT + 1)
    with pytest.warns(FallbackWarning, match=str(LIMIT + 2)):
        run(LIMIT + 2)


def test_one_name_is_strict_and_refuses_with_the_reason():
    with pytest.raises(UnsupportedError, match="'fast' holds at most 268435456"):
        run(LIMIT + 1, "fast")
    assert silent(LIMIT + 1, "slow") == ("slow", LIMIT + 1)


def test_a_sequence_is_tried_in_order_and_warns_on_each_fallback():
    assert silent(1, ("slow", "fast")) == ("slow", 1)
    with pytest.warns(FallbackWarning, match="'never' is broken; 'fast' holds"):
        assert run(LIMIT + 1, ["never", "fast", "slow"])[0] == "slow"


def test_when_nothing_serves_every_reason_is_given():
    with pytest.raises(UnsupportedError, match="'never' is broken; 'fast' holds.*known: fast"):
        run(LIMIT + 1, ("never", "fast"))
    with pytest.raises(UnsupportedError, match="none named"):
        run(1, ())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnsupportedError, match="'turbo' is unknown; choose from fast, slow, never"):
        run(1, "turbo")
    assert issubclass(UnsupportedError, ValueError)
