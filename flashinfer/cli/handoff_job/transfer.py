# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Moving pages between processes with NIXL: what a pool publishes, and the descriptors of a read.

The reader has two planes per layer where the publisher has one page, so each remote page is presented as two
virtual half-page regions, at offsets 0 and `page_bytes / 2`. After the read, the K plane's block followed
by the V plane's block holds the bytes of the remote page; whether its halves *are* K and V depends on its format.
"""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from flashinfer.core.errors import FlashInferError, InvalidArgumentError

Descriptor = tuple[int, int, int]
"""Address, bytes and device of one contiguous run, as NIXL takes them."""

READ_TIMEOUT_S = 60.0


class TransferError(FlashInferError, RuntimeError):
    """NIXL gave up, or the peer did not answer in time."""


@dataclasses.dataclass(frozen=True)
class PoolDescription:
    """What a process tells its peers about a pool of one-plane pages.

    Parameters
    ----------
    agent
        NIXL's metadata of the process.
    page_tag
        `PageFormat.tag` of every region.
    page_bytes
        Bytes of one page, which is also the distance between two.
    num_blocks
        Pages of each region.
    region_addresses
        Where each layer's region begins in that process.
    """

    agent: bytes
    page_tag: str
    page_bytes: int
    num_blocks: int
    region_addresses: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        """JSON-ready form."""
        return {**dataclasses.asdict(self), "agent": base64.b64encode(self.agent).decode("ascii")}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> PoolDescription:
        """The inverse of `to_json`."""
        return PoolDescription(
            agent=base64.b64decode(fields["agent"]),
            page_tag=str(fields["page_tag"]),
            page_bytes=int(fields["page_bytes"]),
            num_blocks=int(fields["num_blocks"]),
            region_addresses=tuple(int(address) for address in fields["region_addresses"]),
        )


def plane_descriptors(planes: Sequence[torch.Tensor], block_ids: Sequence[int]) -> list[Descriptor]:
    """The listed blocks of each plane, plane after plane."""
    return [
        (plane.data_ptr() + block * plane.stride(0) * plane.element_size(), plane[0].nbytes, 0)
        for plane in planes
        for block in block_ids
    ]


def half_page_descriptors(remote: PoolDescription, block_ids: Sequence[int]) -> list[Descriptor]:
    """The listed remote blocks as two virtual regions a layer, in the order of K plane and V plane."""
    outside = [block for block in block_ids if not 0 <= block < remote.num_blocks]
    if outside:
        raise InvalidArgumentError(
            f"half_page_descriptors: block_ids must be in 0..{remote.num_blocks - 1}, got {outside[0]}"
        )
    half = remote.page_bytes // 2
    return [
        (base + offset + block * remote.page_bytes, half, 0)
        for base in remote.region_addresses
        for offset in (0, half)
        for block in block_ids
    ]


class KVAgent:
    """A NIXL agent over UCX whose registered memory is CPU tensors."""

    def __init__(self, name: str) -> None:
        import nixl

        # The progress thread would spin on a core that the other process computes on; whoever waits polls instead.
        self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        if "UCX" not in self._agent.backends:
            raise TransferError("NIXL has no UCX backend; install nixl and nixl-cu12 of one version")
        self._registered: list[Any] = []
        self._peers: list[str] = []

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let peers, and this agent's own reads, reach these tensors."""
        regions = [(tensor.data_ptr(), tensor.nbytes, 0, "") for tensor in tensors]
        self._registered.append(self._agent.register_memory(regions, "DRAM"))

    def metadata(self) -> bytes:
        """What a peer needs to reach the registered memory."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name."""
        name = self._agent.add_remote_agent(metadata)
        peer = name.decode() if isinstance(name, bytes) else str(name)
        self._peers.append(peer)
        return peer

    def read(self, local: list[Descriptor], peer: str, remote: list[Descriptor], notification: bytes) -> None:
        """Copy `remote[i]` to `local[i]`; returns when all bytes have arrived, and then the peer is notified."""
        if [size for _, size, _ in local] != [size for _, size, _ in remote]:
            raise InvalidArgumentError(
                "KVAgent.read: local and remote must be descriptors of equal sizes, pair by pair"
            )
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, "DRAM"),
            self._agent.get_xfer_descs(remote, "DRAM"),
            peer,
            notification,
        )
        deadline = time.monotonic() + READ_TIMEOUT_S
        state = self._agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TransferError(f"NIXL READ from {peer} was not done after {READ_TIMEOUT_S:.0f} s")
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"NIXL READ from {peer} ended in state {state}")
        self._agent.release_xfer_handle(handle)

    def notifications(self) -> list[bytes]:
        """What peers have sent since the last call; also lets their transfers make progress."""
        return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        """Forget peers and memory; the tensors may then be freed."""
        for peer in self._peers:
            self._agent.remove_remote_agent(peer)
        for regions in self._registered:
            self._agent.deregister_memory(regions)
        self._peers, self._registered = [], []
