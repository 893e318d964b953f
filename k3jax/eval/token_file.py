"""Token ids from a safetensors file: input for models whose tokenizer is not at hand."""

import os

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from k3jax.data.packing import check_segment_ids


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
