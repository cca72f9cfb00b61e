# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""In-place page conversion against a device-to-device copy of the same bytes, and against torch operations.

Cold cache, random pages of a pool twice the request, all layers in one call, K and V planes apart. Bytes moved are two
per byte converted, which is what a copy moves; `of copy` is the ratio of the two rates within this run. `ascending` is
the same request with its page ids in order, which is how `ConversionQueue` passes ids that it gets on the host.

  python benchmarks/rocm_benchmarks/bench_page_convert.py [--quick | --sweep] [--json out.jsonl] [--plot out.png]
  python benchmarks/rocm_benchmarks/bench_page_convert.py --from out.jsonl --plot out.png      # no GPU needed
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flashinfer.core.dtypes import FP8
from flashinfer.kv import PageConverter, PageFormat, convert_kv_pages
from flashinfer.testing import bench


@dataclasses.dataclass(frozen=True)
class Case:
    """A request of `tokens` tokens over `layers` layers; the bar is its least share of the copy's rate."""

    src: str
    dst: str
    tokens: int
    bar: float = 0.0
    dtype: str = "bfloat16"
    heads: int = 8
    page_size: int = 16
    dim: int = 128
    layers: int = 36
    recode: str = ""  # dtype of the result, if another

    @property
    def name(self) -> str:
        dtype = f"{self.dtype} -> {self.recode}" if self.recode else self.dtype
        shape = f"N={self.page_size} H={self.heads} D={self.dim} {self.tokens // 1024}k x {self.layers}"
        return f"{self.src} -> {self.dst} {dtype} {shape}"


OCP, FNUZ = (str(dtype).removeprefix("torch.") for dtype in FP8)
FORWARD = ("standard", "shuffled")
BACKWARD = ("shuffled", "standard")
CASES = (
    Case(*FORWARD, 1024, 0.75),
    Case(*FORWARD, 4096, 0.92),
    Case(*FORWARD, 16384, 0.92),
    Case(*FORWARD, 32768),
    Case(*BACKWARD, 1024, 0.75),
    Case(*BACKWARD, 4096, 0.92),
    Case(*BACKWARD, 16384, 0.92),
    Case(*FORWARD, 4096, 0.92, dtype="float16"),
    Case(*FORWARD, 4096, 0.85, page_size=128),
    Case(*BACKWARD, 4096, 0.85, page_size=128),
    Case(*FORWARD, 4096, layers=1),
    Case(*FORWARD, 4096, layers=80),
    Case(*FORWARD, 4096, page_size=32),
    Case(*FORWARD, 4096, page_size=64),
    Case(*FORWARD, 4096, dim=64),
    Case(*FORWARD, 4096, dim=256, heads=4),
    Case(*FORWARD, 4096, heads=3),
    Case(*FORWARD, 4096, heads=1),
    Case("standard", "split_nhd", 4096, 0.35),
    Case("standard", "x_packed", 4096, 0.35),
    Case("split_hnd", "shuffled", 4096, 0.35),
    Case(*FORWARD, 4096, 0.85, dtype=OCP),
    Case(*FORWARD, 4096, 0.85, dtype=OCP, recode=FNUZ),
    Case(*BACKWARD, 4096, 0.85, dtype=FNUZ, recode=OCP),
)
# What `--plot` draws: share of copy over request length.
LENGTHS = tuple(1024 << i for i in range(6))
SWEPT = (
    Case(*FORWARD, 0),
    Case(*BACKWARD, 0),
    Case(*FORWARD, 0, dtype=OCP, recode=FNUZ),
    Case(*BACKWARD, 0, dtype=FNUZ, recode=OCP),
    Case(*FORWARD, 0, page_size=128),
    Case("standard", "split_nhd", 0),
)
SWEEP = tuple(dataclasses.replace(case, tokens=tokens) for case in SWEPT for tokens in LENGTHS)
# Figures of the proposal to convert on the decode side: milliseconds that a decode step saves with shuffled pages
# at batch 32-64, against the default backend and against the fastest unshuffled one.
SAVED_MS_PER_STEP = {"default backend": (0.6, 2.7), "fastest unshuffled": (0.4, 1.3)}
HOST_BAR_US = 20.0
TORCH_BAR = 15.0


