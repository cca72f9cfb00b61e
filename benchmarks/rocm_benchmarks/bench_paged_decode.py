# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over pages: decode against the time of reading its keys and values once, prefill against a matrix product.

Cold cache, random pages of 16 tokens, bf16, 8 KV heads of 128. Modes:

  decode   one query a request, for each layout of pages, batch, length and query heads to a KV head; the floor is a
           kernel that reads the same pages once and adds up what it reads
  prefill  one causal request over pages and over ragged keys, as a share of the rate of a large bf16 matrix product;
           over shuffled pages through BatchPrefillWithPagedKVCacheWrapper, which gathers them into its workspace first
  host     time that a call costs the host

  python benchmarks/rocm_benchmarks/bench_paged_decode.py --mode decode --batch 32 128 --kv-len 4096
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import flashinfer
from flashinfer.testing import bench

H, D, N = 8, 128, 16
ROW_BYTES = 2 * 2 * H * D
MODES = ("decode", "prefill", "host")
LAYOUTS = ("NHD", "HND", "SHUFFLED")
FLOOR_BAR, PREFILL_BAR, HOST_BAR_US = 1.25, 0.45, 60.0
X = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of equal requests; `kv_layout` "RAGGED" has no pages."""

    kv_layout: str
    batch: int
    kv_len: int
    group: int
    q_len: int = 1

    @property
    def name(self) -> str:
        return f"{self.kv_layout} batch {self.batch} kv {self.kv_len} queries {self.q_len} group {self.group}"

    @property
    def pages(self) -> int:
        return -(-self.kv_len // N)


def filled(*shape: int, device: torch.device) -> torch.Tensor:
    """Small values, made where they lie: pools are gigabytes."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-1, 1)


