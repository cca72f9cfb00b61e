# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Paged append by each backend against a device-to-device copy of the same bytes, and its host time against `copy_`.

python benchmarks/rocm_benchmarks/bench_page_append.py [--json out.jsonl]

Bytes are reads and writes of the rows; metadata is not counted. `native` is the compiled kernel, `aiter` is AITER's
writer where it is there, and `torch` is the reference backend: indexed assignments, with the checks that make it
synchronise. A backend that takes no part says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashinfer
from flashinfer.testing import bench

# Column to backend.
BACKENDS = {"native": "native", "aiter": "aiter", "torch": "reference"}
SIZES = (32, 256, 4096, 65536, 262144)
REQUESTS = 16
# A budget of the design, not a promise to users: checks and selection may cost this much beside a bare copy call.
HOST_BAR = 1.6


@dataclasses.dataclass(frozen=True)
class Case:
    """An append of `tokens` bfloat16 tokens; the bar is the native kernel's least share of the copy's rate."""

    layout: str  # NHD, HND, SHUFFLED, or MLA
    tokens: int
    bar: float = 0.0
    cache: torch.dtype = torch.bfloat16
    heads: int = 8
    dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        shape = "512+64" if self.layout == "MLA" else f"{self.heads}x{self.dim}"
        return f"{self.layout} {shape} {str(self.cache).removeprefix('torch.')} {self.tokens}"

    @property
    def bytes_moved(self) -> int:
        row = 576 if self.layout == "MLA" else 2 * self.heads * self.dim
        return self.tokens * row * (2 + self.cache.itemsize)


BARS = {
    ("NHD", 65536): 0.88,
    ("NHD", 262144): 0.88,
    ("HND", 65536): 0.88,
    ("HND", 262144): 0.88,
    ("MLA", 65536): 0.85,
    ("SHUFFLED", 65536): 0.75,
}
CASES = (
    *(Case(layout, n, BARS.get((layout, n), 0.0)) for layout in ("NHD", "HND", "SHUFFLED", "MLA") for n in SIZES),
    Case("SHUFFLED", 65536, heads=1),
    *(Case(layout, 65536, cache=torch.float8_e4m3fn) for layout in ("NHD", "SHUFFLED", "MLA")),
    *(Case(layout, 65536, cache=torch.float8_e4m3fnuz) for layout in ("NHD", "SHUFFLED", "MLA")),
)


def make_call(case: Case, device: torch.device) -> tuple[Callable[..., None], tuple[Any, ...], dict[str, float]]:
    """The public function, its arguments and its scales."""
    n, page = case.tokens, case.page_size
    per_request = n // REQUESTS
    pages = -(-per_request // page)
    total = pages * REQUESTS
    indptr = torch.arange(0, n + 1, per_request, dtype=torch.int32, device=device)
    lengths = torch.full((REQUESTS,), per_request, dtype=torch.int32, device=device)
    index = flashinfer.get_batch_indices_positions(indptr, lengths, n)
    kv_indptr = torch.arange(0, total + 1, pages, dtype=torch.int32, device=device)
    table = (torch.randperm(total, device=device).int(), kv_indptr, lengths - (pages - 1) * page)
    quantized = case.cache != torch.bfloat16

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(n, *shape, device=device, dtype=torch.bfloat16)

    def pool(*shape: int) -> torch.Tensor:
        return torch.zeros(total, *shape, device=device, dtype=torch.uint8).view(case.cache)

    size = case.cache.itemsize
    if case.layout == "MLA":
        cache = pool(page, 576 * size)
        halves = (cache[..., :512], cache[..., 512:])
        return (
            flashinfer.append_paged_mla_kv_cache,
            (rows(512), rows(64), *index, *halves, *table),
            {"kv_scale": 0.5} if quantized else {},
        )
    heads, dim, x = case.heads, case.dim, 16 // size
    shapes = {
        "NHD": ((page, heads, dim * size),) * 2,
        "HND": ((heads, page, dim * size),) * 2,
        "SHUFFLED": ((heads, dim // x, page, 16), (heads, page // x, dim, 16)),
    }[case.layout]
    arguments = (rows(heads, dim), rows(heads, dim), *index, tuple(pool(*s) for s in shapes), *table, case.layout)
    return flashinfer.append_paged_kv_cache, arguments, {"k_scale": 0.5, "v_scale": 0.5} if quantized else {}


def absent(function: Callable[..., None], arguments: tuple[Any, ...], scales: dict[str, float], name: str) -> str:
    """Why a backend does not take the call, or nothing."""
    try:
        reason = flashinfer.explain(function, *arguments, backend=name, **scales)[name]
    except (flashinfer.BackendUnavailableError, flashinfer.InvalidArgumentError) as e:
        reason = str(e).splitlines()[-1].strip()
    return reason or ""


def run_case(case: Case, device: torch.device, environment: dict[str, str], emit: Callable[[str], None]) -> list[str]:
    function, arguments, scales = make_call(case, device)
    src = torch.randint(0, 100, (case.bytes_moved // 2,), dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    copy = bench.time_gpu(dst.copy_, [src], device=device)
    few = torch.zeros(arguments[0].shape, dtype=torch.bfloat16, device=device)
    host = {"settle": torch.cuda.synchronize, "calls": 10, "repeats": 100}
    copy_host = bench.time_cpu(few.copy_, [arguments[0]], **host)
    lines = []
    for column, name in BACKENDS.items():
        record = {**dataclasses.asdict(case), "cache": str(case.cache), "backend": column}
        if reason := absent(function, arguments, scales, name):
            emit(json.dumps({"benchmark": "append", "case": record, "absent": reason}))
            lines.append(f"{case.name:<34} {column:<7} absent: {reason}")
            continue

        # The first backend is what a plain call gets, and a plain call is what is timed.
        options = {**scales, **({} if column == "native" else {"backend": name})}

        def call(_: object, options: dict[str, Any] = options) -> None:
            function(*arguments, **options)

        timing = bench.time_gpu(call, [None], device=device)
        # The reference synchronises: a few calls say it all.
        calls = bench.time_cpu(call, [None], **(host if column != "torch" else {**host, "calls": 1, "repeats": 10}))
        share, ratio = copy.median_us / timing.median_us, calls.median_us / copy_host.median_us
        extra = {"of_copy": round(share, 4), "host_us": round(calls.median_us, 2), "host_of_copy": round(ratio, 3)}
        emit(bench.json_line("append", record, timing, bytes_moved=case.bytes_moved, environment=environment, **extra))
        lines.append(
            f"{case.name:<34} {column:<7} {timing.median_us:9.1f} us "
            f"{timing.gbytes_per_second(case.bytes_moved):6.0f} GB/s {share:6.1%} of copy"
            f"   host {calls.median_us:6.1f} us = {ratio:.2f} x copy_"
        )
        if column == "native" and case.bar:
            emit(json.dumps({"bar": f"append {case.name}, share of copy", "value": share, "at_least": case.bar}))
        if column == "native" and (case.layout, case.tokens) == ("NHD", SIZES[0]):
            emit(json.dumps({"bar": f"append {case.name}, host time of copy_", "value": ratio, "at_most": HOST_BAR}))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_page_append: a GPU is needed")
    device = torch.device("cuda", 0)
    environment = bench.environment(device)
    records: list[str] = []
    for case in CASES:
        print("\n".join(run_case(case, device, environment, records.append)), flush=True)
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
