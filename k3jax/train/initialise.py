"""Starting from the weights of another run or of a released model (`train.init_from`)."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from k3jax.config import differences
from k3jax.data.tokenizer import Tokenizer
from k3jax.models.kimi_k3 import huggingface, model
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.optim.muon import path_text
from k3jax.train.checkpoint import CheckpointError, read_records, step_folders
from k3jax.train.config import RunConfig
from k3jax.train.restore import load_model
from k3jax.train.task import read_tokenizer

# Fields that change how the model is computed and not what it computes.
_SAME_FUNCTION = (
    "remat", "unroll_layers", "param_dtype", "compute_dtype", "init_std", "embedding_std",
    "implementation", "chunk_size",
)  # fmt: skip


def starting_tokenizer(
    cfg: RunConfig, workdir: pathlib.Path, log: Callable[[str], None]
) -> Tokenizer | None:
    """The tokenizer that belongs to the weights a run starts from: other ids would mean nothing.

    Args:
      cfg: Of the run.
      workdir: Of the run; once it has a checkpoint, that one's tokenizer is the answer, so that a
        resumed run no longer needs the folder it started from.
      log: Told where ids come from.

    Returns:
      None where the run learns its own: it starts from random numbers, reads no text, or starts
      from a folder without a tokenizer of ours.
    """
    folder = cfg.train.init_from
    if not folder or cfg.train.task != "text":
        return None
    for own in step_folders(workdir):
        with contextlib.suppress(CheckpointError):  # of a torn step, which resuming passes over
            return read_tokenizer(read_records(own)["tokenizer"])
    published = huggingface.is_published(folder)
    tokenizer = None if published else read_tokenizer(read_records(folder)["tokenizer"])
    if tokenizer is None:
        log(
            f"init_from: {folder} has no tokenizer of ours, so the ids are those of a new one; "
            "its embedding has to be learnt anew"
        )
    else:
        log(f"init_from: the tokenizer is that of {folder} ({tokenizer.vocab_size} ids)")
    return tokenizer


def load_weights(folder: str, cfg: ModelConfig, log: Callable[[str], None]) -> dict[str, Any]:
    """Reads {"params", "router"} in the dtypes and on the mesh of a run.

    Args:
      folder: A workdir, a step folder, or a folder in the released layout.
      cfg: The run's model; every array must have its shape.
      log: Told in which fields the two models differ otherwise: equal shapes may still be another
        function (an activation, a bound).

    Raises:
      ValueError: no model there, or arrays are missing, left over or of another shape.
    """
    loaded = load_model(folder)
    wanted = model.abstract(cfg)
    _require_same_arrays(folder, loaded.variables, wanted)
    changed = [
        line
        for line in differences(loaded.cfg, cfg)
        if not line.split(":")[0].endswith(_SAME_FUNCTION)
    ]
    if changed:
        log(f"init_from: the model differs from that of {folder} in {'; '.join(changed)}")
    return jax.tree.map(lambda a, like: a.astype(like.dtype), loaded.variables, wanted)


def _require_same_arrays(folder: str, found: Any, wanted: Any) -> None:
    have, need = (
        {path_text(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (found, wanted)
    )
    wrong = [
        f"{path} is {have.get(path, 'absent')} there and {need.get(path, 'absent')} here"
        for path in sorted(have.keys() | need.keys())
        if have.get(path) != need.get(path)
    ]
    if wrong:
        raise ValueError(
            f"train.init_from={folder}: {len(wrong)} arrays do not fit, first {wrong[0]}; give the "
            "run the model configuration of that folder"
        )
