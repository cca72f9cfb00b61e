# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The decode process: fetches `standard` pages into its planes, makes them `shuffled` pages and generates from them."""

from __future__ import annotations

import time

import torch

from flashinfer.cli.handoff_job import side_channel
from flashinfer.cli.handoff_job.channel import Channel
from flashinfer.cli.handoff_job.job import Job
from flashinfer.cli.handoff_job.model import LlamaRunner, continue_greedily, warm_up
from flashinfer.cli.handoff_job.pages import PagePool, Sequence, scattered_blocks, shuffled_pool
from flashinfer.cli.handoff_job.transfer import (
    KVAgent,
    PoolDescription,
    TransferError,
    half_page_descriptors,
    plane_descriptors,
)
from flashinfer.kv import ConversionPlan, Convert, PageFormat, Reject, Scope, convert_kv_pages, negotiate

_BLOCK_SEED = 2
_READ_DONE = b"read"

# The default scope leaves out float32, in which this job compares itself with another implementation.
_SCOPE = Scope(pairs=frozenset({("standard", "shuffled")}), dtypes=frozenset({"float32", "bfloat16", "float16"}))


def run(runner: LlamaRunner, job: Job, channel: Channel) -> None:
    """Take over one request and generate its text."""
    page_format = job.page_format("shuffled", runner.config)
    pool = shuffled_pool(page_format, runner.config.num_layers, 2 * job.total_pages)
    channel.send("status", text="building or loading kernels")
    warm_up(runner, pool)
    nowhere = torch.zeros(0, dtype=torch.int32)
    convert_kv_pages(pool.caches, nowhere, job.page_format("standard", runner.config), page_format)
    block_ids = scattered_blocks(job.total_pages, pool.num_blocks, _BLOCK_SEED)
    first_token = _receive(pool, block_ids[: job.prompt_pages], job, channel)
    channel.send("token", id=first_token)
    sequence = Sequence(pool, block_ids, length=len(job.prompt))
    start = time.perf_counter()
    count = 0
    for token in continue_greedily(runner, sequence, first_token, job.max_new_tokens - 1):
        count += 1
        channel.send("token", id=token)
    channel.send("decoded", seconds=time.perf_counter() - start, steps=count)


def _receive(pool: PagePool, block_ids: torch.Tensor, job: Job, channel: Channel) -> int:
    """Fetch the prompt's pages into these blocks in the pool's own format; the token the prefill chose."""
    agent = KVAgent("decode")
    planes = [plane for layer in pool.memory for plane in layer]
    agent.register(planes)
    with side_channel.connect(channel.receive()["port"]) as prefill:
        remote = PoolDescription.from_json(prefill.receive())
        plan = _agree(pool, remote, job, channel)
        peer = agent.add_peer(remote.agent)
        prefill.send({"accepted": remote.page_tag})
        request = prefill.receive()
        start = time.perf_counter()
        local_blocks = plane_descriptors(planes, block_ids.tolist())
        remote_halves = half_page_descriptors(remote, request["block_ids"])
        agent.read(local_blocks, peer, remote_halves, _READ_DONE)
        read = time.perf_counter()
        if plan is not None:
            convert_kv_pages(pool.caches, block_ids, plan.src, plan.dst)
        converted = time.perf_counter()
        channel.send(
            "received",
            block_ids=block_ids.tolist(),
            bytes=sum(size for _, size, _ in local_blocks),
            descriptors=len(local_blocks),
            transfer_seconds=read - start,
            convert_seconds=converted - read,
        )
    agent.close()
    return int(request["first_token"])


def _agree(pool: PagePool, remote: PoolDescription, job: Job, channel: Channel) -> ConversionPlan | None:
    """What to do with the remote pages; raises if they cannot be taken. None: nothing."""
    local: PageFormat = pool.page_format
    outcome = negotiate(local, remote.page_tag, convert=job.convert, scope=_SCOPE)
    if isinstance(outcome, Reject):
        if job.convert:
            raise TransferError(outcome.reason)
        # The misread that was asked for: what a connector does that knows nothing of page formats.
        channel.send("refused", reason=outcome.reason)
    if len(remote.region_addresses) != len(pool.memory) or remote.page_bytes != local.page_bytes:
        raise TransferError(
            f"the prefill has {len(remote.region_addresses)} layers with pages of {remote.page_bytes} bytes, "
            f"the decoder {len(pool.memory)} with {local.page_bytes}; both must run one model"
        )
    return outcome.plan if isinstance(outcome, Convert) else None
