"""XLA's flags: ours are added, the user's stay."""

import os

import pytest

from k3jax.parallel import host


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "--a=1 --b=2"),
        ("--b=3", "--b=3 --a=1"),
        ("--c=1 --a=0", "--c=1 --a=0 --b=2"),
    ],
)
def test_a_flag_is_added_unless_its_name_is_set(before, after, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", before)
    host.set_xla_flags("--a=1", "--b=2")
    assert os.environ["XLA_FLAGS"] == after
    host.set_xla_flags("--a=1", "--b=2")
    assert os.environ["XLA_FLAGS"] == after


def test_programs_ask_for_one_product_per_call(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    host.prepare()
    assert host.ONE_PRODUCT_PER_CALL in os.environ["XLA_FLAGS"].split()
