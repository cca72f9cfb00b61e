# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Phase-aware attention against fetching the whole cache in every step, over the life of a batch of requests.

A scenario is a number of requests of one prompt length and one output length. Prompts are read in steps of at most
8192 tokens, then all requests decode together. Its time is that of one layer's attention in all of these steps, each
replayed from a graph; steps that differ only in the length of the context are measured at a few lengths in between.

The naive mode copies keys and values of all tokens of all requests into dense tensors, and then runs one attention over
them. It exists here only. Prompt steps are bound by arithmetic, which both modes share; what a fetch costs shows in the
decode steps, so these have the bar, and the sum over all steps is told beside it.

python benchmarks/rocm_benchmarks/bench_phase_attention.py [--plan] [--json out.jsonl]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from plan_parts import host_times, shown

import flashinfer
from flashinfer.backends.native.plan import planner
from flashinfer.testing import bench

# Qwen3-30B-A3B's attention, with the step size and the workspace that serving uses.
HEADS, KV_HEADS, DIM, PAGE = 32, 4, 128, 16
STEP_TOKENS = 8192
WORKSPACE_TOKENS = 32768
PLAN_BAR_US = 150.0


@dataclasses.dataclass(frozen=True)
class Scenario:
    """`requests` of `prompt` tokens that each decode `output` tokens; the bar is the least speed-up of decode steps."""

    requests: int
    prompt: int
    output: int
    kv_layout: str = "NHD"
    bar: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.requests} x ({self.prompt} + {self.output}) {self.kv_layout}"


SCENARIOS = (
    Scenario(32, 2048, 16, bar=2.0),
    Scenario(64, 128, 1024),
    Scenario(4, 192 << 10, 2048, bar=2.0),
    Scenario(32, 2048, 16, "SHUFFLED"),
    Scenario(64, 128, 1024, "SHUFFLED"),
    Scenario(4, 192 << 10, 2048, "SHUFFLED"),
)

# New tokens and context of each request of a step.
Batch = list[tuple[int, int]]


