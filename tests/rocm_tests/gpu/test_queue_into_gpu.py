# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`ConversionQueue` that reads another pool, on a GPU."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from rocm_tests.kv.test_queue_into import Pools

pytestmark = pytest.mark.gpu

PAUSE_CYCLES = 500_000_000


def test_each_request_converts_its_pages_and_the_host_does_not_wait() -> None:
    pools = Pools("cuda")
    queue = pools.queue()
    torch.cuda.synchronize()
    torch.cuda._sleep(PAUSE_CYCLES)
    free = torch.cuda.Event()
    free.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        handles = [queue.submit([3, 1], source_ids=[8, 0]), queue.submit([5, 0], source_ids=[7, 7])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for handle in handles:
        assert handle.wait(30)
        assert handle.exception(0) is None
    assert not free.query(), "a conversion waited for the main stream"
    queue.close()
    torch.cuda.synchronize()
    pools.check([(8, 3), (0, 1), (7, 5), (7, 0)])


def test_ids_on_the_device_are_refused() -> None:
    pools = Pools("cuda")
    with pools.queue() as queue, pytest.raises(flashinfer.InvalidArgumentError, match="source_ids must be on the host"):
        queue.submit(torch.tensor([3], device="cuda"), source_ids=torch.tensor([3], device="cuda"))
