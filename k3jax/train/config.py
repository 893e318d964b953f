"""One run as data: model, optimizer, text, and how long and how often."""

import dataclasses
from typing import Literal, get_args

from k3jax.config import differences
from k3jax.data.config import DataConfig
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.sampling import Sampling
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel.mesh import MeshConfig

# Fields that a resumed run may change: they decide what is printed and kept, or where sums are made
# (the mesh: equal up to rounding), never what is learnt. Every other difference is refused.
FREE_ON_RESUME = (
    "data.cache_dir",
    "data.prefetch",
    "train.eval_every",
    "train.eval_batches",
    "train.eval_batch_size",
    "train.eval_sequence_length",
    "train.sample_every",
    "train.sample_prompt",
    "train.sample_tokens",
    "train.sample_temperature",
    "train.sample_top_p",
    "train.checkpoint_every",
    "train.keep",
    "train.keep_every",
    "train.log_every",
    "train.tensorboard",
    "train.profile_steps",
    "train.extend",
    "train.not_finite",
    "train.mesh.stage",
    "train.mesh.data",
    "train.mesh.expert",
    "train.mesh.context",
)


Kind = Literal["text", "recall"]
NotFinite = Literal["stop", "skip"]


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"train.{name}={value} is below {least}; use {least} or more")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of the run and everything that happens on the way.

    Attributes:
      steps: Optimizer updates of the whole run; the schedule is laid out over them.
      batch_size: Rows of data.sequence_length tokens in one update, over all devices.
      micro_batches: Pieces the batch is computed in, one after the other, to save memory.
      task: "text" (data.source) or "recall" (generated key-value lists; no files).
      recall_pairs: Pairs to remember in a row of the recall task.
      eval_every: Updates between validations on a fixed part; 0 leaves only the last, full one.
      eval_batches: Batches of that part, of each source.
      eval_batch_size: Rows in a validation batch.
      eval_sequence_length: Tokens in a validation row; None is data.sequence_length. Longer rows
        give more context and a lower loss.
      sample_every: Updates between text samples; 0 for none.
      sample_prompt: Text that samples continue.
      sample_tokens: Tokens in a sample.
      sample_temperature: Of samples; 0 is greedy.
      sample_top_p: Samples draw from the likeliest tokens of this total mass.
      checkpoint_every: Updates between checkpoints; 0 keeps only the last. The end is always one.
      keep: Newest checkpoints that stay on disk.
      keep_every: Checkpoints of steps that are multiples of it stay as well; 0 for none.
      init_from: Folder to take parameters and router bias from at step 0: a run of ours or a
        folder in the released layout. "" starts from random numbers. A run's tokenizer comes along.
      not_finite: What a loss or gradient that is not a finite number does. "stop" ends the run
        with a report; "skip" drops the update, says so, and ends the run after 10 in a row.
      extend: Let a resumed run have more steps than its checkpoint was made for. From there on the
        schedule is that of all steps, so the result is not that of a run planned so long.
      log_every: Updates between console lines; the metrics file has every update.
      tensorboard: Write the metrics as TensorBoard event files too, into the workdir.
      profile_steps: First and last step to profile with `jax.profiler`, into the workdir; none for
        no profile. The first step of a process compiles, so begin a few later.
      seed: Initialisation and samples. The order of the text is data.seed.
      mesh: Axis lengths; a fixed batch gives the same run on every mesh up to rounding, bit for
        bit on the same. `context` is 1 so far.
    """

    steps: int = 1000
    batch_size: int = 8
    micro_batches: int = 1
    task: Kind = "text"
    recall_pairs: int = 8
    eval_every: int = 250
    eval_batches: int = 8
    eval_batch_size: int = 8
    eval_sequence_length: int | None = None
    sample_every: int = 500
    sample_prompt: str = "def "
    sample_tokens: int = 64
    sample_temperature: float = 0.8
    sample_top_p: float = 0.95
    checkpoint_every: int = 250
    keep: int = 2
    keep_every: int = 0
    init_from: str = ""
    not_finite: NotFinite = "stop"
    extend: bool = False
    log_every: int = 10
    tensorboard: bool = False
    profile_steps: tuple[int, int] | None = None
    seed: int = 0
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self):
        if self.task not in get_args(Kind):
            raise ValueError(f"train.task={self.task!r}: choose from {', '.join(get_args(Kind))}")
        if self.not_finite not in get_args(NotFinite):
            raise ValueError(
                f"train.not_finite={self.not_finite!r}: choose from "
                f"{', '.join(get_args(NotFinite))}"
            )
        for name in ("steps", "batch_size", "micro_batches", "eval_batches", "eval_batch_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("keep", "log_every", "sample_tokens", "recall_pairs"):
            _at_least(name, getattr(self, name), 1)
        for name in ("eval_every", "sample_every", "checkpoint_every", "keep_every", "seed"):
            _at_least(name, getattr(self, name), 0)
        try:
            Sampling(self.sample_temperature, top_p=self.sample_top_p)
        except ValueError as error:
            raise ValueError(f"train.sample_{error}") from error
        if self.mesh.context > 1:
            raise ValueError(
                f"train.mesh.context={self.mesh.context}: the layers need whole sequences on a "
                "device so far; set it to 1 and use train.mesh.data and train.mesh.expert"
            )
        if (
            self.profile_steps is not None
            and not 1 <= self.profile_steps[0] <= self.profile_steps[1]
        ):
            raise ValueError(
                f"train.profile_steps={self.profile_steps}: the first step is at least 1 and no "
                "later than the last; use for example 5,8"
            )
        if self.eval_sequence_length is not None:
            _at_least("eval_sequence_length", self.eval_sequence_length, 2)
        if self.batch_size % self.micro_batches:
            raise ValueError(
                f"train.batch_size={self.batch_size} is not a multiple of "
                f"train.micro_batches={self.micro_batches}; change one so that it divides"
            )
        rows = self.mesh.data * self.mesh.expert
        for name, size in (
            ("batch_size / micro_batches", self.batch_size // self.micro_batches),
            ("eval_batch_size", self.eval_batch_size),
        ):
            if size % rows:
                raise ValueError(
                    f"train.{name}={size} cannot be split over data x expert = {rows} devices; "
                    f"use a multiple of {rows}"
                )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A complete run. Two equal ones give bit-equal runs on one machine."""

    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self):
        ids = self.data.largest_vocabulary
        if self.train.task == "text" and ids > self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size={ids} exceeds model.vocab_size="
                f"{self.model.vocab_size}: token ids would fall outside the embedding; "
                "lower the first or raise the second"
            )


def resume_differences(old: dict, new: "RunConfig") -> tuple[list[str], list[str]]:
    """Differences between a checkpoint's config and that of the run that goes on from it.

    Args:
      old: `to_dict` of the stored configuration.
      new: The one asked for.

    Returns:
      Those that the run must not have, and those of the mesh, which it may have at the price of
      equal bits; lines `path: stored != asked`.
    """
    changed = differences(old, new)
    paths = [line.partition(":")[0] for line in changed]
    longer = new.train.extend and new.train.steps > old["train"]["steps"]
    free = {*FREE_ON_RESUME, *(["train.steps"] if longer else [])}
    refused = [line for path, line in zip(paths, changed, strict=True) if path not in free]
    moved = [
        line for path, line in zip(paths, changed, strict=True) if path.startswith("train.mesh.")
    ]
    return refused, moved
