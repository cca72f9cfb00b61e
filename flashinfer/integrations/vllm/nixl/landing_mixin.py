# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What our workers change of how vLLM describes pages in two halves: pages of another size, neighbouring halves."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping

from flashinfer.integrations.vllm.nixl import landing
from flashinfer.integrations.vllm.nixl.halves import Alternating, alternating_rows, page_by_page
from flashinfer.integrations.vllm.nixl.landing import Half, Rows
from flashinfer.integrations.vllm.nixl.local_pages import LocalPages

if TYPE_CHECKING:
    from collections.abc import Iterator


class LandingMixin(NixlBaseConnectorWorker, abc.ABC):
    """Behind `PageFormatMixin`, which says what the pages are."""

    _pages: LocalPages

    @property
    @abc.abstractmethod
    def _sends_halves(self) -> bool: ...

    def _halves(self, addresses: list[int]) -> list[Half]:
        return [
            Half(*region)
            for region in zip(
                addresses,
                self.block_len_per_layer,
                self.block_stride_per_layer,
                self.region_num_blocks,
                strict=True,
            )
        ]

    @property
    def _alternates(self) -> bool:
        """Whether the halves of a local page are neighbours, and listed as such."""
        return isinstance(self.dst_region_num_blocks.get(self.engine_id), Alternating)

    def _build_fa_local(self, base_addresses: list[int], block_size_ratio: int) -> Rows:
        if block_size_ratio == 1 or not self._pages.two_slots:
            rows: Rows = super()._build_fa_local(base_addresses, block_size_ratio)
            return alternating_rows(rows) if self._alternates else rows
        return landing.small_pages(self._halves(base_addresses), block_size_ratio, self.device_id)

    def _build_fa_remote(self, plan: TPMapping, nixl_agent_meta: NixlAgentMetadata, block_size_ratio: int) -> Rows:
        rows: Rows = super()._build_fa_remote(plan, nixl_agent_meta, block_size_ratio)
        return alternating_rows(rows) if isinstance(nixl_agent_meta.region_num_blocks, Alternating) else rows

    def _compute_desc_ids(
        self,
        block_ids: Any,
        dst_num_blocks: int,
        block_size_ratio: float | None,
        physical_blocks_per_logical: int,
        region_num_blocks: list[int] | None = None,
        region_group_ids: list[int] | None = None,
        uses_region_group_mapping: bool | None = None,
    ) -> npt.NDArray[np.int64]:
        ids: npt.NDArray[np.int64] = super()._compute_desc_ids(
            block_ids,
            dst_num_blocks,
            block_size_ratio,
            physical_blocks_per_logical,
            region_num_blocks,
            region_group_ids,
            uses_region_group_mapping,
        )
        if not self._alternates:
            return ids
        # Both lists of a transfer come through here and get the same order; the names are of each side by itself.
        alternating = isinstance(region_num_blocks, Alternating) and block_size_ratio in (None, 1)
        return page_by_page(ids, region_num_blocks or self.region_num_blocks, alternating=alternating)

    def get_mapped_blocks(self, block_ids: Any, block_size_ratio: int) -> Any:
        if not self._pages.two_slots:
            return super().get_mapped_blocks(block_ids, block_size_ratio)
        return landing.small_page_ids(block_ids, block_size_ratio, self.num_blocks)

    def _build_local_splits_from_plan(
        self, plan: TPMapping, src_blocks_data: Rows, num_fa_descs: int, block_size_ratio: int = 1
    ) -> Iterator[Rows]:
        pieces = len(plan.source_ranks_per_group[0])
        halves = self._halves(self.kv_caches_base_addr[self.engine_id][self.tp_rank])
        slots = [plan.rank_to_attention_slot[rank] for rank in plan.all_source_ranks]
        if self._sends_halves:
            # Heads of a whole page, where vLLM sees heads of each half.
            for slot in slots:
                yield landing.share_of_pages(halves, pieces, slot, self.device_id)
        elif self._pages.two_slots and block_size_ratio > 1:
            for slot in slots:
                yield landing.small_pages(halves, block_size_ratio, self.device_id, pieces=pieces, piece=slot)
        else:
            yield from super()._build_local_splits_from_plan(plan, src_blocks_data, num_fa_descs, block_size_ratio)

    def _validate_remote_agent_handshake(
        self, nixl_agent_meta: NixlAgentMetadata, remote_tp_size: int, remote_dcp_size: int = 1
    ) -> Any:
        ratio = self.block_size // nixl_agent_meta.block_size
        if self._pages.two_slots and ratio > 1:
            # vLLM refuses smaller pages of more ranks than here, for it cannot put them together. As far as lengths
            # go, several such pages are one as large as ours.
            nixl_agent_meta = dataclasses.replace(
                nixl_agent_meta,
                block_size=self.block_size,
                block_lens=[length * ratio for length in nixl_agent_meta.block_lens],
                block_strides=[stride * ratio for stride in nixl_agent_meta.block_strides],
            )
        return super()._validate_remote_agent_handshake(nixl_agent_meta, remote_tp_size, remote_dcp_size)

    def post_process_device_kv_on_receive(
        self, block_size_ratio: int, block_ids_list: list[tuple[int, list[int], int]], convert: bool = True
    ) -> None:
        # vLLM puts standard pages together here. Of two slots the conversion has done so, and cleared what is left.
        if block_size_ratio == 1 or not self._pages.two_slots:
            super().post_process_device_kv_on_receive(block_size_ratio, block_ids_list, convert)

    def _align_pages(self, meta: Any) -> None:
        """Pair smaller pages of a peer with local ones by their tokens, before they are read.

        vLLM pairs from the end. With a prefix that is here already, that is off by as many pages as the last local one
        is short of, for its rest is not known of there.
        """
        engine_id = meta.remote.engine_id
        if engine_id not in self._remote_agents or not any(meta.local_physical_block_ids):
            return
        info = self.transfer_topo.get_engine_info(engine_id)
        ratio = self.transfer_topo.block_size_ratio(info.remote_block_size)
        # A scheduler's block of the peer that is several pages may hold both what is here already and what is not.
        if ratio == 1 or info.remote_physical_blocks_per_logical > 1:
            return
        held = meta.local_num_computed_blocks or [0] * len(meta.remote.block_ids)
        pages = self._physical_blocks_per_logical_kv_block
        meta.remote.block_ids = tuple(
            list(remote[first * pages * ratio : (first * pages + len(local)) * ratio])
            for remote, local, first in zip(meta.remote.block_ids, meta.local_physical_block_ids, held, strict=True)
        )
        # A request is read again after a handshake, and must not be moved twice.
        meta.local_num_computed_blocks = ()
