# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged gather against a device-to-device copy of the same bytes.

python benchmarks/rocm_benchmarks/bench_gather.py [--json out.jsonl]
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
    """A gather of `requests` ranges of `length` tokens; the bar is its least share of the copy's rate."""

    layout: str  # NHD, HND, standard, SHUFFLED
    requests: int
    length: int
    bar: float = 0.0
    fp8: bool = False
    heads: int = 8
    dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        kind = "float8 to bfloat16" if self.fp8 else "bfloat16"
        return f"gather {self.layout} {kind} {self.heads}x{self.dim} N={self.page_size} {self.requests} x {self.length}"


CASES = (
    Case("NHD", 1, 131072, 0.85),
    Case("NHD", 256, 512, 0.85),
    Case("HND", 1, 131072, 0.85),
    Case("HND", 256, 512, 0.85),
    Case("standard", 1, 131072),
    Case("SHUFFLED", 1, 131072, 0.75),
    Case("SHUFFLED", 256, 512, 0.75),
    Case("SHUFFLED", 255, 509),
    Case("NHD", 16, 2048),
    Case("SHUFFLED", 16, 2048),
    Case("NHD", 1, 32768, heads=1),
    Case("SHUFFLED", 1, 32768, heads=1),
    Case("NHD", 16, 8192, fp8=True),
    Case("SHUFFLED", 16, 8192, fp8=True),
)


def make_call(case: Case, device: torch.device) -> tuple[Callable[[], object], int]:
    """The gather, and the bytes that it moves (every element read once and written once)."""
    n, page, heads, dim = case.requests * case.length, case.page_size, case.heads, case.dim
    pages = -(-case.length // page)
    total = pages * case.requests
    kv_indptr = torch.arange(0, total + 1, pages, dtype=torch.int32, device=device)
    kv_indices = torch.randperm(total, device=device).int()
    out_indptr = torch.arange(0, n + 1, case.length, dtype=torch.int32, device=device)
    starts = torch.zeros(case.requests, dtype=torch.int32, device=device)
    dtype = torch.float8_e4m3fn if case.fp8 else torch.bfloat16

    def pool(*shape: int) -> torch.Tensor:
        return torch.randn(total, *shape, device=device, dtype=torch.bfloat16).to(dtype)

    x = 16 // dtype.itemsize
    if case.layout == "standard":
        both = pool(heads, page, 2 * dim)
        cache, kv_layout = (both[..., :dim], both[..., dim:]), "HND"
    elif case.layout == "SHUFFLED":
        cache, kv_layout = (pool(heads, dim // x, page, x), pool(heads, page // x, dim, x)), case.layout
    else:
        shape = (page, heads, dim) if case.layout == "NHD" else (heads, page, dim)
        cache, kv_layout = (pool(*shape), pool(*shape)), case.layout
    out = tuple(torch.empty(n, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    moved = 2 * n * heads * dim * (dtype.itemsize + 2)

    def call() -> object:
        return flashinfer.gather_paged_kv(
            cache, kv_indices, kv_indptr, starts, out_indptr, n, kv_layout, out=(out[0], out[1]), backend="native"
        )

    return call, moved


def run_case(
    case: Case, device: torch.device, environment: dict[str, str], repeats: int, emit: Callable[[str], None]
) -> str:
    call, moved = make_call(case, device)
    src = torch.randint(0, 100, (moved // 2,), dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    timing = bench.time_gpu(lambda _: call(), [None], device=device, repeats=repeats)
    copy = bench.time_gpu(dst.copy_, [src], device=device, repeats=repeats)
    share = copy.median_us / timing.median_us
    record = dataclasses.asdict(case)
    emit(bench.json_line("gather", record, timing, bytes_moved=moved, environment=environment, of_copy=round(share, 4)))
    if case.bar:
        emit(json.dumps({"bar": f"{case.name}, share of copy", "value": share, "at_least": case.bar}))
    return (
        f"{case.name:<60} {timing.median_us:9.1f} us {timing.gbytes_per_second(moved):7.0f} GB/s {share:6.1%} of copy"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each case")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gather: a GPU is needed")
    device = torch.device("cuda", 0)
    environment = bench.environment(device)
    lines: list[str] = []
    print("\n".join(run_case(case, device, environment, options.repeats, lines.append) for case in CASES))
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
