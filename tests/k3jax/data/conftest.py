"""A small corpus on disk: forty modules of generated Python, all different."""

import random

import pytest

from k3jax.data.config import DataConfig


def module_source(number: int, lines: int = 60) -> str:
    """Python-like text that is the same for the same number, and no near-duplicate of others."""
    draw = random.Random(number)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 9))) for _ in range(40)]
    out = [f'"""Module {number}."""', ""]
    for _ in range(lines):
        name, argument, value = draw.choices(words, k=3)
        out += [f"def {name}({argument}):", f"    return {argument} + {value}", ""]
    return "\n".join(out) + "\n"


@pytest.fixture
def folder(tmp_path):
    """A folder with forty modules."""
    root = tmp_path / "text"
    root.mkdir()
    for number in range(40):
        (root / f"module_{number:02d}.py").write_bytes(module_source(number).encode())
    return root


@pytest.fixture
def config(folder, tmp_path):
    """Settings for the small corpus with a cache of its own."""
    return DataConfig(
        source=str(folder),
        vocab_size=400,
        sequence_length=32,
        validation_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
    )
