# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Host time of the attention wrappers' plans, and of a run around its kernels; the bar is 150 us for 256 requests.

python benchmarks/rocm_benchmarks/bench_attention_plan.py [--requests 256] [--device cuda:0] [--json out.jsonl]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import flashinfer
from flashinfer.testing import bench

BAR_US = 150.0
HEADS, KV_HEADS, DIM, PAGE_SIZE, PAGES_PER_REQUEST = 32, 8, 128, 16, 8


def host_time(call: Callable[[], object], device: torch.device, repeats: int = 300) -> bench.Timing:
    """Of the call alone: the device is idle before it and waited for after it."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - start))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return bench.Timing.of(samples[repeats // 10 :])


def calls(requests: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is timed, by name. Metadata is pinned where there is a GPU, as engines have it."""
    indptr = torch.arange(requests + 1, dtype=torch.int32) * PAGES_PER_REQUEST
    last, qo = torch.ones(requests, dtype=torch.int32), torch.arange(requests + 1, dtype=torch.int32)
    indices = torch.arange(requests * PAGES_PER_REQUEST, dtype=torch.int32, device=device)
    if device.type == "cuda":
        indptr, last, qo = indptr.pin_memory(), last.pin_memory(), qo.pin_memory()
    there = [t.to(device) for t in (indptr, last)]
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    decode, paged = (
        wrapper(workspace)
        for wrapper in (flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    )
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    graph = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace, there[0].clone(), indices.clone(), there[1].clone()
    )
    shape, dtype = (HEADS, KV_HEADS, DIM, PAGE_SIZE), {"q_data_type": torch.bfloat16}
    q = torch.randn(requests, HEADS, DIM, device=device).bfloat16()
    cache = torch.zeros(indices.numel(), 2, PAGE_SIZE, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    found: dict[str, Callable[[], object]] = {
        "decode, metadata on the host": lambda: decode.plan(indptr, indices, last, *shape, **dtype),
        "decode, metadata on the device": lambda: decode.plan(there[0], indices, there[1], *shape, **dtype),
        "decode into a graph's buffers": lambda: graph.plan(indptr, indices, last, *shape, **dtype),
        "fast_decode_plan, indptr on the host": lambda: flashinfer.fast_decode_plan(
            graph, there[0], indices, there[1], *shape, **dtype, global_override_indptr_cpu=indptr
        ),
        "prefill, metadata on the host": lambda: paged.plan(qo, indptr, indices, last, *shape, **dtype),
        "ragged prefill, metadata on the host": lambda: ragged.plan(qo, indptr, *shape[:3], **dtype),
    }
    if device.type == "cuda":
        out = torch.empty_like(q)
        found["run of a decode"] = lambda: decode.run(q, cache, out=out)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    environment, lines = bench.environment(device), []
    for name, call in calls(options.requests, device).items():
        timing = host_time(call, device)
        verdict = ""
        lines.append(
            bench.json_line(
                "attention_plan", {"call": name, "requests": options.requests}, timing, environment=environment
            )
        )
        if not name.startswith("run"):
            verdict = f"  bar {BAR_US:.0f} us: {'met' if timing.median_us <= BAR_US else 'NOT MET'}"
            bar = f"plan of {name}, {options.requests} requests, host us"
            lines.append(json.dumps({"bar": bar, "value": timing.median_us, "at_most": BAR_US}))
        print(f"{name:40} {options.requests} requests {timing.median_us:8.1f} us{verdict}", flush=True)
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
