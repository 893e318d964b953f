"""Logits of token ids in a file: the plainest way to compare this model with another program."""

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from k3jax.eval.token_file import read_input
from k3jax.models.kimi_k3 import model
from k3jax.models.kimi_k3.config import ModelConfig


def write_logits(
    cfg: ModelConfig, variables: Any, source: str | os.PathLike, target: str | os.PathLike
) -> None:
    """Reads `input_ids` (and `segment_ids`) from a safetensors file, writes `logits` to another.

    Args:
      cfg: The model.
      variables: {"params", "router"}.
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
    tokens, segments = read_input(source, cfg.vocab_size)
    run = _compiled(cfg)
    # Row by row: the logits of one row are the largest array by far.
    rows = [
        np.asarray(run(variables, tokens[i : i + 1], segments[i : i + 1]))
        for i in range(len(tokens))
    ]
    save_file({"logits": np.concatenate(rows)}, target)


@functools.lru_cache(maxsize=8)
def _compiled(cfg: ModelConfig) -> Callable:
    return jax.jit(lambda v, t, s: model.logits(cfg, v, t, s))
