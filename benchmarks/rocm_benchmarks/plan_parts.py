# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Host time of a plan and of its parts, all in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from flashinfer.testing import bench


class HostTime(NamedTuple):
    """Of all samples, and the fastest of them: on a machine that is shared the median is the others' as well."""

    timing: bench.Timing
    fastest_us: float


def host_times(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 400
) -> dict[str, HostTime]:
    """Times of the calls alone, taken in turns: the device is idle before each and waited for after it."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            call()
            samples[name].append((time.perf_counter_ns() - start) * 1e-3)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    # The first calls load modules and fill torch's caches of memory.
    kept = {name: values[rounds // 10 :] for name, values in samples.items()}
    return {name: HostTime(bench.Timing.of(values), min(values)) for name, values in kept.items()}


def shown(times: Mapping[str, HostTime], whole: str) -> list[str]:
    """A line for each call, and one for what `whole` takes beside the others, which are its parts."""
    rest = times[whole].fastest_us - sum(t.fastest_us for name, t in times.items() if name != whole)
    lines = [f"{name:<52} {t.fastest_us:7.1f} us, median {t.timing.median_us:7.1f}" for name, t in times.items()]
    return [*lines, f"{'  the rest: Python':<52} {rest:7.1f} us"]
