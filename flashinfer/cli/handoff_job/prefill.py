# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The prefill process: reads the prompt into `standard` pages and lets the decoder fetch them."""

from __future__ import annotations

import time

from flashinfer.cli.handoff_job import side_channel
from flashinfer.cli.handoff_job.channel import Channel
from flashinfer.cli.handoff_job.job import Job
from flashinfer.cli.handoff_job.model import LlamaRunner, greedy, warm_up
from flashinfer.cli.handoff_job.pages import Sequence, scattered_blocks, standard_pool
from flashinfer.cli.handoff_job.transfer import KVAgent, PoolDescription, TransferError

_BLOCK_SEED = 1
_RELEASE_TIMEOUT_S = 120.0
_POLL_S = 0.0005


def run(runner: LlamaRunner, job: Job, channel: Channel) -> None:
    """Serve one request."""
    page_format = job.page_format("standard", runner.config)
    # Twice the pages it needs, so that the request's blocks are scattered among others.
    pool = standard_pool(page_format, runner.config.num_layers, 2 * job.prompt_pages)
    channel.send("status", text="building or loading kernels")
    warm_up(runner, pool)
    agent = KVAgent("prefill")
    pages = [layer for (layer,) in pool.memory]
    agent.register(pages)
    description = PoolDescription(
        agent=agent.metadata(),
        page_tag=page_format.tag,
        page_bytes=page_format.page_bytes,
        num_blocks=pool.num_blocks,
        region_addresses=tuple(layer.data_ptr() for layer in pages),
    )
    listener = side_channel.listen()
    channel.send("listening", port=listener.getsockname()[1])
    with side_channel.accept(listener) as peer:
        peer.send(description.to_json())
        peer.receive()  # The decoder takes these pages.
        block_ids = scattered_blocks(job.prompt_pages, pool.num_blocks, _BLOCK_SEED)
        start = time.perf_counter()
        first_token = greedy(runner.forward(job.prompt, Sequence(pool, block_ids)))
        channel.send("prefilled", seconds=time.perf_counter() - start, block_ids=block_ids.tolist())
        peer.send({"block_ids": block_ids.tolist(), "first_token": first_token})
        _wait_until_read(agent)
    agent.close()


def _wait_until_read(agent: KVAgent) -> None:
    """Pages may be used again only when the reader says so."""
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while not agent.notifications():
        if time.monotonic() > deadline:
            raise TransferError(f"the decoder did not report its read within {_RELEASE_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
