"""Peaks, memory by name, and the share of the peak."""

import types

import jax
import pytest

from k3jax.train import utilisation
from k3jax.train.utilisation import GIB


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
    ],
)
def test_a_device_kind_finds_its_row_and_no_shorter_name(kind, peak):
    value, source = utilisation.peak_flops(types.SimpleNamespace(device_kind=kind, platform="gpu"))
    assert value == peak and source.startswith("dense bfloat16, NVIDIA")


def test_an_unknown_accelerator_has_no_peak_and_says_where_to_add_it():
    unknown = types.SimpleNamespace(device_kind="Chip 9", platform="gpu")
    value, source = utilisation.peak_flops(unknown)
    assert value is None and "'Chip 9'; add it to DEVICES" in source


def test_the_peak_of_this_cpu_is_measured_and_no_data_sheet_number():
    value, source = utilisation.peak_flops(jax.devices()[0])
    assert 1e9 < value < 1e14 and source.startswith("measured here: float32")


def test_matmul_flops_divide_two_n_cubed_by_the_best_time():
    ticks = iter([0.0, 0.0, 4.0, 4.0, 6.0, 6.0, 9.0, 9.0])
    assert utilisation.matmul_flops(8, 5.0, lambda: next(ticks)) == 2 * 8**3 / 2.0


def test_utilisation_is_one_when_every_flop_of_the_peak_is_the_models():
    assert utilisation.utilisation(10.0, 5.0, 50.0) == 1.0
    assert utilisation.utilisation(27_600, 6 * 145e6, 989e12) == pytest.approx(0.0243, abs=5e-5)
    with pytest.raises(ValueError, match="peak=0 FLOP/s: must be above 0"):
        utilisation.utilisation(1.0, 1.0, 0)


def test_memory_is_a_number_of_gib_or_a_device():
    assert utilisation.memory_bytes("80") == utilisation.memory_bytes("H100") == 80 * GIB
    assert utilisation.memory_bytes("0.5") == GIB // 2
    for wrong in ("0", "-1", "inf", "nan", "H300"):
        with pytest.raises(ValueError, match="a number of GiB above 0, or one of A100"):
            utilisation.memory_bytes(wrong)
