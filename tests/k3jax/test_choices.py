"""Choices outside their range are refused where a configuration is made, not later or never."""

import pytest

from k3jax.layers.kda import KdaConfig
from k3jax.layers.latent_moe import MoeConfig
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel.mesh import MeshConfig
from k3jax.train.config import TrainConfig

REQUIRED = {
    KdaConfig: dict(heads=2, key_dim=8, value_dim=8),
    MoeConfig: dict(experts=4, top_k=2, expert_width=8, latent_dim=8),
    OptimizerConfig: dict(peak_lr=1e-3),
    MeshConfig: {},
    TrainConfig: {},
}


@pytest.mark.parametrize(
    "kind, field, value, message",
    [
        (
            OptimizerConfig,
            "schedule",
            "linear",
            "schedule='linear': choose from cosine, wsd",
        ),
        (OptimizerConfig, "decay_fraction", 1.5, r"decay_fraction=1.5: a share lies in \[0, 1\]"),
        (TrainConfig, "task", "code", "train.task='code': choose from text, recall"),
        (MoeConfig, "shared_width", 0, "moe.shared_width=0: at least 1, or none for expert_width"),
        (MoeConfig, "latent_dim", 0, "moe.latent_dim=0: at least 1, or none for the model width"),
        (MoeConfig, "latent_dim", -8, "moe.latent_dim=-8: at least 1"),
        (KdaConfig, "output_gate_rank", 0, "kda.output_gate_rank=0: .* none for full rank"),
        (KdaConfig, "chunk_size", 0, "kda.chunk_size=0 is not one of .*; choose one"),
        (KdaConfig, "chunk_size", 48, "kda.chunk_size=48 is not one of .*; choose one"),
        (TrainConfig, "sample_temperature", -1, "train.sample_temperature.*-1.* 0 is greedy"),
        (TrainConfig, "sample_top_p", 0, r"train.sample_top_p.* in \(0, 1\]"),
        (TrainConfig, "mesh", MeshConfig(context=2), "train.mesh.context=2: .* set it to 1"),
        (MeshConfig, "stage", 2, "mesh.stage=2: .* set it to 1"),
        (MeshConfig, "stage", 0, "mesh.stage=0: an axis length is at least 1"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_the_way_out(kind, field, value, message):
    with pytest.raises(ValueError, match=message):
        kind(**REQUIRED[kind] | {field: value})


@pytest.mark.parametrize(
    "kind, field, value",
    [
        (OptimizerConfig, "schedule", "constant"),
        (TrainConfig, "task", "recall"),
        (TrainConfig, "sample_temperature", 0.0),
        (TrainConfig, "sample_top_p", 1.0),
        (MoeConfig, "shared_width", 1),
        (MoeConfig, "shared_width", None),
        (KdaConfig, "output_gate_rank", 1),
        *((KdaConfig, "chunk_size", size) for size in (16, 32, 64, None)),
    ],
)
def test_a_choice_at_the_edge_is_kept(kind, field, value):
    assert getattr(kind(**REQUIRED[kind] | {field: value}), field) == value
