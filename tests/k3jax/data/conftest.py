"""A small corpus on disk: forty modules of generated Python, all different."""

import pytest
from small_texts import module_source

from k3jax.data.config import DataConfig


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
