# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Descriptors of the hand-off's read, and its processes when one of them fails."""

from __future__ import annotations

import ctypes
import json
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashinfer.cli.handoff_job.pages import PagePool, scattered_blocks, shuffled_pool, standard_pool
from flashinfer.cli.handoff_job.processes import ChildError, Children
from flashinfer.cli.handoff_job.transfer import (
    Descriptor,
    PoolDescription,
    half_page_descriptors,
    plane_descriptors,
)
from flashinfer.kv import PageFormat, convert_kv_pages

LAYERS, KV_HEADS, PAGE_SIZE, HEAD_DIM = 2, 3, 8, 16
STANDARD = PageFormat("standard", torch.float32, KV_HEADS, PAGE_SIZE, HEAD_DIM)
SHUFFLED = PageFormat("shuffled", torch.float32, KV_HEADS, PAGE_SIZE, HEAD_DIM)


def described(pool: PagePool) -> PoolDescription:
    return PoolDescription(
        agent=b"\x00\xff",
        page_tag=pool.page_format.tag,
        page_bytes=pool.page_format.page_bytes,
        num_blocks=pool.num_blocks,
        region_addresses=tuple(layer[0].data_ptr() for layer in pool.memory),
    )


def copy(local: list[Descriptor], remote: list[Descriptor]) -> None:
    """What a READ does, within one process."""
    for (to, size, _), (source, remote_size, _) in zip(local, remote, strict=True):
        assert size == remote_size
        ctypes.memmove(to, source, size)


def test_a_read_puts_each_page_behind_the_planes_and_conversion_makes_it_keys_and_values() -> None:
    source, target = standard_pool(STANDARD, LAYERS, 5), shuffled_pool(SHUFFLED, LAYERS, 7)
    for layer in source.memory:
        layer[0].normal_()
    remote_ids, local_ids = [4, 0, 3], torch.tensor([2, 6, 1], dtype=torch.int32)
    planes = [plane for layer in target.memory for plane in layer]
    copy(plane_descriptors(planes, local_ids.tolist()), half_page_descriptors(described(source), remote_ids))
    for (pages,), (k_plane, v_plane) in zip(source.memory, target.memory, strict=True):
        for remote_id, local_id in zip(remote_ids, local_ids.tolist(), strict=True):
            arrived = torch.cat((k_plane[local_id].flatten(), v_plane[local_id].flatten()))
            assert torch.equal(arrived, pages[remote_id].flatten())
    convert_kv_pages(target.caches, local_ids, STANDARD, SHUFFLED)
    x = SHUFFLED.x
    for (pages,), (k_plane, v_plane) in zip(source.memory, target.memory, strict=True):
        for remote_id, local_id in zip(remote_ids, local_ids.tolist(), strict=True):
            for h, n, d in ((0, 0, 0), (1, 5, 7), (2, 7, 15), (0, 3, 14)):
                assert k_plane[local_id, h, d // x, n, d % x] == pages[remote_id, h, n, d]
                assert v_plane[local_id, h, n // x, d, n % x] == pages[remote_id, h, n, HEAD_DIM + d]
        untouched = [block for block in range(7) if block not in local_ids.tolist()]
        assert not k_plane[untouched].any()
        assert not v_plane[untouched].any()


@pytest.mark.parametrize("block", [-1, 5])
def test_a_remote_block_outside_the_pool_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=f"must be in 0..4, got {block}"):
        half_page_descriptors(described(standard_pool(STANDARD, LAYERS, 5)), [0, block])


def test_a_pool_description_survives_json() -> None:
    description = described(standard_pool(STANDARD, LAYERS, 5))
    assert PoolDescription.from_json(json.loads(json.dumps(description.to_json()))) == description


def test_scattered_blocks_are_distinct_and_in_no_order() -> None:
    blocks = scattered_blocks(6, 12, seed=1).tolist()
    assert len(set(blocks)) == 6
    assert all(0 <= block < 12 for block in blocks)
    assert blocks != sorted(blocks)
    assert blocks != scattered_blocks(6, 12, seed=2).tolist()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """Makes a child command of a few lines of Python."""

    def write(body: str) -> list[str]:
        path = tmp_path / "child.py"
        path.write_text("import json, sys, time\n" + textwrap.dedent(body), encoding="utf-8")
        return [str(path)]

    return write


def test_a_failing_child_is_reported_with_its_traceback_and_takes_the_others_along(
    program: Callable[[str], list[str]],
) -> None:
    command = program(
        """
        if sys.argv[1] == "bad":
            raise ZeroDivisionError("the reason")
        time.sleep(600)
        """,
    )
    with Children(lambda name, text: None, command) as children:
        children.start("patient", "good", Path("model"), "float32")
        children.start("failing", "bad", Path("model"), "float32")
        patient = children._children["patient"].process
        with pytest.raises(
            ChildError, match=r"(?s)the failing process ended with status 1.*ZeroDivisionError: the reason"
        ):
            children.receive("patient")
    assert patient.returncode == -signal.SIGKILL


def test_events_arrive_in_order_and_status_lines_apart(
    program: Callable[[str], list[str]],
) -> None:
    command = program(
        """
        def send(**event):
            print(json.dumps(event), flush=True)
        send(event="status", text="busy")
        send(event="token", id=json.loads(sys.stdin.readline())["start"])
        send(event="done")
        """,
    )
    seen: list[tuple[str, str]] = []
    with Children(lambda name, text: seen.append((name, text)), command) as children:
        children.start("only", "any", Path("model"), "float32")
        children.send("only", {"start": 5})
        assert children.expect("only", "token")["id"] == 5
        children.expect("only", "done")
    assert seen == [("only", "busy")]
