# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions of vLLM's NIXL connector on a GPU: on the side stream and on the step's; needs no vLLM."""

from __future__ import annotations

import threading

import pytest
import torch

from flashinfer.core.errors import PoolLostError
from flashinfer.integrations.vllm.nixl.conversion import Conversions
from rocm_tests.vllm.received import CUTS, Received

pytestmark = pytest.mark.gpu

# A second or so: whatever is launched on another stream meanwhile runs first, on a machine with other work as well.
PAUSE_CYCLES = 2_000_000_000


@pytest.mark.parametrize("slots", [None, [5, 0, 2]], ids=["in place", "staged"])
@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("ratio", "pieces", "missing"), CUTS)
def test_pages_of_any_cut_are_converted_and_the_rest_cleared(
    in_step: bool, ratio: int, pieces: int, missing: int, slots: list[int] | None
) -> None:
    received = Received(ratio, pieces, missing, torch.device("cuda", 0))
    staging = None if slots is None else received.staged(slots)
    torch.cuda.synchronize()
    conversions = Conversions(received.caches, 1, in_step=in_step)
    # As vLLM's handshake does.
    prepare, arguments = conversions.prepare, [received.agreement]
    if staging is not None:
        prepare, arguments = conversions.prepare_staged, [received.agreement, staging]
    handshake = threading.Thread(target=prepare, args=arguments)
    handshake.start()
    handshake.join()
    ended = conversions.start(received.agreement, received.pages, slots)
    ended.wait()
    assert ended.done()
    assert ended.error() is None
    if in_step and slots is None:
        torch.cuda.synchronize()
    conversions.close()
    received.check()


@pytest.mark.parametrize("in_step", [False, True])
def test_a_busy_step_is_not_waited_for(in_step: bool) -> None:
    """Beside the step, a conversion ends while the step's stream is busy; in the step, it comes behind."""
    # The first of a process waits for what it loads and allocates.
    for pause in (1, PAUSE_CYCLES):
        received = Received(2, 1, 1, torch.device("cuda", 0))
        conversions = Conversions(received.caches, 1, in_step=in_step)
        conversions.prepare(received.agreement)
        torch.cuda.synchronize()
        torch.cuda._sleep(pause)
        free = torch.cuda.Event()
        free.record()
        ended = conversions.start(received.agreement, received.pages)
        ended.wait()
        assert ended.done(), "in the step, the launch is all that there is to wait for"
        assert pause == 1 or not free.query()
        torch.cuda.synchronize()
        conversions.close()
        received.check()


@pytest.mark.parametrize("in_step", [False, True])
def test_slots_are_kept_until_the_last_byte_is_read(in_step: bool) -> None:
    """A transfer into them is in no stream's order, so a conversion that is only launched is not done."""
    for pause in (1, PAUSE_CYCLES):
        received = Received(2, 1, 1, torch.device("cuda", 0))
        slots = [2, 0, 3]
        staging = received.staged(slots)
        conversions = Conversions(received.caches, 1, in_step=in_step)
        conversions.prepare_staged(received.agreement, staging)
        torch.cuda.synchronize()
        stream = conversions._side or torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(pause)
        ended = conversions.start(received.agreement, received.pages, slots)
        assert pause == 1 or not ended.done()
        ended.wait()
        assert ended.done()
        assert ended.error() is None
        staging.memory.fill_(0)
        torch.cuda.synchronize()
        conversions.close()
        received.check()


def test_slots_of_a_failed_start_are_kept_until_they_are_cleared() -> None:
    received = Received(2, 1, 1, torch.device("cuda", 0))
    staging = received.staged([2, 0, 3])
    conversions = Conversions(received.caches, 1, in_step=False)
    conversions.prepare_staged(received.agreement, staging)
    ((_, queue),) = conversions.from_staging.values()
    queue.close()
    torch.cuda.synchronize()
    with torch.cuda.stream(conversions._side):
        torch.cuda._sleep(PAUSE_CYCLES)
    ended = conversions.start(received.agreement, received.pages, [2, 0, 3])
    assert not ended.done()
    ended.wait()
    assert ended.done()
    assert isinstance(ended.error(), PoolLostError)
