# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What our NIXL connector costs over vLLM's own: transfers, handshakes, idle steps, conversion. CPU and loopback only.

vLLM's real connectors and real UCX, in the engines without a model that the tests use, all in one process. Each of our
pairs and the stock one are measured in turns, and ratios are medians of the ratios of such turns. `wall` is what passed
on this machine; `cpu` is the processor time of the thread that drives the connector, which other work disturbs less.
That thread does the copying where UCX reads the peer's memory directly (cma, its choice within one machine).

Transfers are of all layers of one request. *Runs*: page ids follow each other on both sides, as in an empty pool;
*scattered*: random order on both sides. `listed` are the descriptors that the connector lists, `moved` those that NIXL
makes of them, since it joins neighbours.

  python benchmarks/rocm_benchmarks/bench_vllm_handoff.py [--requests 4096x2 16384x1] [--layers 36] [--repeats 7]
                                                          [--json out.jsonl]

Needs vLLM (requirements-vllm.txt). `UCX_TLS` and `UCX_NET_DEVICES` choose the transport; unset, tcp,sm,self over lo.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

ROOT = Path(__file__).resolve().parents[2]
# The engines are the tests' own: what is measured here is what is compared byte for byte there.
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import rocm_tests.vllm.conftest  # noqa: E402, F401  sets what vLLM and UCX read when they are loaded
from flashinfer.integrations.vllm.nixl.stats import CONVERSION_SECONDS  # noqa: E402
from flashinfer.kv import PageConverter  # noqa: E402
from flashinfer.testing import bench  # noqa: E402
from rocm_tests.vllm import engines  # noqa: E402

DIM, PAGE_SIZE = 128, 16
TRANSFER_BAR, HANDSHAKE_BAR_MS = 1.10, 10.0
STOCK = "stock, standard"
PAIRS = {
    # Prefill's backend, decoder's backend, their layouts of two-slot pages, whether to convert, MiB of staging.
    STOCK: (engines.Standard, engines.Standard, (None, None), False, 0),
    "standard": (engines.Standard, engines.Standard, (None, None), False, 0),
    "shuffled, whole pages": (engines.Shuffled, engines.Shuffled, (engines.WHOLE, engines.WHOLE), False, 0),
    "shuffled, planes": (engines.Shuffled, engines.Shuffled, (engines.PLANES, engines.PLANES), False, 0),
    "shuffled, whole pages to planes, straight": (
        engines.Shuffled,
        engines.Shuffled,
        (engines.WHOLE, engines.PLANES),
        False,
        0,
    ),
    "shuffled, whole pages to planes, staged": (
        engines.Shuffled,
        engines.Shuffled,
        (engines.WHOLE, engines.PLANES),
        False,
        1024,
    ),
    "standard -> shuffled, whole pages": (engines.Standard, engines.Shuffled, (None, engines.WHOLE), True, 0),
    "standard -> shuffled, planes, straight": (engines.Standard, engines.Shuffled, (None, engines.PLANES), True, 0),
    "standard -> shuffled, planes, staged": (engines.Standard, engines.Shuffled, (None, engines.PLANES), True, None),
}


