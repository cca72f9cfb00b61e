# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The context of an MLA prefill, on an AMD GPU, on an NVIDIA one or, small, on the CPU. Cold cache, bf16. Modes:

  gather     `gather_kv_b_proj` against the four kernels that it replaces: gather of the latents, matrix product by the
             vendor's library, copies of both parts of the keys; its values stay where the product put them. Also
             against the larger of the product's time at the rate of a large one and a copy of as many bytes
  concat     `concat_mla_k` against a copy of as many bytes
  plan       host time of `MlaContextPlanner.plan` for 256 requests, by its parts; also where there is no GPU
  workspace  bytes of both ways for a context

Heads 128 and 16 are DeepSeek's on one GPU and on each of eight, 64 and 8 are Kimi K2's.

  python benchmarks/rocm_benchmarks/bench_mla_context.py --mode gather --heads 16 --context 8192
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from plan_parts import host_times, shown

import flashinfer
from flashinfer.backends.native.plan import planner
from flashinfer.mla_context import MlaContextPlanner, MlaShape
from flashinfer.testing import bench

MODES = ("gather", "concat", "plan", "workspace")
RANK, NOPE, ROPE, V_DIM = 512, 128, 64, 128
# Fused over four kernels: everywhere, and where a tensor-parallel rank of DeepSeek's spends most of its time.
FUSED_BAR, FUSED_BAR_16_8K, CONCAT_BAR, PLAN_BAR_US = 0.97, 1.25, 0.85, 150.0
PLAN_REQUESTS, PLAN_CONTEXT, PLAN_CHUNK = 256, 8192, 65536


@dataclasses.dataclass(frozen=True)
class Case:
    """One chunk of context in pages of one token, scattered over a pool twice as large."""

    heads: int
    context: int

    @property
    def name(self) -> str:
        return f"heads {self.heads} context {self.context}"

    @property
    def flops(self) -> float:
        return 2.0 * self.context * self.heads * (NOPE + V_DIM) * RANK

    @property
    def bytes_moved(self) -> int:
        """Latents, weight, keys and values, each once."""
        results = self.context * self.heads * (NOPE + ROPE + V_DIM)
        return 2 * (self.context * (RANK + ROPE) + self.heads * (NOPE + V_DIM) * RANK + results)


class Chunk:
    """Tensors of a case, and both ways through them."""

    def __init__(self, case: Case, device: torch.device, backend: str) -> None:
        self.backend, heads, context = backend, case.heads, case.context
        generator = torch.Generator(device=device).manual_seed(0)
        self.cache = filled((2 * context, 1, RANK + ROPE), device)
        self.weight = filled((heads * (NOPE + V_DIM), RANK), device)
        self.indices = torch.randperm(2 * context, device=device, generator=generator)[:context].int()
        self.indptr = torch.tensor([0, context], dtype=torch.int32, device=device)
        self.k = torch.empty(context, heads, NOPE + ROPE, dtype=torch.bfloat16, device=device)
        self.v = torch.empty(context, heads, V_DIM, dtype=torch.bfloat16, device=device)
        self.latent = torch.empty(context, RANK + ROPE, dtype=torch.bfloat16, device=device)
        self.product = torch.empty(context, heads * (NOPE + V_DIM), dtype=torch.bfloat16, device=device)

    def fused(self, _: object = None) -> None:
        flashinfer.gather_kv_b_proj(
            *(self.cache, None, self.indptr, self.indices, self.indptr, self.weight, None, self.k, self.v),
            backend=self.backend,
        )

    def four_kernels(self, _: object = None) -> None:
        torch.index_select(self.cache.squeeze(1), 0, self.indices, out=self.latent)
        torch.matmul(self.latent[:, :RANK], self.weight.T, out=self.product)
        up = self.product.view(*self.k.shape[:2], NOPE + V_DIM)
        self.k[..., :NOPE].copy_(up[..., :NOPE])
        self.k[..., NOPE:].copy_(self.latent[:, None, RANK:].expand(-1, self.k.size(1), -1))


