# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines in processes of their own, each of which does what lines of JSON on its connection say.

Every line is answered with one line. An engine's core is in the same process, so nothing happens in it but what was
asked for: a test can stop between two steps. With more than one rank the workers are processes of their own.

Nearly all of an engine's start is the import of vLLM, 17 s of a core. So one process imports it, waits for connections,
and forks an engine for each.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, TextIO

import torch

# What an engine would import, besides what those do.
_IMPORTS = (
    "flashinfer.integrations.vllm.attention.backend",
    "flashinfer.integrations.vllm.nixl",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)
# Compiled, if need be, and loaded before there are engines.
_MODULES = ("gather", "page", "page_convert")
_PR_SET_PDEATHSIG = 1


class Server:
    """The engine, and what is counted around it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from flashinfer.integrations.vllm.attention.metadata import PagedMetadataBuilder
        from flashinfer.integrations.vllm.nixl.stats import PageStats

        self.query_tokens = 0
        self.converted = {"pages": 0, "bytes": 0, "staged": 0}
        build = PagedMetadataBuilder.build

        def counted(builder: Any, *args: Any, **kwargs: Any) -> Any:
            step = build(builder, *args, **kwargs)
            self.query_tokens += step.num_tokens
            return step

        PagedMetadataBuilder.build = counted
        record = PageStats.record_conversion

        def summed(stats: Any, pages: int, page_bytes: int, seconds: float) -> None:
            self.converted["pages"] += pages
            self.converted["bytes"] += page_bytes
            record(stats, pages, page_bytes, seconds)

        PageStats.record_conversion = summed
        record_staged = PageStats.record_staged

        def staged(stats: Any, pages: int) -> None:
            self.converted["staged"] += pages
            record_staged(stats, pages)

        PageStats.record_staged = staged
        transfer = setup.pop("transfer", None)
        if transfer is not None:
            setup["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            kv_cache_memory_bytes=16 << 20,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            seed=0,
            **setup,
        )
        self.engine = self.llm.llm_engine
        self.finished: dict[str, dict[str, Any]] = {}

    def add(self, name: str, prompt: list[int], count: int, transfer: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": transfer} if transfer else None
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=count, extra_args=extra)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def steps(self, seconds: float, names: list[str]) -> dict[str, Any]:
        """Step until these requests are finished or the time is over; what has finished since the last call."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not set(names) <= set(self.finished):
            for output in self.engine.step():
                if output.finished:
                    done = output.outputs[0]
                    self.finished[output.request_id] = {
                        "tokens": list(done.token_ids),
                        "reason": done.finish_reason,
                        "transfer": output.kv_transfer_params,
                    }
        finished, self.finished = self.finished, {}
        return finished

    def state(self) -> dict[str, Any]:
        """Blocks that are free, and tokens that went through attention since the last call."""
        pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        seen, self.query_tokens = self.query_tokens, 0
        return {"free": pool.get_num_free_blocks(), "query_tokens": seen}

    def connector(self) -> dict[str, Any]:
        """What the connector knows and has done so far."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker
        return {
            "refusal": worker.last_refusal,
            "peers": sorted(worker._remote_agents),
            "asking": sorted(worker._handshake_futures),
            "reading": sorted(worker._recving_transfers),
            "layout": self.engine.vllm_config.cache_config.kv_cache_layout,
            "kinds": [page.kind for page in worker._pages.formats.values()],
            "converted": self.converted,
            "slots taken": 0 if worker._staging is None else worker._staging.slots.count - worker._staging.slots.free,
        }


def serve(connection: TextIO, setup: dict[str, Any]) -> None:
    """Be an engine until the connection ends."""
    torch.set_num_threads(1)
    server = Server(setup)
    print(json.dumps("ready"), file=connection, flush=True)
    for line in connection:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(server, name)(**arguments)), file=connection, flush=True)


def prepare() -> None:
    """Import and load what every engine needs."""
    from vllm import LLM, SamplingParams  # noqa: F401

    from flashinfer.jit.load import load_module

    for name in _IMPORTS:
        importlib.import_module(name)
    for name in _MODULES:
        load_module(importlib.import_module(f"flashinfer.backends.native.{name}").SPEC, torch.device("cpu"))
    # Objects that stay: collections in the engines need not look at them, which would copy their pages.
    gc.freeze()


def fork(connection: socket.socket) -> None:
    """An engine in a new process and session, as the connection's first line says; the parent returns at once."""
    if os.fork():
        return
    # With the process that it was forked from, an engine ends too, whatever it is doing.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    stream = connection.makefile("rw")
    order = json.loads(stream.readline())
    os.environ.update(order["environment"])
    # What libraries print must not get between the answers.
    printed = os.open(order["printed"], os.O_WRONLY | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    print(json.dumps(os.getpid()), file=stream, flush=True)
    status = 1
    try:
        serve(stream, order["setup"])
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        # Without a farewell to peers, and without the parent's: nothing is tested behind this line.
        os._exit(status)


def main() -> None:
    """Fork engines until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    prepare()
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"{len(threads)} threads before the first fork, which takes only one of them along")
    # Engines that ended are nobody's children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.listen()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            fork(connection)


if __name__ == "__main__":
    main()