class Request:
    """Planes of all layers, and the random pages of them that one request owns."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.src, self.dst = (
            PageFormat(kind, dtype, case.heads, case.page_size, case.dim, "per_tensor" if case.recode else None)
            for kind, dtype in ((case.src, case.dtype), (case.dst, case.recode or case.dtype))
        )
        pages = case.tokens // case.page_size
        pool = 2 * pages
        elements = self.src.half_bytes // self.src.element_size
        self.planes = [
            tuple(
                torch.randint(0, 100, (pool, elements * self.src.element_size), dtype=torch.uint8, device=device).view(
                    getattr(torch, case.dtype)
                )
                for _ in range(2)
            )
            for _ in range(case.layers)
        ]
        self.ids = torch.randperm(pool, device=device)[:pages].int()
        self.ascending = self.ids.sort().values
        self.bytes = pages * self.src.page_bytes * case.layers
        self.bound = PageConverter(self.planes, self.src, self.dst, allow_inexact=True)  # type: ignore[arg-type]

    def convert(self) -> None:
        convert_kv_pages(self.planes, self.ids, self.src, self.dst, allow_inexact=True)  # type: ignore[arg-type]

    def torch_ops(self, case: Case, *, contiguous: bool) -> None:
        """Layer by layer with torch operations, as the proposal writes it (standard -> shuffled).

        Written down plainly, the permuted views go straight into the indexed assignment. `contiguous` makes them
        contiguous first, which a careful author would find to be faster.
        """
        H, N, D, x = case.heads, case.page_size, case.dim, self.src.x
        ids = self.ids.long()
        for k_plane, v_plane in self.planes:
            page = torch.cat([k_plane[ids], v_plane[ids]], dim=1).view(-1, H, N, 2 * D)
            k = page[..., :D].reshape(-1, H, N, D // x, x).permute(0, 1, 3, 2, 4)
            v = page[..., D:].reshape(-1, H, N // x, x, D).permute(0, 1, 2, 4, 3)
            if contiguous:
                k, v = k.contiguous(), v.contiguous()
            k_plane.view(-1, H, D // x, N, x)[ids] = k
            v_plane.view(-1, H, N // x, D, x)[ids] = v


def copy_rate(nbytes: int, device: torch.device) -> float:
    """GB/s of `dst.copy_(src)` over this many bytes, reads and writes counted."""
    src = torch.randint(0, 100, (nbytes,), dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return bench.time_gpu(dst.copy_, [src], device=device).gbytes_per_second(2 * nbytes)


def in_place_share(nbytes: int, copy_gbytes: float, device: torch.device) -> float:
    """Rate of the plainest in-place pass, flipping all bits of contiguous memory, as a share of the copy's rate.

    Reading and writing the same lines is slower than copying from one buffer to another: this is what a conversion
    in place could reach if it had nothing to do.
    """
    x = torch.randint(0, 1 << 30, (nbytes // 4,), dtype=torch.int32, device=device)
    return bench.time_gpu(lambda t: t.bitwise_not_(), [x], device=device).gbytes_per_second(2 * nbytes) / copy_gbytes


def torch_ratios(request: Request, case: Case, device: torch.device, microseconds: float) -> tuple[float, float]:
    """How many times as long torch operations take, plainly and with contiguous intermediates."""
    ratios = []
    for contiguous in (False, True):
        repack = functools.partial(request.torch_ops, case, contiguous=contiguous)
        baseline = bench.time_gpu(lambda _, repack=repack: repack(), [None], device=device, repeats=5)
        ratios.append(round(baseline.median_us / microseconds, 2))
    return ratios[0], ratios[1]


def run_case(case: Case, device: torch.device, environment: dict[str, str], emit: Callable[[str], None]) -> str:
    request = Request(case, device)
    timing = bench.time_gpu(lambda _: request.convert(), [None], device=device)
    ordered = bench.time_gpu(request.bound, [request.ascending], device=device)
    host, bound = (
        bench.time_cpu(lambda _, f=f: f(), [None], settle=torch.cuda.synchronize, repeats=100)
        for f in (request.convert, lambda: request.bound(request.ids))
    )
    moved = 2 * request.bytes
    rate, copy = timing.gbytes_per_second(moved), copy_rate(request.bytes, device)
    share, ceiling = rate / copy, in_place_share(request.bytes, copy, device)
    share_ordered = ordered.gbytes_per_second(moved) / copy
    extra = {
        "of_copy": round(share, 4),
        "ascending_of_copy": round(share_ordered, 4),
        "in_place_of_copy": round(ceiling, 4),
        "host_us": round(host.median_us, 2),
        "converter_host_us": round(bound.median_us, 2),
    }
    row = (
        f"{case.name:<81} {timing.median_us / 1e3:8.3f} ms {rate:7.0f} GB/s {share:6.1%} of copy, "
        f"ascending {share_ordered:6.1%}, bare pass {ceiling:.1%}; "
        f"host {host.median_us:6.1f}, converter {bound.median_us:5.1f} us"
    )
    bars = []
    if case.bar:
        why = f"a bare pass in place reaches {ceiling:.3f}"
        for order, value in (("random", share), ("ascending", share_ordered)):
            name = f"{case.name}, {order}, share of copy"
            bars.append({"bar": name, "value": value, "at_least": case.bar, "why": why})
    if (case.src, case.dst) == FORWARD and request.src.element_size == 2 and case.layers == 36:
        plain, contiguous = torch_ratios(request, case, device, timing.median_us)
        extra |= {"torch_ops_ratio": plain, "contiguous_torch_ops_ratio": contiguous}
        row += f", torch ops {plain:.1f}x ({contiguous:.1f}x if made contiguous)"
        if case.bar >= 0.9:
            why = f"a bare copy would be {plain * copy / rate:.1f} times as fast as torch ops"
            bars.append({"bar": f"{case.name}, times torch ops", "value": plain, "at_least": TORCH_BAR, "why": why})
    if case == CASES[1]:
        bars.append({"bar": "PageConverter, 36 layers, host us", "value": bound.median_us, "at_most": HOST_BAR_US})
    described = dataclasses.asdict(case)
    emit(bench.json_line("page_convert", described, timing, bytes_moved=moved, environment=environment, **extra))
    for bar in bars:
        emit(json.dumps(bar))
    return row


def plot(lines: Sequence[str], path: Path) -> None:
    """Share of the copy's rate over the length of the request."""
    from matplotlib import pyplot

    curves: dict[str, dict[int, float]] = {}
    for record in map(json.loads, lines):
        case = {**record.get("case", {})}
        if not case or case.pop("layers") != 36:
            continue
        tokens, recode = case.pop("tokens"), case.pop("recode")
        case.pop("bar")
        if dataclasses.replace(SWEPT[0], **case, recode=recode) not in SWEPT:
            continue
        label = f"{case['src']} to {case['dst']}, {case['dtype']}" + (f" to {recode}" if recode else "")
        curves.setdefault(f"{label}, {case['page_size']}-token pages", {})[tokens] = record["of_copy"]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, points in curves.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel("tokens of the request, 36 layers, 8 heads x 128")
    axes.set_ylabel("share of a copy's rate")
    axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def break_even(lines: list[str]) -> list[str]:
    """Output tokens after which a conversion has paid for itself, from measured time and the proposal's savings."""
    out = []
    for record in map(json.loads, lines):
        case = record.get("case", {})
        if (case.get("src"), case.get("dst"), case.get("dtype"), case.get("page_size")) != (
            *FORWARD,
            "bfloat16",
            16,
        ):
            continue
        if (case["heads"], case["dim"]) != (8, 128):
            continue
        ms = record["median_us"] / 1e3
        spans = (f"{ms / high:.1f}-{ms / low:.1f} ({name})" for name, (low, high) in SAVED_MS_PER_STEP.items())
        out.append(f"break-even at {case['tokens'] // 1024}k: {', '.join(spans)} output tokens")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="only the cases with a bar")
    parser.add_argument("--sweep", action="store_true", help="request lengths of 1k to 32k instead, for --plot")
    parser.add_argument("--plot", type=Path, help="draw share of copy over request length (needs matplotlib)")
    parser.add_argument("--from", dest="records", type=Path, help="take the records of an earlier run")
    options = parser.parse_args()
    lines: list[str] = []
    if options.records:
        lines = options.records.read_text(encoding="utf-8").splitlines()
    elif not torch.cuda.is_available():
        sys.exit("bench_page_convert: a GPU is needed")
    else:
        device = torch.device("cuda", 0)
        environment = bench.environment(device)
        cases = SWEEP if options.sweep else [case for case in CASES if case.bar or not options.quick]
        rows = [run_case(case, device, environment, lines.append) for case in cases]
        print("\n".join([*rows, *break_even(lines)]))
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if options.plot:
        plot(lines, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
