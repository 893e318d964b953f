"""The one mesh of the project: always explicit, every axis always present.

`jax.jit` under this mesh is what `pjit` used to mean: sharding lives in the arrays' types.
"""

import dataclasses
import math

import jax
from jax.sharding import AxisType, PartitionSpec

AXES = ("stage", "data", "expert", "context")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Length of each mesh axis; 1 keeps the axis and shards nothing over it.

    Nothing is sharded over `stage` yet, so its length is 1.
    """

    stage: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(
                    f"mesh.{axis}={getattr(self, axis)}: an axis length is at least 1; "
                    "use 1 to shard nothing over it"
                )
        if self.stage > 1:
            raise ValueError(
                f"mesh.stage={self.stage}: layers are not split into pipeline stages yet, so all "
                "stages would do the same work; set it to 1 and use data or expert"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis lengths in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)


def make_mesh(cfg: MeshConfig = MeshConfig()) -> jax.sharding.Mesh:
    """Builds the explicit mesh over the first `prod(shape)` devices of the platform.

    Raises:
      ValueError: fewer devices exist than the mesh needs.
    """
    needed = math.prod(cfg.shape)
    devices = jax.devices()
    if len(devices) < needed:
        raise ValueError(
            f"mesh {dict(zip(AXES, cfg.shape, strict=True))} needs {needed} devices, "
            f"{len(devices)} are present; lower an axis length"
        )
    explicit = (AxisType.Explicit,) * len(AXES)
    return jax.make_mesh(cfg.shape, AXES, axis_types=explicit, devices=devices[:needed])


def abstract_mesh(cfg: MeshConfig) -> jax.sharding.AbstractMesh:
    """The same mesh without devices: shapes and shardings of any cluster on any machine."""
    return jax.sharding.AbstractMesh(cfg.shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def check_divides(shape: tuple[int, ...], spec: PartitionSpec) -> None:
    """Refuses an array that the mesh in force would split into unequal parts.

    Raises:
      ValueError: an axis is no multiple of the product of the mesh axes that split it.
    """
    lengths = jax.sharding.get_abstract_mesh().shape
    for size, entry in zip(shape, spec, strict=False):
        names = (entry,) if isinstance(entry, str) else entry or ()
        parts = math.prod(lengths.get(name, 1) for name in names)
        if size % parts:
            raise ValueError(
                f"a parameter of shape {list(shape)} has an axis of {size}, which is split over "
                f"{' x '.join(names)} = {parts} devices; choose sizes of the model that are "
                f"multiples of {parts}, or lower the mesh axes"
            )
