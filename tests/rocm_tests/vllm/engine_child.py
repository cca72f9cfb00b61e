# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""One real vLLM engine in a process of its own, which does what lines of JSON on its standard input say.

Every line is answered with one line. The engine's core is in the same process, so nothing happens in it but what was
asked for: a test can stop between two steps. With more than one rank the workers are processes of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch


class Server:
    """The engine, and what is counted around it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from flashinfer.integrations.vllm.attention.metadata import PagedMetadataBuilder
        from flashinfer.integrations.vllm.nixl.stats import PageStats

        self.query_tokens = 0
        self.converted = {"pages": 0, "bytes": 0}
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
            "layout": self.engine.vllm_config.cache_config.kv_cache_layout,
            "kinds": [page.kind for page in worker._pages.formats.values()],
            "converted": self.converted,
        }


def main() -> None:
    """Serve until standard input ends."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    server = Server(json.loads(sys.argv[1]))
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(server, name)(**arguments)), file=answers, flush=True)
    # Without a farewell to peers: nothing is tested behind this line.
    os._exit(0)


if __name__ == "__main__":
    main()
