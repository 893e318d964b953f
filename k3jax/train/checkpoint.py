"""Checkpoints: everything a run needs to go on, in one folder per step, written as a whole.

A step folder holds the arrays `params`, `router` (balancing state), `optimizer`, `progress` (step,
RNG key), and the JSON file `records` (iterator state, config, manifest, tokenizer). Where arrays
go is decided at load time by the shardings asked for, so a checkpoint moves between meshes.

A save copies the arrays to the host and writes them from a thread while training goes on: the next
step may donate its buffers. Orbax commits a folder by renaming it, so a killed or failed save
leaves no step behind, and the steps before it stay.
"""

import contextlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp

from k3jax.parallel import specs
from k3jax.train.state import TrainState

FOLDER = "checkpoints"  # inside a workdir


class CheckpointError(ValueError):
    """A folder is not a checkpoint, or not the one that was asked for."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; the earlier ones are untouched."""


class Checkpoints:
    """The checkpoints of one workdir: the newest `keep`, and every `keep_every`-th for good."""

    def __init__(self, workdir: os.PathLike, keep: int = 2, keep_every: int = 0):
        """Opens (and makes) `workdir`/checkpoints; half-written steps in it are removed.

        Args:
          workdir: Of the run.
          keep: Newest steps that stay.
          keep_every: Steps that are multiples of it stay too; 0 for none.
        """
        self.folder = pathlib.Path(workdir).absolute() / FOLDER
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep)] + ([policies.EveryNSteps(keep_every)] if keep_every else [])
        self._policy = policies.AnyPreservationPolicy(kept)
        self._saving: tuple[int, Any] | None = None
        self._open()

    def _open(self) -> None:
        self._orbax = ocp.training.Checkpointer(
            self.folder,
            context=_context(),
            preservation_policy=self._policy,
            cleanup_tmp_directories=True,
        )

    def steps(self) -> list[int]:
        """Complete steps on disk, oldest first; not the one that is being written."""
        found = {checkpoint.step for checkpoint in self._orbax.checkpoints}
        if self._saving is not None and self._orbax.is_saving_in_progress():
            found.discard(self._saving[0])
        return sorted(found)

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def leave(self, kind: type[BaseException] | None, *_: Any) -> None:
        """`close` at the end of a `with`: a failed save hides no error that ends a run."""
        with contextlib.suppress(*([SaveError] if kind is not None else [])):
            self.close()

    def settled(self) -> int | None:
        """`latest` once the save in progress has ended, well or not."""
        with contextlib.suppress(SaveError):
            self.wait()
        return self.latest()

    def save(self, step: int, state: TrainState, records: dict[str, Any]) -> None:
        """Starts to write `state` and `records`, a JSON value, as `step`; first ends the last save.

        On return the arrays are copied: `state` may be donated. A failure of this save is raised
        by the next call of `save` or `wait`.

        Raises:
          SaveError: the save before failed, or the disk has too little room for this one.
        """
        self.wait()
        parts = _split(state)
        self._require_room(step, parts)
        plain = json.loads(json.dumps(records))  # tuples to lists: what comes back is what went in
        with self._failing_as(step):
            response = self._orbax.save_checkpointables_async(
                step, {**parts, "records": plain}, force=True
            )
        self._saving = (step, response)

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          SaveError: it cannot be written; later saves may succeed.
        """
        if self._saving is None:
            return
        (step, response), self._saving = self._saving, None
        with self._failing_as(step):
            response.result()

    def _require_room(self, step: int, parts: dict[str, Any]) -> None:
        """Refuses a save that would fill the disk: filling it would harm everybody else on it."""
        need = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts))
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise SaveError(
                f"checkpoint of step {step} needs up to {need / 1e9:.3f} GB and the disk of "
                f"{str(self.folder)!r} has {free / 1e9:.3f} GB; free some space or lower train.keep"
            )

    @contextlib.contextmanager
    def _failing_as(self, step: int):
        try:
            yield
        except Exception as error:
            # Orbax would report this failure once more at the next save: begin with a new one.
            with contextlib.suppress(Exception):
                self._orbax.close()
            self._open()
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SaveError(
                f"checkpoint of step {step} could not be written ({reason[:300]}); earlier steps "
                f"are untouched: {', '.join(map(str, self.steps())) or 'none'}"
            ) from error

    def set_aside(self, step: int) -> pathlib.Path:
        """Renames an unreadable step, so that training can write that step again; keeps its files.

        Returns:
          The new path.
        """
        source = self.folder / str(step)
        target = source.with_name(f"{step}.unreadable")
        number = 1
        while target.exists():
            number += 1
            target = source.with_name(f"{step}.unreadable-{number}")
        source.rename(target)
        self._orbax.reload()
        return target

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """Reads a whole state.

        Args:
          step: One of the steps on disk.
          abstract: Shapes, dtypes and shardings, as `jax.eval_shape` returns them.

        Raises:
          CheckpointError: the step is absent or unreadable, or its arrays differ from `abstract`.
        """
        return _join(load_arrays(self.folder / str(step), _split(abstract)))

    def close(self) -> None:
        """Ends a save in progress and releases Orbax's threads.

        Raises:
          SaveError: that save failed.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()