class Pooled(engines.Engine):
    """Engines of one role share their memory, so that many fit, and all are measured on the same pages."""

    storage: ClassVar[dict[str, torch.Tensor]] = {}

    def _storage(self, size: int) -> torch.Tensor:
        kept = self.storage.get(self.setup.role)
        if kept is None or kept.numel() < size:
            kept = self.storage[self.setup.role] = (
                torch.empty(-(-size // 8), dtype=torch.int64).random_().view(torch.int8)
            )
        return kept[:size]


class Watched:
    """A NIXL agent that keeps the time of `make_prepped_xfer` and the length of its lists."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.seconds, self.listed = agent, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def make_prepped_xfer(self, operation: str, local: Any, ids: Any, *rest: Any, **named: Any) -> Any:
        start = time.perf_counter()
        handle = self.agent.make_prepped_xfer(operation, local, ids, *rest, **named)
        self.seconds += time.perf_counter() - start
        self.listed += len(ids)
        return handle


@dataclasses.dataclass
class Clock:
    """Wall seconds, and processor seconds of the calling thread, since it was made."""

    wall: float = dataclasses.field(default_factory=time.perf_counter)
    cpu: float = dataclasses.field(default_factory=time.thread_time)

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.thread_time() - self.cpu


@dataclasses.dataclass
class Moved:
    """One request: seconds until its bytes were there, of a conversion that followed, and until it was received."""

    listed: int
    pieces: int
    prepare: float
    wall: float
    cpu: float
    convert: float
    received: float


@dataclasses.dataclass
class Pair:
    """A prefill, and the decoder that reads from it."""

    prefill: Any
    decoder: Any
    requests: int = 0

    def __post_init__(self) -> None:
        self.worker = self.decoder.worker()
        self.connector = self.decoder.workers[0]
        self.agent = self.worker.nixl_wrapper = Watched(self.worker.nixl_wrapper)

    def request(self, remote: Sequence[int], local: Sequence[int]) -> Moved:
        self.requests += 1
        name = f"{self.decoder.id}-{self.requests}"
        engines.announce(self.prefill, name)
        wanted = engines.wanted(self.prefill, name, remote, local)
        self.worker.xfer_stats.reset()
        self.agent.seconds, self.agent.listed = 0.0, 0
        clock, arrived = Clock(), ()
        result = self.decoder.step(0, wanted)
        while True:
            if not arrived and self.worker.xfer_stats.data["num_descriptors"]:
                arrived = clock.read()
            if name in result.finished_recving:
                received = clock.read()[0]
                break
            time.sleep(2e-4)
            result = self.decoder.step(0)
        if not arrived or name in result.failed_recving:
            raise RuntimeError(f"{name} failed: {getattr(self.worker, 'last_refusal', '')}")
        engines.until(lambda: name in self.prefill.workers[0].get_transfer_results(set()).finished_sending)
        data = self.worker.xfer_stats.data
        return Moved(
            self.agent.listed,
            sum(data["num_descriptors"]),
            self.agent.seconds,
            *arrived,
            sum(data.get(CONVERSION_SECONDS, ())),
            received,
        )

    def check(self, remote: int, local: int) -> None:
        """Every byte of one page, in every layer: pages that did not arrive would be fast."""
        for name in self.decoder.names:
            sides = []
            for engine, block in ((self.prefill, remote), (self.decoder, local)):
                page = engine.caches[0][name][block].view(torch.int16).flatten()
                sides.append(page[engine.page.offsets().flatten() // 2])
            if not torch.equal(*sides):
                raise RuntimeError(f"{self.decoder.id}: page {local} of {name} is not what the prefill has")


def build(name: str, setup: Any) -> Pair:
    writes, reads, (left, right), convert, stage = PAIRS[name]
    module = engines.STOCK if name == STOCK else engines.OURS
    prefill = dataclasses.replace(setup, backend=writes, role="kv_producer", module=module, layout=left)
    decode = dataclasses.replace(setup, backend=reads, module=module, layout=right, convert=convert, stage=stage)
    return Pair(Pooled(prefill, f"prefill, {name}"), Pooled(decode, f"decoder, {name}"))


def close(pair: Pair) -> None:
    """Agents poll, so no more of them are kept than are measured."""
    pair.prefill.close()
    pair.decoder.close()


def ratios(samples: Sequence[float], base: Sequence[float]) -> bench.Timing:
    """Median and spread of the ratios of turns; not microseconds."""
    return bench.Timing.of([a / b for a, b in zip(samples, base, strict=True)])


def record_bar(name: str, value: float, at_most: float, why: str = "") -> dict[str, Any]:
    return {"bar": name, "value": round(value, 4), "at_most": at_most, "why": why}


def verdict(value: float, most: float) -> str:
    return f"bar {most:g}: {'met' if value <= most else 'NOT MET'}"


def transfers(name: str, ours: Pair, stock: Pair, pages: int, repeats: int) -> list[dict[str, Any]]:
    records = []
    pool = stock.prefill.setup.blocks
    draw = random.Random(0)
    kinds: dict[str, Callable[[], tuple[list[int], list[int]]]] = {
        "runs": lambda: (list(range(pages)), list(range(pool - pages, pool))),
        "scattered": lambda: (draw.sample(range(pool), pages), draw.sample(range(pool), pages)),
    }
    for pair in (ours, stock):
        pair.request([0, 2], [1, 0])
        pair.check(2, 0)
    for kind, ids in kinds.items():
        turns: tuple[list[Moved], list[Moved]] = ([], [])
        for turn in range(repeats):
            remote, local = ids()
            # The second one finds the pages as the first one has left them in the caches.
            for index in (0, 1) if turn % 2 else (1, 0):
                turns[index].append((ours, stock)[index].request(remote, local))
        mine, theirs = (
            {f.name: statistics.median(getattr(m, f.name) for m in moved) for f in dataclasses.fields(Moved)}
            for moved in turns
        )
        wall, cpu = (ratios(*([getattr(m, key) for m in moved] for moved in turns)) for key in ("wall", "cpu"))
        for who, middle in (("stock", theirs), ("ours", mine)):
            print(
                f"  {kind:10} {who:6} listed {middle['listed']:6.0f}, moved {middle['pieces']:6.0f}, prepared in "
                f"{1e3 * middle['prepare']:5.2f} ms, transferred in {1e3 * middle['wall']:6.1f} ms wall, "
                f"{1e3 * middle['cpu']:6.1f} ms cpu, received after {1e3 * middle['received']:.1f} ms wall",
            )
        print(
            f"  {'':10} of stock: wall {wall.median_us:.2f} ({wall.p20_us:.2f}-{wall.p80_us:.2f}), cpu "
            f"{cpu.median_us:.2f} ({cpu.p20_us:.2f}-{cpu.p80_us:.2f})  {verdict(cpu.median_us, TRANSFER_BAR)}  "
            f"[{repeats} turns, load {os.getloadavg()[0]:.1f}]",
            flush=True,
        )
        found = {"wall_of_stock": wall.median_us, "cpu_of_stock": cpu.median_us}
        records.append({"transfer": name, "ids": kind, "stock": theirs, "ours": mine, **found})
        what = f"transfer, {name}, {kind}, cpu time of stock's"
        records.append(record_bar(what, cpu.median_us, TRANSFER_BAR, f"wall {wall.median_us:.3f}"))
        if ours.decoder.setup.convert:
            records.append(conversion(ours, mine["convert"], kind, local))
    return records


def conversion(pair: Pair, seconds: float, kind: str, local: list[int]) -> dict[str, Any]:
    """Of the receive path, beside the bare converter and a copy of as many bytes, on the same pages."""
    decoder = pair.decoder
    caches = [decoder.caches[0][layer] for layer in decoder.names]
    planes = [(cache[:, 0].flatten(1), cache[:, 1].flatten(1)) for cache in caches]
    bare = PageConverter(planes, dataclasses.replace(decoder.page, kind="standard"), decoder.page)
    ids = torch.tensor(sorted(local), dtype=torch.int32)
    source = Pooled.storage["kv_producer"][: len(ids) * decoder.page.page_bytes * len(caches)]
    copied, converted = torch.empty_like(source), []
    copies = []
    for _ in range(3):
        for samples, call in ((copies, lambda: copied.copy_(source)), (converted, lambda: bare(ids))):
            clock = Clock()
            call()
            samples.append(clock.read())
    (alone, alone_cpu), (_, copy_cpu) = (
        tuple(statistics.median(column) for column in zip(*samples, strict=True)) for samples in (converted, copies)
    )
    print(
        f"  {kind:10} converted in {1e3 * seconds:.0f} ms wall in the receive path; PageConverter alone "
        f"{1e3 * alone:.0f} ms wall, {1e3 * alone_cpu:.0f} ms cpu, {copy_cpu / alone_cpu:.1%} of a copy's rate (cpu); "
        f"receive path {seconds / alone:.2f} times alone (wall)",
        flush=True,
    )
    return {"conversion": kind, "wall": seconds, "alone": alone, "alone_cpu": alone_cpu, "copy_cpu": copy_cpu}


def handshakes(name: str, ours: Pair, stock: Pair, repeats: int) -> list[dict[str, Any]]:
    """Of one rank with one rank, until the peer's pages could be read; nothing else is sent meanwhile."""
    samples: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for _ in range(repeats):
        for pair, seconds in zip((ours, stock), samples, strict=True):
            worker, peer = pair.worker, pair.prefill
            clock = Clock()
            agents, _offset = worker._nixl_handshake("127.0.0.1", peer.port, 1, peer.id)
            seconds.append(clock.read())
            # What vLLM does when the handshake ends, and when the peer is gone.
            worker._remote_agents[peer.id] = agents
            worker._cleanup_remote_engine(peer.id, log_eviction=False)
    added = [bench.Timing.of([1e3 * (a[i] - b[i]) for a, b in zip(*samples, strict=True)]).median_us for i in (0, 1)]
    for who, seconds in zip(("ours", "stock"), samples, strict=True):
        wall, cpu = (bench.Timing.of([1e3 * sample[i] for sample in seconds]) for i in (0, 1))
        print(
            f"  handshake  {who:6} {wall.median_us:.2f} ms wall ({wall.p20_us:.2f}-{wall.p80_us:.2f}), fastest "
            f"{1e3 * min(seconds)[0]:.2f}, {cpu.median_us:.2f} ms cpu"
        )
    print(
        f"  {'':10} added: {added[0]:.2f} ms wall, {added[1]:.2f} ms cpu  {verdict(added[0], HANDSHAKE_BAR_MS)}  "
        f"[{repeats} turns, load {os.getloadavg()[0]:.1f}]",
        flush=True,
    )
    return [record_bar(f"handshake, {name}, ms added", added[0], HANDSHAKE_BAR_MS, f"{added[1]:.3f} of cpu time")]


def steps(name: str, ours: Pair, stock: Pair, turns: int, calls: int = 200) -> list[dict[str, Any]]:
    """`start_load_kv` and `get_transfer_results` of a step in which nothing happens, and a request of one page."""
    empty = engines.NixlConnectorMetadata()

    def idle(pair: Pair, call: str, *arguments: object) -> float:
        pair.connector.bind_connector_metadata(empty)
        method = getattr(pair.connector, call)
        start = time.thread_time()
        for _ in range(calls):
            method(*arguments)
        return (time.thread_time() - start) / calls

    records = []
    for what, sample in (
        ("start_load_kv", lambda pair: idle(pair, "start_load_kv", None)),
        ("get_transfer_results", lambda pair: idle(pair, "get_transfer_results", set())),
        ("a page is read", lambda pair: pair.request([1], [1]).cpu),
    ):
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(turns):
            for index in (0, 1) if turn % 2 else (1, 0):
                samples[index].append(1e6 * sample((ours, stock)[index]))
        ratio = ratios(*samples)
        mine, theirs = (bench.Timing.of(values) for values in samples)
        print(
            f"  {what:21} ours {mine.median_us:.2f} us ({mine.p20_us:.2f}-{mine.p80_us:.2f}), stock "
            f"{theirs.median_us:.2f} us ({theirs.p20_us:.2f}-{theirs.p80_us:.2f}) cpu: {ratio.median_us:.3f} of stock "
            f"({ratio.p20_us:.3f}-{ratio.p80_us:.3f})  [{turns} turns, load {os.getloadavg()[0]:.1f}]",
            flush=True,
        )
        records.append({"step": what, "pair": name, "ours": mine.median_us, "stock": theirs.median_us})
    return records


def measure(
    tokens: int, heads: int, layers: int, repeats: int, pairs: Sequence[str], *, control: bool
) -> list[dict[str, Any]]:
    """All of our pairs beside the stock one; `control` adds what does not depend on the request."""
    pages = -(-tokens // PAGE_SIZE)
    setup = engines.Setup(
        kv_heads=heads, layers=layers, head_dim=DIM, block_size=PAGE_SIZE, blocks=pages + max(4, pages // 4)
    )
    stock, records = build(STOCK, setup), []
    size = stock.prefill.page.page_bytes
    label = {"tokens": tokens, "heads": heads, "layers": layers}
    print(
        f"\n{tokens} tokens, {heads} heads x {DIM} bf16, {layers} layers: {pages * layers * size / 1e6:.0f} MB", end=""
    )
    print(f" in pages of {size // 1024} KiB")
    for name in pairs:
        print(f"\n{name}", flush=True)
        ours, found = build(name, setup), []
        if control:
            found += handshakes(name, ours, stock, 4 * repeats)
        found += transfers(name, ours, stock, pages, repeats)
        if control and not ours.decoder.setup.convert:
            found += steps(name, ours, stock, 4 * repeats)
        close(ours)
        del ours
        gc.collect()
        records += [{**record, **label} for record in found]
    close(stock)
    return records


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", default=["4096x2", "16384x1"], help="tokens x KV heads of a rank")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "--repeats", type=int, default=7, help="turns of transfers; handshakes and steps get four times"
    )
    parser.add_argument("--pairs", nargs="+", default=[name for name in PAIRS if name != STOCK], choices=list(PAIRS))
    parser.add_argument("--json", type=Path, help="write records here, one JSON object a line")
    options = parser.parse_args(argv)
    transport = {name: os.environ.get(name, "") for name in ("UCX_TLS", "UCX_NET_DEVICES")}
    environment = bench.environment() | transport | {"load": f"{os.getloadavg()[0]:.1f}"}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    records: list[dict[str, Any]] = []
    for index, request in enumerate(options.requests):
        tokens, heads = map(int, request.split("x"))
        records += measure(tokens, heads, options.layers, options.repeats, options.pairs, control=index == 0)
        gc.collect()
    if options.json:
        lines = (json.dumps({**record, "environment": environment}) for record in records)
        options.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # An agent that is still polling when the interpreter is taken down may hang there.
    os._exit(code)
