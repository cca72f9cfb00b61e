# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Transfers between engines of a test, from start to end. Importing this needs vLLM."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

if TYPE_CHECKING:
    from rocm_tests.vllm.engines import Engine


@dataclasses.dataclass
class Outcome:
    """How a request ended, for each rank of the decoder."""

    received: list[bool]
    failed: list[bool]
    bad_blocks: list[set[int]]
    sent: int

    @property
    def arrived(self) -> bool:
        return all(self.received) and not any(self.failed) and not any(self.bad_blocks)

    @property
    def refused(self) -> bool:
        return all(self.received) and all(self.failed)


def until(condition: Any, timeout: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def announce(prefill: Engine, request: str) -> None:
    """The prefill has computed a request, and keeps its blocks for a reader."""
    metadata = NixlConnectorMetadata()
    metadata.reqs_in_batch = {request}
    metadata.reqs_to_send = {request: time.perf_counter() + 60}
    metadata.scheduler_clock = time.perf_counter()
    for connector in prefill.workers:
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)


def wanted(
    prefill: Engine, request: str, remote: Sequence[int], local: Sequence[int], held: int = 0
) -> NixlConnectorMetadata:
    """What the decoder's scheduler hands to its workers for a request of whose prefix it holds `held` blocks."""
    metadata = NixlConnectorMetadata()
    parameters = {
        "remote_block_ids": (list(remote),),
        "remote_engine_id": prefill.id,
        "remote_request_id": request,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
        "tp_size": prefill.setup.tp,
    }
    metadata.add_new_req_to_recv(request, (list(local),), parameters, (held,), awaiting_kvs=True)
    return metadata


def pull(
    prefill: Engine,
    decoder: Engine,
    request: str,
    remote: Sequence[int] = (1, 5, 2),
    local: Sequence[int] = (4, 0, 6),
    timeout: float = 20.0,
    held: int = 0,
) -> Outcome:
    """The decoder's ranks read the request's blocks, each from start to end, and the prefill sees that it was read."""
    announce(prefill, request)
    outcome = Outcome([], [], [], 0)
    for rank in range(decoder.setup.tp):
        results = [decoder.step(rank, wanted(prefill, request, remote, local, held))]

        def over(results: list[Any] = results, rank: int = rank) -> bool:
            if request not in results[-1].finished_recving:
                results.append(decoder.step(rank))
            return request in results[-1].finished_recving

        outcome.received.append(until(over, timeout))
        outcome.failed.append(request in results[-1].failed_recving)
        outcome.bad_blocks.append(set(decoder.workers[rank].get_block_ids_with_load_errors()))
    sent: set[int] = set()

    def all_sent() -> bool:
        for rank, connector in enumerate(prefill.workers):
            if request in connector.get_transfer_results(set()).finished_sending:
                sent.add(rank)
        return len(sent) == prefill.setup.tp

    until(all_sent, 0.0 if any(outcome.failed) else 2.0)
    outcome.sent = len(sent)
    return outcome


def push(
    prefill: Engine,
    decoder: Engine,
    request: str,
    remote: Sequence[int] = (1, 5, 2),
    local: Sequence[int] = (4, 0, 6),
    timeout: float = 20.0,
) -> Outcome:
    """The decoder registers with the prefill, which writes; blocks are named as in `pull`."""
    finished = NixlConnectorMetadata()
    finished.reqs_in_batch = {request}
    finished.reqs_to_send = {request: time.perf_counter() + 60}
    finished.scheduler_clock = time.perf_counter()
    finished.push_finished_blocks = {request: (list(remote),)}
    sent = {rank for rank in range(prefill.setup.tp) if request in prefill.step(rank, finished).finished_sending}
    registration = {
        "request_id": request,
        "local_block_ids": (list(local),),
        "decode_engine_id": decoder.id,
        "decode_host": "127.0.0.1",
        "decode_port": decoder.port,
        "decode_tp_size": decoder.setup.tp,
        "remote_engine_id": prefill.id,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
        "remote_tp_size": prefill.setup.tp,
        "remote_pp_size": 1,
    }
    ranks = range(decoder.setup.tp)
    last: dict[int, Any] = {}
    bad: dict[int, set[int]] = {rank: set() for rank in ranks}
    for rank in ranks:
        metadata = wanted(prefill, request, (), local)
        metadata.push_registrations = {request: registration}
        last[rank] = decoder.step(rank, metadata)

    def all_sent() -> bool:
        for rank in range(prefill.setup.tp):
            if request in prefill.step(rank).finished_sending:
                sent.add(rank)
        return len(sent) == prefill.setup.tp

    def over() -> bool:
        all_sent()
        for rank in ranks:
            if request not in last[rank].finished_recving:
                last[rank] = decoder.step(rank)
                bad[rank] |= set(decoder.workers[rank].get_block_ids_with_load_errors())
        return all(request in result.finished_recving for result in last.values())

    until(over, timeout)
    # A writer hears of the end of its write for itself, perhaps after the one that was written to.
    until(all_sent, 0.0 if any(request in result.failed_recving for result in last.values()) else 2.0)
    return Outcome(
        [request in last[rank].finished_recving for rank in ranks],
        [request in last[rank].failed_recving for rank in ranks],
        [bad[rank] for rank in ranks],
        len(sent),
    )
