"""Settings refuse what cannot work, and say what can."""

import dataclasses
import pathlib

import pytest

from k3jax.data.config import DataConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", ""),
        ("vocab_size", 258),
        ("sequence_length", 1),
        ("validation_fraction", 0.0),
        ("validation_fraction", 1.0),
        ("min_document_bytes", -1),
        ("min_document_bytes", 1 << 20),
        ("max_document_bytes", 1023),
        ("dedup_threshold", 0.0),
        ("dedup_threshold", 1.5),
        ("text_field", ""),
        ("tokenizer", "words"),
        ("prefetch", -1),
        ("seed", -1),
        ("split_seed", 2**63),
    ],
)
def test_a_bad_field_is_refused_in_one_line_with_its_value(field, value):
    with pytest.raises(ValueError) as error:
        DataConfig(**{field: value})
    message = str(error.value)
    assert f"data.{field}={value!r}" in message and ";" in message and "\n" not in message


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataConfig().seed = 1


def test_the_cache_folder_follows_the_setting_then_the_environment(monkeypatch):
    assert DataConfig(cache_dir="/x/y").cache_path == pathlib.Path("/x/y")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert DataConfig().cache_path == pathlib.Path("/xdg/k3jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert DataConfig().cache_path == pathlib.Path.home() / ".cache" / "k3jax"
