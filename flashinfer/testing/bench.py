# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Timers for benchmarks: cold caches, medians, and the environment in every record."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.version import __version__

# gfx942 and gfx950 have 256 MiB of last-level cache; twice that leaves nothing of the last run behind.
FLUSH_BYTES = 512 << 20

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call: median, 20th and 80th percentile of `samples` calls."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        """Summarise single samples."""
        if not microseconds:
            raise InvalidArgumentError("Timing.of: microseconds must hold at least one sample, got none")
        values = torch.tensor(microseconds, dtype=torch.float64)
        p20, median, p80 = values.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
        return cls(median, p20, p80, len(microseconds))

    def gbytes_per_second(self, bytes_moved: int) -> float:
        """Rate at the median; `bytes_moved` counts reads and writes."""
        return bytes_moved / self.median_us * 1e-3


def time_gpu(
    fn: Callable[[T], object],
    inputs: Sequence[T],
    *,
    device: torch.device | str,
    warmup: int = 3,
    repeats: int = 30,
    flush_bytes: int = FLUSH_BYTES,
) -> Timing:
    """Time `fn(inputs[i % len(inputs)])` on the current stream of `device`, each call with a cold cache.

    The cache is overwritten between calls, which also gives the host time to enqueue `fn` before the GPU gets
    there: the events enclose device work only. With several `inputs` no call finds what the last one left.

    Parameters
    ----------
    fn
        Enqueues the work on the current stream; its result is dropped.
    inputs
        At least one.
    device
        A GPU.
    warmup, repeats
        Calls before and during the measurement.
    flush_bytes
        Size of the buffer that is written before each call; 0 leaves the cache warm.
    """
    if not inputs:
        raise InvalidArgumentError("time_gpu: inputs must hold at least one entry, got none")
    device = torch.device(device)
    if device.type != "cuda":
        raise InvalidArgumentError(f"time_gpu: device must be a GPU, got {device}; use time_cpu")
    with torch.cuda.device(device):
        flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device) if flush_bytes else None
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for i in range(warmup):
            fn(inputs[i % len(inputs)])
        torch.cuda.synchronize(device)
        for i, (start, end) in enumerate(events):
            if flush is not None:
                flush.zero_()
            start.record()
            fn(inputs[(warmup + i) % len(inputs)])
            end.record()
        torch.cuda.synchronize(device)
        return Timing.of([start.elapsed_time(end) * 1e3 for start, end in events])


def time_cpu(
    fn: Callable[[T], object],
    inputs: Sequence[T],
    *,
    warmup: int = 3,
    repeats: int = 30,
    calls: int = 1,
    settle: Callable[[], object] | None = None,
) -> Timing:
    """Wall time of `fn(inputs[i % len(inputs)])` on the host.

    Parameters
    ----------
    fn
        The work. For a GPU op this is what its call costs the host, provided that `settle` drains the queue.
    inputs
        At least one.
    warmup, repeats
        Samples before and during the measurement.
    calls
        Calls per sample, for work too short for the clock.
    settle
        Runs untimed before every sample, for example `torch.cuda.synchronize`.
    """
    if not inputs:
        raise InvalidArgumentError("time_cpu: inputs must hold at least one entry, got none")
    samples = []
    for i in range(warmup + repeats):
        if settle is not None:
            settle()
        value = inputs[i % len(inputs)]
        start = time.perf_counter_ns()
        for _ in range(calls):
            fn(value)
        elapsed = time.perf_counter_ns() - start
        if i >= warmup:
            samples.append(elapsed / calls * 1e-3)
    return Timing.of(samples)


def rotation(make: Callable[[], T], bytes_each: int, *, device: torch.device | str) -> list[T]:
    """Inputs enough to outgrow the last-level cache: 2 to 64, and at most a quarter of free GPU memory."""
    count = max(2, -(-FLUSH_BYTES // max(bytes_each, 1)))
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        count = max(2, min(count, free // 4 // max(bytes_each, 1)))
    return [make() for _ in range(min(count, 64))]


def environment(device: torch.device | str = "cpu") -> dict[str, str]:
    """What a number depends on: package, torch, runtime, device, host."""
    device = torch.device(device)
    facts = {
        "flashinfer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "device": "cpu",
    }
    if torch.version.hip is not None:
        facts["hip"] = torch.version.hip
    if torch.version.cuda is not None:
        facts["cuda"] = torch.version.cuda
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = properties.name
        facts["arch"] = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        facts["compute_units"] = str(properties.multi_processor_count)
        facts["memory_gib"] = f"{properties.total_memory / 2**30:.0f}"
    return facts


def json_line(
    benchmark: str,
    case: Mapping[str, str | int | float | bool],
    timing: Timing,
    *,
    bytes_moved: int | None = None,
    environment: Mapping[str, str],
    **extra: str | int | float,
) -> str:
    """One record as one line of JSON, keys in a fixed order."""
    record: dict[str, object] = {"benchmark": benchmark, "case": dict(case), **dataclasses.asdict(timing)}
    if bytes_moved is not None:
        record["bytes_moved"] = bytes_moved
        record["gb_per_s"] = round(timing.gbytes_per_second(bytes_moved), 1)
    record.update(extra)
    record["environment"] = dict(environment)
    return json.dumps(record)
