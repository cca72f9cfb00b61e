# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append against a device-to-device copy of the same bytes, and its host time against `dst.copy_(src)`.

python benchmarks/rocm_benchmarks/bench_append.py [--json out.jsonl]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import flashinfer
from flashinfer.testing import bench


@dataclasses.dataclass(frozen=True)
class Case:
    """An append of `tokens` tokens; the bar is its least share of the copy's rate."""

    layout: str  # NHD, HND, SHUFFLED, or MLA
    tokens: int
    bar: float = 0.0
    heads: int = 8
    dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        shape = "512+64" if self.layout == "MLA" else f"{self.heads}x{self.dim}"
        return f"append {self.layout} bfloat16 {shape} N={self.page_size} {self.tokens} tokens"


CASES = (
    Case("NHD", 262144, 0.80),
    Case("HND", 262144),
    Case("SHUFFLED", 262144),
    Case("MLA", 262144),
    Case("NHD", 8192),
    Case("SHUFFLED", 8192),
    Case("NHD", 256),
    Case("SHUFFLED", 256),
)
REQUESTS = 16
# A budget of the design, not a promise to users: checks and selection may cost this much beside a bare copy call.
HOST_BAR = 1.6


def make_call(case: Case, device: torch.device) -> tuple[Callable[[], None], int]:
    """The append, and the bytes that it moves (every element read once and written once)."""
    n, page = case.tokens, case.page_size
    per_request = n // REQUESTS
    pages = -(-per_request // page)
    total = pages * REQUESTS
    indptr = torch.arange(0, n + 1, per_request, dtype=torch.int32, device=device)
    lengths = torch.full((REQUESTS,), per_request, dtype=torch.int32, device=device)
    batch, positions = flashinfer.get_batch_indices_positions(indptr, lengths, n)
    kv_indptr = torch.arange(0, total + 1, pages, dtype=torch.int32, device=device)
    kv_indices = torch.randperm(total, device=device).int()
    last = lengths - (pages - 1) * page
    table = (kv_indices, kv_indptr, last)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(n, *shape, device=device, dtype=torch.bfloat16)

    def pool(*shape: int) -> torch.Tensor:
        return torch.zeros(total, *shape, device=device, dtype=torch.bfloat16)

    if case.layout == "MLA":
        ckv, kpe, cache = rows(512), rows(64), pool(page, 576)
        halves = (cache[..., :512], cache[..., 512:])
        return lambda: flashinfer.append_paged_mla_kv_cache(ckv, kpe, batch, positions, *halves, *table), n * 576 * 4
    heads, dim = case.heads, case.dim
    caches = {
        "NHD": lambda: (pool(page, heads, dim), pool(page, heads, dim)),
        "HND": lambda: (pool(heads, page, dim), pool(heads, page, dim)),
        "SHUFFLED": lambda: (pool(heads, dim // 8, page, 8), pool(heads, page // 8, dim, 8)),
    }[case.layout]()
    k, v = rows(heads, dim), rows(heads, dim)
    layout = case.layout
    return lambda: flashinfer.append_paged_kv_cache(k, v, batch, positions, caches, *table, layout), n * heads * dim * 8


def run_case(case: Case, device: torch.device, environment: dict[str, str], emit: Callable[[str], None]) -> str:
    call, moved = make_call(case, device)
    src = torch.randint(0, 100, (moved // 2,), dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    timing = bench.time_gpu(lambda _: call(), [None], device=device)
    copy = bench.time_gpu(dst.copy_, [src], device=device)
    settle = torch.cuda.synchronize
    host = bench.time_cpu(lambda _: call(), [None], settle=settle, calls=10, repeats=100)
    copy_host = bench.time_cpu(dst.copy_, [src], settle=settle, calls=10, repeats=100)
    share, host_ratio = copy.median_us / timing.median_us, host.median_us / copy_host.median_us
    extra = {
        "of_copy": round(share, 4),
        "host_us": round(host.median_us, 2),
        "host_of_copy": round(host_ratio, 3),
    }
    record = dataclasses.asdict(case)
    emit(bench.json_line("append", record, timing, bytes_moved=moved, environment=environment, **extra))
    if case.bar:
        emit(json.dumps({"bar": f"{case.name}, share of copy", "value": share, "at_least": case.bar}))
    if case == CASES[-2]:
        emit(json.dumps({"bar": f"{case.name}, host time over copy_", "value": host_ratio, "at_most": HOST_BAR}))
    return (
        f"{case.name:<52} {timing.median_us:9.1f} us {timing.gbytes_per_second(moved):7.0f} GB/s {share:6.1%} of copy"
        f"  host {host.median_us:5.1f} us = {host_ratio:.2f} x copy_"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_append: a GPU is needed")
    device = torch.device("cuda", 0)
    environment = bench.environment(device)
    lines: list[str] = []
    print("\n".join(run_case(case, device, environment, lines.append) for case in CASES))
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
