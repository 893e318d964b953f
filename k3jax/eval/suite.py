"""Everything that `experiments/evaluate.py` can be asked for, one after another."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from k3jax.data.files import STDLIB
from k3jax.data.tokenizer import Tokenizer
from k3jax.eval import harness, heat_map, needle, perplexity
from k3jax.eval.haystack import Haystack, RecallHaystack, TextHaystack
from k3jax.eval.text_model import TextModel
from k3jax.models.kimi_k3.config import ModelConfig

RESULT = "evaluation.json"


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What to measure.

    Attributes:
      data: Text for perplexity and haystacks: a file, a directory, a glob or "stdlib"; None
        measures no perplexity and takes the standard library as hay.
      tokens: Safetensors file of ids for perplexity; None measures none.
      needle_lengths: Prompt lengths of needle retrieval [tokens]; empty leaves it out.
      needle_depths: Where needles stand, 0 to 1.
      needle_trials: Prompts per length and depth.
      needle_keys: Different keys in a prompt, for models without a tokenizer.
      tasks: YAML files of lm-eval tasks; empty leaves them out.
      sequence_length: Tokens in a row of text; longer rows give more context.
      batch_size: Rows that run together.
      seed: Of the needles.
    """

    data: str | None = None
    tokens: str | None = None
    needle_lengths: tuple[int, ...] = ()
    needle_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needle_trials: int = 10
    needle_keys: int = 4
    tasks: tuple[str, ...] = ()
    sequence_length: int = 1024
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be at least 1; raise it")
        if self.sequence_length < 2:
            raise ValueError(
                f"sequence_length={self.sequence_length}: a row has at least 2 tokens; raise it"
            )
        if self.needle_lengths:
            self.needles()

    def needles(self) -> needle.NeedleConfig:
        """The part on needles."""
        return needle.NeedleConfig(
            self.needle_lengths, self.needle_depths, self.needle_trials, self.seed
        )


def run(
    cfg: ModelConfig,
    variables: Any,
    tokenizer: Tokenizer | None,
    wanted: EvalConfig,
    output: pathlib.Path | None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measures what `wanted` names.

    Args:
      cfg: The model.
      variables: {"params", "router"}.
      tokenizer: Of the checkpoint, None where it has none.
      wanted: What to measure.
      output: Folder for `evaluation.json` and `needle.png`, made if need be; None writes nothing.
      log: Receives every console line.

    Returns:
      What `evaluation.json` holds: the settings, and one entry for each part measured.

    Raises:
      ValueError: nothing is asked for, text or tasks are asked of a checkpoint without a
        tokenizer, or a part refuses.
    """
    if not (wanted.data or wanted.tokens or wanted.needle_lengths or wanted.tasks):
        raise ValueError(
            "nothing to measure: give data, tokens, needle_lengths or tasks, as in "
            "--data='texts/*.txt'"
        )
    if tokenizer is None and (wanted.data or wanted.tasks):
        raise ValueError(
            "this checkpoint holds no tokenizer, so it cannot read data or tasks; give token ids "
            "(--tokens=FILE), or a checkpoint trained on text"
        )
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    # What can be refused is refused before anything runs.
    tasks = harness.load_tasks(wanted.tasks) if wanted.tasks else []
    cases = _needles(cfg, tokenizer, wanted) if wanted.needle_lengths else {}
    sizes = dict(batch_size=wanted.batch_size)
    result: dict[str, Any] = {"settings": dataclasses.asdict(wanted)}
    if wanted.data:
        text = perplexity.of_text(
            cfg, variables, tokenizer, wanted.data, sequence_length=wanted.sequence_length, **sizes
        )
        result["text"] = text.values()
        log(text.line())
    if wanted.tokens:
        ids = perplexity.of_tokens(cfg, variables, wanted.tokens, **sizes)
        result["tokens"] = ids.values()
        log(ids.line())
    if cases:
        vocab_size = cfg.vocab_size if tokenizer is None else tokenizer.vocab_size
        cells = needle.run(cfg, variables, vocab_size, cases, wanted.batch_size)
        result["needle"] = [cell._asdict() for cell in cells]
        needle.report(cells, log)
        if output is not None and not heat_map.draw(cells, output / "needle.png"):
            log("no needle.png: matplotlib is not installed")
    if tasks:
        scorer = TextModel(cfg, variables, tokenizer, wanted.sequence_length, wanted.batch_size)
        result["tasks"] = harness.run(scorer, tasks)
        log(harness.format_results(result["tasks"]))
    if output is not None:
        text = json.dumps(result, indent=1, allow_nan=False) + "\n"
        (output / RESULT).write_text(text, encoding="utf-8")
        log(f"results in {output / RESULT}")
    return result


def _needles(cfg: ModelConfig, tokenizer: Tokenizer | None, wanted: EvalConfig) -> needle.Cases:
    if tokenizer is None:
        haystack: Haystack = RecallHaystack(cfg.vocab_size, wanted.needle_keys)
    else:
        haystack = TextHaystack(tokenizer, wanted.data or STDLIB)
    return needle.prepare(haystack, wanted.needles())
