# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What the timers call, and how they count; never how long something takes."""

from __future__ import annotations

import json

import pytest
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.testing.bench import FLUSH_BYTES, Timing, environment, json_line, rotation, time_cpu, time_gpu


def test_percentiles() -> None:
    timing = Timing.of([float(i) for i in range(101)])
    assert timing == Timing(median_us=50.0, p20_us=20.0, p80_us=80.0, samples=101)
    # 100,000 bytes in 50 us are 2 GB/s.
    assert timing.gbytes_per_second(100_000) == pytest.approx(2.0)
    with pytest.raises(InvalidArgumentError, match="at least one sample"):
        Timing.of([])


def test_inputs_rotate_and_settling_precedes_each_sample() -> None:
    log: list[str] = []
    timing = time_cpu(log.append, ["a", "b"], warmup=1, repeats=3, calls=2, settle=lambda: log.append("|"))
    assert "".join(log) == "|aa|bb|aa|bb"
    assert timing.samples == 3
    assert 0 <= timing.p20_us <= timing.median_us <= timing.p80_us


def test_bad_arguments() -> None:
    with pytest.raises(InvalidArgumentError, match="inputs must hold at least one"):
        time_cpu(print, [])
    with pytest.raises(InvalidArgumentError, match="inputs must hold at least one"):
        time_gpu(print, [], device="cuda")
    with pytest.raises(InvalidArgumentError, match="device must be a GPU, got cpu; use time_cpu"):
        time_gpu(print, [1], device="cpu")


def test_rotation_outgrows_the_cache() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert rotation(make, FLUSH_BYTES // 4, device="cpu") == [0, 1, 2, 3]
    assert len(rotation(make, FLUSH_BYTES * 8, device="cpu")) == 2
    assert len(rotation(make, 1, device="cpu")) == 64


def test_a_record_is_one_line_with_its_environment() -> None:
    facts = environment()
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    timing = Timing(10.0, 9.0, 12.0, 30)
    line = json_line("copy", {"tokens": 4096}, timing, bytes_moved=40_000, environment=facts, host_us=1.5)
    assert "\n" not in line
    record = json.loads(line)
    assert record["case"] == {"tokens": 4096}
    assert record["gb_per_s"] == 4.0
    assert record["median_us"] == 10.0
    assert record["host_us"] == 1.5
    assert record["environment"] == facts


@pytest.mark.gpu
def test_the_gpu_timer_runs_what_it_is_given() -> None:
    counter = torch.zeros(1, device="cuda")
    timing = time_gpu(lambda one: counter.add_(one), [1.0], device="cuda", warmup=2, repeats=5)
    assert counter.item() == 7
    assert timing.samples == 5
    assert environment("cuda")["device"] != "cpu"
