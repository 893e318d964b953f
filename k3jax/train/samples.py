"""Text that the model writes during training: the check people look at."""

import os
import pathlib
import re

import jax

from k3jax.data.prompt import encode_prompt, text_pieces
from k3jax.models.kimi_k3.generate import Generator
from k3jax.models.kimi_k3.sampling import Sampling
from k3jax.train.config import RunConfig
from k3jax.train.state import TrainState
from k3jax.train.workdir import write_whole

_HEADING = re.compile(r"^=== step (\d+) ===$", re.MULTILINE)


class SampleFile:
    """Appends samples to a file that stays in step order across resumes."""

    def __init__(self, path: os.PathLike, cfg: RunConfig, tokenizer, resume_step: int = 0):
        """Keeps the samples up to `resume_step`."""
        self._path, self._cfg, self._tokenizer = pathlib.Path(path), cfg, tokenizer
        self._sampling = Sampling(cfg.train.sample_temperature, top_p=cfg.train.sample_top_p)
        self._generator = Generator(cfg.model, tokenizer.vocab_size)
        old = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        write_whole(self._path, _up_to(old, resume_step))

    def write(self, step: int, state: TrainState) -> str:
        """Continues train.sample_prompt with the present parameters; returns it for the console.

        The draw depends on the run's key and the step only: a resumed run samples the same text.
        """
        train = self._cfg.train
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), step)
        stream = self._generator.stream(
            {"params": state.params, "router": state.router},
            [encode_prompt(self._tokenizer, train.sample_prompt)],
            train.sample_tokens,
            self._sampling,
            key,
        )
        text = train.sample_prompt + "".join(text_pieces(self._tokenizer, stream))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"=== step {step} ===\n{text}\n\n")
        shown = "\n".join("  | " + line for line in text.splitlines())
        return f"step {step}  sample:\n{shown}"


def _up_to(text: str, step: int) -> str:
    """The part of a sample file before the first heading past `step`."""
    later = (m.start() for m in _HEADING.finditer(text) if int(m.group(1)) > step)
    return text[: next(later, len(text))]
