"""Opens a model to use it: one of our checkpoints, or a folder in the released layout."""

import os
from typing import Any, NamedTuple

from k3jax.config import from_dict
from k3jax.data.tokenizer import Tokenizer
from k3jax.models.kimi_k3 import huggingface, model
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.finite import check_finite
from k3jax.train import checkpoint
from k3jax.train.config import RunConfig
from k3jax.train.task import read_tokenizer


class Loaded(NamedTuple):
    """A model ready to run.

    Attributes:
      cfg: Its configuration, read from the folder.
      variables: {"params", "router"}, placed on the current mesh.
      tokenizer: The one it was trained with; None where the folder has none.
    """

    cfg: ModelConfig
    variables: dict[str, Any]
    tokenizer: Tokenizer | None

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          ValueError: there is none; the message says what works without one.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this checkpoint holds no tokenizer, so it cannot read or write text; use "
                "experiments/logits.py with token ids, or a checkpoint trained on text"
            )
        return self.tokenizer


def load_model(folder: str | os.PathLike) -> Loaded:
    """Reads a model; optimizer and data position are left on disk.

    Args:
      folder: A workdir, a step folder, or a folder with config.json and safetensors.

    Raises:
      ValueError: none of these, its contents do not fit together, or a weight is not finite.
    """
    loaded = _load(folder)
    check_finite(loaded.cfg, loaded.variables)
    return loaded


def _load(folder: str | os.PathLike) -> Loaded:
    if huggingface.is_published(folder):
        return Loaded(*huggingface.load(folder), tokenizer=None)
    step = checkpoint.find_step(folder)  # once: a run in progress may add a step any time
    records = checkpoint.read_records(step)
    cfg = from_dict(RunConfig, records["config"]).model
    variables = checkpoint.load_arrays(step, model.abstract(cfg))
    return Loaded(cfg, variables, read_tokenizer(records["tokenizer"]))
