# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""MLA decode against the time of reading its keys once, on an AMD GPU, on an NVIDIA one or, small, on the CPU.

Cold cache, random pages, bf16, 512 + 64 wide. Modes:

  attn   `run()` for each shape, against the read floor: a kernel that reads the same rows through the same page table
         once; at many heads against a matrix product of as many operations, if that takes longer
  cat    the copy that makes one buffer of two caches, for the part of the pool that is in use; of the first shape
  plan   host time of `plan()` with metadata on the device and on the host, of `run()`, and of `mla_kv_view()`; of the
         first shape
  pool   `run()` at a fixed batch of 8 x 1024 tokens while the pool around it grows: the time must not

Bytes are those that the chosen path moves: queries, keys and values once, results; with --separate on a backend that
reads combined rows, the copy of the batch's rows as well.

  python benchmarks/rocm_benchmarks/bench_mla_hip.py --mode attn --heads 16 128 --batch 8 32 --kv-len 8192 32768
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import flashinfer
from flashinfer.testing import bench

CKV, KPE = 512, 64
ROW_BYTES = 2 * (CKV + KPE)
SM_SCALE = 192**-0.5
MODES = ("attn", "cat", "plan", "pool")
READ_BAR, COMPUTE_BAR, PLAN_BAR_US, VIEW_BAR_US, POOL_BAR, PAGE_BAR = 1.15, 2.2, 90.0, 2.0, 1.03, 1.05
POOL_GB = (0.01, 0.28, 1.12, 4.5)
# Backends whose kernels read ckv and kpe as one row: separate caches cost them a copy of the batch's rows.
COMBINED = ("aiter",)


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode step; `pool_pages` 0 means that the batch fills the pool."""

    batch: int
    kv_len: int
    heads: int
    page_size: int = 1
    pool_pages: int = 0
    separate: bool = False

    @property
    def name(self) -> str:
        return f"heads {self.heads} batch {self.batch} kv {self.kv_len} page {self.page_size}"


class Step:
    """Tensors of a decode step, planned."""

    def __init__(self, case: Case, device: torch.device, backend: str) -> None:
        self.case, self.device = case, device
        pages = -(-case.kv_len // case.page_size)
        pool_pages = max(case.pool_pages, case.batch * pages)
        generator = torch.Generator(device=device).manual_seed(0)
        shape = pool_pages, case.page_size
        if case.separate:
            self.caches = tuple(filled((*shape, width), device) for width in (CKV, KPE))
        else:
            self.pool = filled((*shape, CKV + KPE), device)
            self.caches = self.pool[..., :CKV], self.pool[..., CKV:]
        ids = torch.randperm(pool_pages, device=device, generator=generator)[: case.batch * pages].int()
        indptr = torch.arange(case.batch + 1, dtype=torch.int32)
        lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32)
        self.metadata = indptr, indptr * pages, ids, lens
        self.q = torch.randn(case.batch, case.heads, CKV + KPE, device=device, dtype=torch.bfloat16)
        self.out = torch.empty(case.batch, case.heads, CKV, device=device, dtype=torch.bfloat16)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        self.plan(self.metadata)

    def plan(self, metadata: Sequence[torch.Tensor]) -> None:
        case = self.case
        shape = case.heads, CKV, KPE, case.page_size
        self.wrapper.plan(*metadata, *shape, False, SM_SCALE, torch.bfloat16, torch.bfloat16)

    def run(self, _: object = None) -> None:
        self.wrapper.run(self.q[..., :CKV], self.q[..., CKV:], *self.caches, out=self.out)

    @functools.cached_property
    def chosen(self) -> str:
        """The backend that takes the call."""
        q = self.q[..., :CKV], self.q[..., CKV:]
        answers = flashinfer.explain(self.wrapper.run, *q, *self.caches, out=self.out)
        return next(name for name, reason in answers.items() if reason is None)

    def bytes_moved(self) -> int:
        rows = self.case.batch * self.case.kv_len * ROW_BYTES
        # Of whole pages: where a request ends in its last one only the device knows.
        copied = self.metadata[2].numel() * self.case.page_size * ROW_BYTES
        copy = 2 * copied if self.case.separate and self.chosen in COMBINED else 0
        return rows + self.q.nbytes + self.out.nbytes + copy


def filled(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Small values, made where they lie: pools are gigabytes."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-1, 1)


def timed(fn: Callable[[object], object], device: torch.device, repeats: int = 30) -> bench.Timing:
    """On a GPU its own time with a cold cache, on the CPU wall time.

    From a captured graph, as engines decode: a launch by Triton costs the host more than a short batch the GPU.
    """
    if device.type == "cuda":
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            fn(None)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            fn(None)
        return bench.time_gpu(lambda _: graph.replay(), [None], device=device, repeats=repeats)
    return bench.time_cpu(fn, [None], warmup=1, repeats=3)


def read_floor(step: Step) -> bench.Timing:
    """The best of some launches of a kernel that reads the batch's rows once."""
    device, case = step.device, step.case
    if device.type != "cuda":
        ids = step.metadata[2].long()
        return timed(lambda _: [rows[ids].sum() for rows in step.caches], device)
    from mla_read_floor import read_rows

    pages = step.metadata[2]
    pool = torch.cat(step.caches, dim=-1) if case.separate else step.pool
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    best: bench.Timing | None = None
    for per_unit, tile in ((8, 8), (4, 16), (8, 4), (16, 8)):
        out = torch.empty(programs * per_unit * 1024, dtype=torch.float32, device=device)
        read = read_rows(pool, pages, case.batch * case.kv_len, out, programs * per_unit, tile)
        timing = timed(read, device, repeats=15)
        best = timing if best is None or timing.median_us < best.median_us else best
    assert best is not None
    return best