def steps(s: Scenario) -> list[tuple[float, Batch]]:
    """Batches to measure, and how often each counts."""
    found: list[tuple[float, Batch]] = []
    if s.prompt <= STEP_TOKENS:
        together = min(s.requests, STEP_TOKENS // s.prompt)
        found.append((s.requests / together, [(s.prompt, 0)] * together))
    else:
        pieces = s.prompt // STEP_TOKENS
        found.append((s.requests, [(STEP_TOKENS, 0)]))
        found += [(weight * s.requests, [(STEP_TOKENS, context)]) for weight, context in _sampled(
            STEP_TOKENS, (pieces - 1) * STEP_TOKENS, pieces - 1)]  # fmt: skip
    found += [
        (weight, [(1, context)] * s.requests) for weight, context in _sampled(s.prompt, s.prompt + s.output, s.output)
    ]
    return found


def _sampled(low: int, high: int, count: int) -> list[tuple[float, int]]:
    """Contexts from `low` to `high`, and weights that add up to `count` steps: Simpson's rule."""
    middle = (low + high) // 2 // PAGE * PAGE
    return [(count / 6, low), (count * 4 / 6, middle), (count / 6, high)]


class Pool:
    """Pages for a batch, and its metadata on the host and on the device."""

    def __init__(self, batch: Batch, kv_layout: str, device: torch.device) -> None:
        lengths = [sum(r) for r in batch]
        counts = [-(-n // PAGE) for n in lengths]
        pages = sum(counts)
        x = 8
        shapes = {
            "NHD": ((PAGE, KV_HEADS, DIM),) * 2,
            "SHUFFLED": ((KV_HEADS, DIM // x, PAGE, x), (KV_HEADS, PAGE // x, DIM, x)),
        }[kv_layout]
        self.kv_layout, self.lengths = kv_layout, lengths
        self.cache = tuple(torch.randn(pages, *s, device=device, dtype=torch.bfloat16) for s in shapes)
        self.qo_indptr = torch.tensor([0, *accumulate(new for new, _ in batch)], dtype=torch.int32)
        self.kv_indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        self.last_page_len = torch.tensor(
            [n - (c - 1) * PAGE for n, c in zip(lengths, counts, strict=True)], dtype=torch.int32
        )
        self.kv_indices = torch.randperm(pages, device=device).int()
        tokens = int(self.qo_indptr[-1])
        self.q = torch.randn(tokens, HEADS, DIM, device=device, dtype=torch.bfloat16)
        # What was appended: both modes give the same results.
        self.k, self.v = flashinfer.gather_paged_kv(
            (self.cache[0], self.cache[1]),
            *(self.kv_indices, self.kv_indptr.to(device)),
            torch.tensor([context for _, context in batch], device=device),
            self.qo_indptr.to(device),
            tokens,
            kv_layout,
        )
        self.out = torch.empty_like(self.q)


def phase_aware(pool: Pool, device: torch.device) -> Callable[[], object]:
    workspace = torch.empty(2 * WORKSPACE_TOKENS * KV_HEADS * DIM * 2, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPhaseAttentionWrapper(workspace, pool.kv_layout)
    table = pool.qo_indptr, pool.kv_indptr, pool.kv_indices, pool.last_page_len
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE)
    cache = pool.cache[0], pool.cache[1]
    return lambda: wrapper.run(pool.q, pool.k, pool.v, cache, out=pool.out)


def naive(pool: Pool, device: torch.device) -> Callable[[], object]:
    total = sum(pool.lengths)
    rows = torch.tensor([0, *accumulate(pool.lengths)], dtype=torch.int32, device=device)
    starts = torch.zeros(len(pool.lengths), dtype=torch.int32, device=device)
    qo, kv = pool.qo_indptr.to(device), pool.kv_indptr.to(device)
    dense = tuple(torch.empty(total, KV_HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    longest = int(pool.qo_indptr.diff().max())

    def run() -> object:
        k, v = flashinfer.gather_paged_kv(
            (pool.cache[0], pool.cache[1]),
            *(pool.kv_indices, kv, starts, rows, total, pool.kv_layout),
            out=(dense[0], dense[1]),
        )
        return flashinfer.ragged_attention(
            pool.q, k, v, qo, rows, causal=True, max_q_len=longest, max_kv_len=max(pool.lengths), out=pool.out
        )

    return run


MODES = {"phase-aware": phase_aware, "naive": naive}


def graphed(run: Callable[[], object]) -> Callable[[object], object]:
    """The call as one graph: no time of the host's in between."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda _: graph.replay()


def run_scenario(
    s: Scenario, device: torch.device, environment: dict[str, str], repeats: int, emit: Callable[[str], None]
) -> str:
    totals = {(mode, part): 0.0 for mode in MODES for part in ("prompt", "decode")}
    for weight, batch in steps(s):
        pool = Pool(batch, s.kv_layout, device)
        part = "decode" if batch[0][0] == 1 else "prompt"
        for mode, make in MODES.items():
            timing = bench.time_gpu(graphed(make(pool, device)), [None], device=device, repeats=repeats, warmup=1)
            totals[mode, part] += weight * timing.median_us
            case = {**dataclasses.asdict(s), "mode": mode, "step": f"{len(batch)} x {batch[0]}", "weight": weight}
            emit(bench.json_line("phase_attention", case, timing, environment=environment))
        del pool
    aware, before = ([totals[mode, part] for part in ("prompt", "decode")] for mode in MODES)
    if s.bar:
        ratio = before[1] / aware[1]
        emit(json.dumps({"bar": f"{s.name}, decode steps, phase-aware over naive", "value": ratio, "at_least": s.bar}))
    return (
        f"{s.name:<32} prompt {before[0] * 1e-3:8.1f} -> {aware[0] * 1e-3:8.1f} ms  decode {before[1] * 1e-3:8.1f} -> "
        f"{aware[1] * 1e-3:8.1f} ms, {before[1] / aware[1]:.2f} x  all {sum(before) / sum(aware):.2f} x"
    )


def plan_time(device: torch.device, emit: Callable[[str], None], environment: dict[str, str]) -> list[str]:
    """Host time of a plan and of its parts, metadata on the host."""
    batches: dict[str, Batch] = {
        "256 decodes": [(1, 1000 + 37 * b) for b in range(256)],
        "200 decodes, 28 extends, 28 prefills": [(1, 1000 + 37 * b) for b in range(200)]
        + [(64 + b, 500 + 100 * b) for b in range(28)]
        + [(64 + b, 0) for b in range(28)],
    }
    workspace = torch.empty(2 * WORKSPACE_TOKENS * KV_HEADS * DIM * 2, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPhaseAttentionWrapper(workspace)
    cut, pinned = planner("phase_plan"), device.type == "cuda"
    lines = []
    for name, batch in batches.items():
        counts = [-(-sum(r) // PAGE) for r in batch]
        qo = torch.tensor([0, *accumulate(new for new, _ in batch)], dtype=torch.int32)
        kv = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        last = torch.tensor([sum(r) - (c - 1) * PAGE for r, c in zip(batch, counts, strict=True)], dtype=torch.int32)
        indices = torch.zeros(sum(counts), dtype=torch.int32, device=device)
        numbers = (qo, kv, last, PAGE, 1, WORKSPACE_TOKENS, -1, False, pinned)
        _, words = cut(*numbers)
        whole = f"plan of {name}"
        times = host_times(
            {
                whole: lambda t=(qo, kv, indices, last): wrapper.plan(*t, HEADS, KV_HEADS, DIM, PAGE),
                "  split, cut": lambda n=numbers: cut(*n),
                "  copy to the device": lambda w=words: w.to(device, non_blocking=True),
            },
            device,
        )
        timing, fastest = times[whole]
        emit(bench.json_line("phase_plan", {"batch": name}, timing, environment=environment, fastest_us=fastest))
        if device.type == "cuda":
            emit(json.dumps({"bar": f"{whole}, us", "value": timing.median_us, "at_most": PLAN_BAR_US}))
        lines += shown(times, whole)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    parser.add_argument("--repeats", type=int, default=5, help="timed replays of each step")
    parser.add_argument("--scenarios", type=int, nargs="*", default=range(len(SCENARIOS)), help="which of them")
    parser.add_argument("--plan", action="store_true", help="host time of plans only, which takes no GPU")
    options = parser.parse_args(arguments)
    if not options.plan and not torch.cuda.is_available():
        sys.exit("bench_phase_attention: a GPU is needed, or --plan")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    environment = bench.environment(device)
    records: list[str] = []
    lines = plan_time(device, records.append, environment)
    for i in () if options.plan else options.scenarios:
        lines.append(run_scenario(SCENARIOS[i], device, environment, options.repeats, records.append))
    print("\n".join(lines))
    if options.json:
        options.json.write_text("".join(f"{line}\n" for line in records), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
