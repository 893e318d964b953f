"""Logits of token ids in a file: the plainest way to compare this model with another program."""

import functools
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from k3jax.data.packing import check_segment_ids
from k3jax.models.kimi_k3 import model
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.train.restore import Loaded


def write_logits(loaded: Loaded, source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Reads `input_ids` (and `segment_ids`) from a safetensors file, writes `logits` to another.

    Args:
      loaded: The model.
      source: File with integer `input_ids` [B, T] and optionally integer `segment_ids` [B, T]:
        0 is padding, otherwise non-decreasing in a row, one id per document.
      target: File to write: float32 `logits` [B, T, V], zero at padding.

    Raises:
      ValueError: a file is missing, or ids do not fit the rules above or the vocabulary.
    """
    target = pathlib.Path(target)
    if not target.absolute().parent.is_dir():
        raise ValueError(
            f"output folder {str(target.parent)!r} does not exist; create it or choose another"
        )
    if target.is_dir():
        raise ValueError(f"output {str(target)!r} is a folder; name a file in it")
    tokens, segments = read_input(source, loaded.cfg.vocab_size)
    run = _compiled(loaded.cfg)
    # Row by row: the logits of one row are the largest array by far.
    rows = [
        np.asarray(run(loaded.variables, tokens[i : i + 1], segments[i : i + 1]))
        for i in range(len(tokens))
    ]
    save_file({"logits": np.concatenate(rows)}, target)


@functools.lru_cache(maxsize=8)
def _compiled(cfg: ModelConfig) -> Callable:
    return jax.jit(lambda v, t, s: model.logits(cfg, v, t, s))


def read_input(source: str | os.PathLike, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Checked int32 `input_ids` and `segment_ids` (ones where the file has none), both [B, T].

    Raises:
      ValueError: no such file, no ids in it, or ids that the model or the kernels cannot take.
    """
    try:
        tensors = load_file(source)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"input {str(source)!r} cannot be read ({error}); give a safetensors file with "
            "'input_ids' [B, T]"
        ) from error
    if "input_ids" not in tensors:
        raise ValueError(
            f"input {str(source)!r} holds {', '.join(sorted(tensors)) or 'nothing'}; "
            "it needs integer 'input_ids' [B, T]"
        )
    tokens = _integers(tensors, "input_ids")
    if not tokens.size:
        raise ValueError(f"'input_ids' has shape {tokens.shape}; give at least one token")
    outside = np.argwhere((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        row, column = outside[0]
        raise ValueError(
            f"'input_ids' holds {tokens[row, column]} at row {row}, position {column}; ids of this "
            f"model are 0..{vocab_size - 1}: encode with its own tokenizer"
        )
    if "segment_ids" not in tensors:
        return tokens.astype(np.int32), np.ones(tokens.shape, np.int32)
    segments = _integers(tensors, "segment_ids")
    if segments.shape != tokens.shape:
        raise ValueError(
            f"'segment_ids' has shape {segments.shape}, 'input_ids' {tokens.shape}; "
            "give one segment id per token"
        )
    if segments.max() > np.iinfo(np.int32).max:
        raise ValueError(f"'segment_ids' holds {segments.max()}; number documents from 1")
    segments = segments.astype(np.int32)
    check_segment_ids(segments)
    return tokens.astype(np.int32), segments


def _integers(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    value = tensors[name]
    if value.ndim != 2 or not np.issubdtype(value.dtype, np.integer):
        raise ValueError(
            f"{name!r} is {value.dtype} of shape {value.shape}; it must be integer [B, T], "
            "for example int32 [1, T]"
        )
    return value