def matmul_us(flops: float, device: torch.device) -> float:
    """Time of so many operations at the rate of a large bf16 matrix product."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return timed(lambda _: a @ b, device, repeats=10).median_us * flops / (2 * n**3)


class Report:
    """Records, bars and lines of one run."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.backend, self.device = options.backend, device
        self.environment = bench.environment(device)
        self.lines: list[str] = []
        # The bars are those of a GPU of the verification target.
        self.with_bars = device.type == "cuda"

    def record(
        self, mode: str, case: Case, timing: bench.Timing, moved: int | None, text: str, **extra: float | str
    ) -> None:
        fields = {"mode": mode, "backend": self.backend, **dataclasses.asdict(case)}
        self.lines.append(
            bench.json_line("mla", fields, timing, bytes_moved=moved, environment=self.environment, **extra)
        )
        print(f"{mode:<5} {case.name:<42} {timing.median_us:10.1f} us  {text}", flush=True)

    def bar(self, what: str, value: float, at_most: float) -> None:
        if self.with_bars:
            self.lines.append(json.dumps({"bar": what, "value": value, "at_most": at_most}))


def attn(cases: Sequence[Case], report: Report) -> None:
    floors: dict[tuple[int, int, int], float] = {}
    first_page: dict[tuple[int, int, int], float] = {}
    for case in cases:
        step = Step(case, report.device, report.backend)
        timing, key = timed(step.run, report.device), (case.batch, case.kv_len, case.page_size)
        if key not in floors:
            floors[key] = read_floor(step).median_us
        flops = 2.0 * case.batch * case.kv_len * case.heads * (2 * CKV + KPE)
        compute = matmul_us(flops, report.device) if case.heads >= 64 else 0.0
        times_floor = timing.median_us / floors[key]
        share = timing.median_us / max(floors[key], compute)
        text = f"{times_floor:5.2f} x read floor  {flops / timing.median_us * 1e-6:7.3g} TFLOP/s"
        extra: dict[str, float | str] = {
            "chosen": step.chosen,
            "read_floor_us": floors[key],
            "times_floor": times_floor,
            "matmul_us": compute,
            "times_bound": share,
        }
        report.record("attn", case, timing, step.bytes_moved(), text, **extra)
        if case.page_size == 1 and case.heads < 64 and case.batch >= 32:
            report.bar(f"mla {case.name}, times the read floor", times_floor, READ_BAR)
        if case.page_size == 1 and case.heads >= 64 and case.batch >= 32:
            report.bar(f"mla {case.name}, times the larger of read and matmul time", share, COMPUTE_BAR)
        shape = case.batch, case.kv_len, case.heads
        if case.page_size == 1:
            first_page[shape] = timing.median_us
        elif shape in first_page:
            report.bar(f"mla {case.name}, times page 1", timing.median_us / first_page[shape], PAGE_BAR)