def load_arrays(folder: os.PathLike, abstract: dict[str, Any]) -> dict[str, Any]:
    """Reads named array trees of a step folder with the shardings of `abstract`.

    Only the parts named in `abstract` are read: sampling never touches the optimizer.

    Args:
      folder: As in `find_step`.
      abstract: Part -> tree of shapes, dtypes and shardings, as `jax.eval_shape` returns them.

    Raises:
      CheckpointError: no checkpoint there, or its arrays are unreadable or not like `abstract`.
    """
    folder, wanted = find_step(folder), jax.tree.map(_concrete, abstract)
    try:
        return ocp.load_checkpointables(folder, wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):  # no room for it says nothing against it
        raise
    except Exception as error:
        raise CheckpointError(_unreadable(folder, error)) from error


def read_records(folder: os.PathLike) -> dict[str, Any]:
    """Reads the JSON part of a checkpoint: data position, config, manifest, tokenizer.

    Raises:
      CheckpointError: no checkpoint there (see `find_step`), or its records are unreadable.
    """
    folder = find_step(folder)
    try:
        with _context():
            return ocp.load_checkpointables(folder, {"records": None})["records"]
    except Exception as error:
        raise CheckpointError(_unreadable(folder, error)) from error


def find_step(folder: os.PathLike) -> pathlib.Path:
    """The step folder meant by a workdir (its newest), a `checkpoints` folder or a step folder.

    Raises:
      CheckpointError: nothing there; the message lists what is.
    """
    folder = pathlib.Path(folder).absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint folder {str(folder)!r} does not exist; give a workdir or step folder "
            f"written by experiments/train.py ({_nearest(folder)})"
        )
    if _is_step(folder):
        return folder
    if found := step_folders(folder):
        return found[0]
    raise CheckpointError(
        f"folder {str(folder)!r} holds no checkpoint; give a workdir or step folder written by "
        f"experiments/train.py ({_listing(folder)})"
    )


def step_folders(folder: os.PathLike) -> list[pathlib.Path]:
    """Complete steps of a workdir or a `checkpoints` folder, the newest first; maybe none."""
    for parent in (pathlib.Path(folder) / FOLDER, pathlib.Path(folder)):
        steps = [p for p in _children(parent) if p.name.isdigit() and _is_step(p)]
        if steps:
            return sorted(steps, key=lambda p: int(p.name), reverse=True)
    return []


def _context() -> ocp.Context:
    """Orbax's settings: `records` is one JSON file, not a tensor for each of its entries."""
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="records")
    context = ocp.Context()
    context.checkpointables.registry = registry
    return context


def _split(state: TrainState) -> dict[str, Any]:
    return {
        "params": state.params,
        "router": state.router,
        "optimizer": state.opt_state,
        "progress": {"step": state.step, "key": state.key},
    }


def _join(parts: dict[str, Any]) -> TrainState:
    return TrainState(
        step=parts["progress"]["step"],
        params=parts["params"],
        router=parts["router"],
        opt_state=parts["optimizer"],
        key=parts["progress"]["key"],
    )


def _concrete(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Puts the devices of the current mesh behind the abstract sharding of `eval_shape`."""
    spec = leaf.sharding.spec if leaf.sharding is not None else specs.REPLICATED
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_step(folder: pathlib.Path) -> bool:
    """Whether Orbax committed this folder and our parameters are in it."""
    return (folder / "params").is_dir() and ocp.is_orbax_checkpoint(folder)


def _children(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _listing(folder: pathlib.Path) -> str:
    names = [p.name for p in _children(folder)]
    return f"there is: {', '.join(names[:12]) or 'nothing'}"


def _nearest(folder: pathlib.Path) -> str:
    parent = next((p for p in folder.parents if p.is_dir()), pathlib.Path("/"))
    return f"in {str(parent)!r} {_listing(parent)}"


def _unreadable(folder: pathlib.Path, error: Exception) -> str:
    others = [p.name for p in _children(folder.parent) if p.name.isdigit() and p != folder]
    way_out = "start a new workdir"
    if others:
        way_out = f"move it away to resume from an earlier step, or use step {', '.join(others)}"
    reason = str(error).strip().splitlines() or [""]
    return f"checkpoint {str(folder)!r} cannot be read ({reason[0][:200]}); {way_out}"