def step(case: Case, device: torch.device, backend: str) -> Callable[[object], None]:
    """A call on tensors of its own."""
    P, counts = case.batch * case.pages, torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    q = filled(case.batch * case.q_len, H * case.group, D, device=device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    options = {"max_q_len": case.q_len, "max_kv_len": case.kv_len, "out": out, "lse": lse, "backend": backend}
    qo_indptr = counts * case.q_len
    if case.kv_layout == "RAGGED":
        k, v = (filled(case.batch * case.kv_len, H, D, device=device) for _ in range(2))
        return lambda _: flashinfer.ragged_attention(q, k, v, qo_indptr, counts * case.kv_len, **options)  # type: ignore[arg-type,return-value]
    shapes = {
        "NHD": ((P, N, H, D), (P, N, H, D)),
        "HND": ((P, H, N, D), (P, H, N, D)),
        "SHUFFLED": ((P, H, D // X, N, X), (P, H, N // X, D, X)),
    }[case.kv_layout]
    cache = tuple(filled(*shape, device=device) for shape in shapes)
    ids = torch.randperm(P, device=device).int()
    last = torch.full((case.batch,), case.kv_len - (case.pages - 1) * N, dtype=torch.int32, device=device)
    if case.kv_layout == "SHUFFLED" and case.q_len > 1:
        wrapper = prefill_wrapper(case, (qo_indptr, counts * case.pages, ids, last), backend)
        return lambda _: wrapper.run(q, cache, out=out, lse=lse)  # type: ignore[arg-type,return-value]
    table = counts * case.pages, ids, last, case.kv_layout
    return lambda _: flashinfer.paged_attention(q, cache, qo_indptr, *table, **options)  # type: ignore[arg-type,return-value]


def prefill_wrapper(
    case: Case, metadata: tuple[torch.Tensor, ...], backend: str
) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    """With room for the keys and values of the batch in its workspace, behind 64 MiB for partial results."""
    size = (64 << 20) + case.batch * case.kv_len * ROW_BYTES
    workspace = torch.empty(size, dtype=torch.uint8, device=metadata[0].device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, case.kv_layout, backend=backend)
    wrapper.plan(*metadata, H * case.group, H, D, N, causal=True, q_data_type=torch.bfloat16)
    if not wrapper.gathers_pages:
        raise RuntimeError(f"{case.name}: pages are not gathered")
    return wrapper


def timed(fn: Callable[[object], object], device: torch.device, repeats: int = 30) -> bench.Timing:
    """On a GPU its own time, from a captured graph as engines decode; on the CPU wall time."""
    if device.type != "cuda":
        return bench.time_cpu(fn, [None], warmup=1, repeats=3)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        fn(None)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        fn(None)
    return bench.time_gpu(lambda _: graph.replay(), [None], device=device, repeats=repeats)


def read_floor(case: Case, device: torch.device) -> float:
    """The best of some launches of a kernel that reads K and V of the batch once, page by page."""
    pool = filled(case.batch * case.pages, 2 * N, H * D, device=device)
    pages = torch.randperm(pool.size(0), device=device).int()
    if device.type != "cuda":
        return timed(lambda _: pool[pages.long()].sum(), device).median_us
    from mla_read_floor import read_rows

    units, times = torch.cuda.get_device_properties(device).multi_processor_count, []
    for per_unit, tile in ((8, 8), (4, 16), (16, 8)):
        sums = torch.empty(units * per_unit * 1024, dtype=torch.float32, device=device)
        read = read_rows(pool, pages, pool.size(0) * 2 * N, sums, units * per_unit, tile)
        times.append(timed(read, device, repeats=15).median_us)
    return min(times)


class Report:
    """Records, bars and lines of one run."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.environment = bench.environment(device)
        self.lines: list[str] = []

    def record(self, mode: str, case: Case, timing: bench.Timing, text: str, **extra: float) -> None:
        fields = {"mode": mode, "backend": self.backend, **dataclasses.asdict(case)}
        self.lines.append(bench.json_line("attention", fields, timing, environment=self.environment, **extra))
        print(f"{mode:<8} {case.name:<52} {timing.median_us:10.1f} us  {text}", flush=True)

    def bar(self, what: str, value: float, **bound: float) -> None:
        # The bars are those of a GPU of the verification target.
        if self.device.type == "cuda":
            self.lines.append(json.dumps({"bar": what, "value": value, **bound}))


def decode(options: argparse.Namespace, report: Report) -> None:
    for batch, kv_len in itertools.product(options.batch, options.kv_len):
        floor = read_floor(Case("NHD", batch, kv_len, 1), report.device)
        for group, kv_layout in itertools.product(options.group, LAYOUTS):
            case = Case(kv_layout, batch, kv_len, group)
            timing = timed(step(case, report.device, report.backend), report.device)
            times, moved = timing.median_us / floor, batch * kv_len * ROW_BYTES
            text = f"{times:5.2f} x read floor  {timing.gbytes_per_second(moved):6.0f} GB/s"
            report.record("decode", case, timing, text, read_floor_us=floor, times_floor=times)
            if batch >= 32 and kv_len >= 4096:
                report.bar(f"decode {case.name}, times the read floor", times, at_most=FLOOR_BAR)


def prefill(options: argparse.Namespace, report: Report) -> None:
    n = 8192 if report.device.type == "cuda" else 512
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=report.device) for _ in range(2))
    rate = 2 * n**3 / timed(lambda _: a @ b, report.device, repeats=10).median_us * 1e-6
    print(f"matrix product of {n}: {rate:.0f} TFLOP/s", flush=True)
    for kv_layout, tokens in itertools.product((*LAYOUTS, "RAGGED"), options.tokens):
        case = Case(kv_layout, 1, tokens, options.group[0], q_len=tokens)
        timing = timed(step(case, report.device, report.backend), report.device, repeats=10)
        done = 4 * D * H * case.group * tokens * (tokens + 1) / 2 / timing.median_us * 1e-6
        report.record(
            "prefill", case, timing, f"{done:5.0f} TFLOP/s  {done / rate:5.1%}", tflops=done, share=done / rate
        )
        if tokens == 8192:
            report.bar(f"prefill {case.name}, share of a matrix product", done / rate, at_least=PREFILL_BAR)


def host(options: argparse.Namespace, report: Report) -> None:
    settle = torch.cuda.synchronize if report.device.type == "cuda" else None
    for kv_layout in ("NHD", "RAGGED"):
        case = Case(kv_layout, 4, 256, options.group[0])
        call = step(case, report.device, report.backend)
        timing = bench.time_cpu(call, [None], repeats=50, settle=settle)
        report.record("host", case, timing, "host time")
        report.bar(f"host time of a call, {case.name}, us", timing.median_us, at_most=HOST_BAR_US)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--kv-len", type=int, nargs="+", default=[1024, 4096, 32768])
    parser.add_argument("--group", type=int, nargs="+", default=[4, 8], help="query heads to a KV head")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of prefill")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    return parser.parse_args()


def main() -> int:
    options = parse()
    report = Report(options.backend, torch.device(options.device))
    for mode in options.mode:
        {"decode": decode, "prefill": prefill, "host": host}[mode](options, report)
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in report.lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