def filled(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Small values, made where they lie."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).uniform_(-1, 1)


def timed(fn: Callable[[object], object], device: torch.device, repeats: int = 20) -> bench.Timing:
    """On a GPU its own time with a cold cache, from a captured graph: four launches cost the host more than one."""
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


def copy_us(moved: int, device: torch.device) -> float:
    """Time of a copy that reads and writes so many bytes together."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(lambda _: target.copy_(source), device).median_us


def flops_per_us(device: torch.device) -> float:
    """Rate of a large bf16 matrix product."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * n**3 / timed(lambda _: a @ b, device, repeats=10).median_us


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
        line = bench.json_line("mla_context", fields, timing, bytes_moved=moved, environment=self.environment, **extra)
        self.lines.append(line)
        print(f"{mode:<7} {case.name:<26} {timing.median_us:9.1f} us  {text}", flush=True)

    def bar(self, what: str, value: float, **limit: float) -> None:
        if self.with_bars:
            self.lines.append(json.dumps({"bar": what, "value": value, **limit}))


def gather(cases: Sequence[Case], report: Report) -> None:
    rate = flops_per_us(report.device)
    for case in cases:
        chunk = Chunk(case, report.device, report.backend)
        fused, four = timed(chunk.fused, report.device), timed(chunk.four_kernels, report.device)
        product, copy = case.flops / rate, copy_us(case.bytes_moved, report.device)
        gain, share = four.median_us / fused.median_us, fused.median_us / max(product, copy)
        text = (
            f"four kernels {four.median_us:9.1f} us ({gain:4.2f} x)  {case.flops / fused.median_us * 1e-6:5.0f} TFLOP/s"
            f"  {share:4.2f} x the larger of product {product:.1f} and copy {copy:.1f}"
        )
        extra = {"four_kernels_us": four.median_us, "gain": gain, "matmul_us": product, "copy_us": copy}
        report.record("gather", case, fused, case.bytes_moved, text, flops=case.flops, times_bound=share, **extra)
        least = FUSED_BAR_16_8K if (case.heads, case.context) == (16, 8192) else FUSED_BAR
        report.bar(f"mla context {case.name}, fused over four kernels", gain, at_least=least)


def concat(cases: Sequence[Case], report: Report) -> None:
    for case in cases:
        chunk = Chunk(case, report.device, report.backend)
        up = chunk.product.view(*chunk.k.shape[:2], NOPE + V_DIM)
        arguments = chunk.k, up[..., :NOPE], chunk.latent[:, None, RANK:]
        timing = timed(lambda _, arguments=arguments: flashinfer.concat_mla_k(*arguments), report.device)
        moved = 2 * case.context * (case.heads * (2 * NOPE + ROPE) + ROPE)
        share = copy_us(moved, report.device) / timing.median_us
        text = f"{timing.gbytes_per_second(moved):6.0f} GB/s, {share:.2f} of copy"
        report.record("concat", case, timing, moved, text, share_of_copy=share)
        report.bar(f"concat_mla_k {case.name}, share of copy", share, at_least=CONCAT_BAR)


def plan(_: Sequence[Case], report: Report) -> None:
    """On a CPU contexts are of a few tokens: there the call that only launches a kernel on a GPU does its work."""
    device = report.device
    longest, chunk, page_size = (PLAN_CONTEXT, PLAN_CHUNK, 16) if device.type == "cuda" else (4, 32, 1)
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(0, longest, (PLAN_REQUESTS,), generator=generator, dtype=torch.int32)
    qo_indptr = torch.arange(PLAN_REQUESTS + 1, dtype=torch.int32) * 4
    columns = -(-longest // page_size)
    tables = torch.randint(0, 4096, (PLAN_REQUESTS, columns), generator=generator, dtype=torch.int32).to(device)
    mla_planner = MlaContextPlanner(chunk, page_size, device)
    cut = planner("mla_context_plan")
    device = mla_planner.device
    _, parts = cut(qo_indptr, lens, chunk, page_size, device)
    _, *pieces, rows = parts[:5]
    whole = f"plan, {PLAN_REQUESTS} requests"
    times = host_times(
        {
            whole: lambda: mla_planner.plan(qo_indptr, lens, tables, 4096),
            "  cut, copy to the device, views of it": lambda: cut(qo_indptr, lens, chunk, page_size, device),
            "  rows of the cache, one launch": lambda: flashinfer.mla_context_indices(
                tables, *pieces, 4096, page_size, rows
            ),
        },
        device,
    )
    chunks = len(mla_planner.plan(qo_indptr, lens, tables, 4096).steps)
    print("\n".join(f"plan    {line}" for line in shown(times, whole)))
    timing, fastest = times[whole]
    text = f"host time, {PLAN_REQUESTS} requests, {chunks} chunks with their tensors, fastest {fastest:.1f} us"
    report.record("plan", Case(0, int(lens.sum())), timing, None, text, fastest_us=fastest)
    report.bar(f"mla context plan, {PLAN_REQUESTS} requests, host us", timing.median_us, at_most=PLAN_BAR_US)


def workspace(cases: Sequence[Case], report: Report) -> None:
    for heads in sorted({case.heads for case in cases}):
        shape = MlaShape(heads, RANK, NOPE, ROPE, V_DIM)
        fused, four = (shape.bytes_per_token(torch.bfloat16, fused=way) for way in (True, False))
        print(f"space   heads {heads:<20} {fused:9} bytes a token, four kernels {four}", flush=True)
        report.bar(f"mla context workspace, heads {heads}, fused over four kernels", fused / four, at_most=1.0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 64, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[1 << n for n in range(10, 17)])
    parser.add_argument("--backend", default="auto", help="of gather_kv_b_proj")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    return parser.parse_args()


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    cases = [Case(heads, context) for heads, context in itertools.product(options.heads, options.context)]
    report = Report(options, device)
    modes = {"gather": gather, "concat": concat, "plan": plan, "workspace": workspace}
    for mode in options.mode:
        modes[mode](cases, report)
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in report.lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