def cat(cases: Sequence[Case], report: Report) -> None:
    for case in cases:
        step = Step(dataclasses.replace(case, separate=True), report.device, report.backend)
        timing = timed(lambda _, step=step: torch.cat(step.caches, dim=-1), report.device)
        moved = 2 * sum(c.nbytes for c in step.caches)
        report.record("cat", step.case, timing, moved, f"{timing.gbytes_per_second(moved):7.0f} GB/s")


def plan(cases: Sequence[Case], report: Report) -> None:
    settle = torch.cuda.synchronize if report.device.type == "cuda" else None
    for case in cases:
        step = Step(case, report.device, report.backend)
        timing = bench.time_cpu(step.run, [None], settle=settle)
        report.record("plan", case, timing, None, "host time of run()")
        for batch in (1, 32, 256):
            small = dataclasses.replace(case, batch=batch, kv_len=min(case.kv_len, 1024))
            step = Step(small, report.device, report.backend)
            on_device = tuple(t.to(report.device) for t in step.metadata)
            for where, metadata in (("device", on_device), ("host", step.metadata)):
                timing = bench.time_cpu(
                    lambda _, step=step, metadata=metadata: step.plan(metadata), [None], repeats=50, settle=settle
                )
                report.record("plan", small, timing, None, f"metadata on the {where}", metadata=where)
                if where == "device":
                    report.bar(f"mla plan, batch {batch}, host us", timing.median_us, PLAN_BAR_US)
    step = Step(dataclasses.replace(cases[0], batch=1, kv_len=64, separate=False), report.device, report.backend)
    timing = bench.time_cpu(lambda _: flashinfer.mla_kv_view(*step.caches), [None], calls=100, settle=settle)
    report.record("plan", step.case, timing, None, "mla_kv_view")
    report.bar("mla_kv_view, host us", timing.median_us, VIEW_BAR_US)


def pool(cases: Sequence[Case], report: Report) -> None:
    for heads, page_size in sorted({(c.heads, c.page_size) for c in cases}):
        times = []
        sizes = POOL_GB if report.device.type == "cuda" else POOL_GB[:1]
        for size in sizes:
            pages = int(size * 1e9) // ROW_BYTES // page_size
            case = Case(8, 1024, heads, page_size, pages, cases[0].separate)
            step = Step(case, report.device, report.backend)
            timing = timed(step.run, report.device)
            times.append(timing.median_us)
            report.record("pool", case, timing, step.bytes_moved(), f"pool {size} GB", pool_gb=size)
        report.bar(f"mla pool, heads {heads} page {page_size}, slowest over fastest", max(times) / min(times), POOL_BAR)


def plot(lines: Sequence[str], path: Path) -> None:
    """Time over read floor by KV length, one curve for each number of heads and batch size."""
    from matplotlib import pyplot

    curves: dict[str, list[tuple[int, float]]] = {}
    for record in map(json.loads, lines):
        case = record.get("case", {})
        if case.get("mode") == "attn":
            name = f"heads {case['heads']}, batch {case['batch']}, page {case['page_size']}"
            curves.setdefault(name, []).append((case["kv_len"], record["times_floor"]))
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV length")
    axes.set_ylabel("time / time of reading the keys once")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--kv-len", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--page-size", type=int, nargs="+", default=[1])
    parser.add_argument("--separate", action="store_true", help="ckv and kpe in two allocations")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    parser.add_argument("--plot", type=Path, help="write a picture of mode attn here (needs matplotlib)")
    options = parser.parse_args()
    # Before the minutes that measuring takes.
    for name in ("heads", "batch", "kv_len", "page_size"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {min(getattr(options, name))}")
    for path in (options.json, options.plot):
        if path and not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent} to write {path.name} into")
    if options.plot and "attn" not in options.mode:
        parser.error("--plot draws what --mode attn measures")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs the package matplotlib")
    return options


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    grid = itertools.product(options.batch, options.kv_len, options.heads, sorted(options.page_size))
    cases = [Case(b, n, h, p, separate=options.separate) for b, n, h, p in grid]
    report = Report(options, device)
    modes = {"attn": attn, "cat": cat, "plan": plan, "pool": pool}
    for mode in options.mode:
        shown = cases if mode in ("attn", "pool") else cases[:1]
        modes[mode](shown, report)
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in report.lines), encoding="utf-8")
    if options.plot:
        plot(report.lines, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
