# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Reads through staging memory: what our workers change of a read for it, and when slots are free again."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.integrations.vllm.nixl.agreement import Agreement
from flashinfer.integrations.vllm.nixl.halves import abut
from flashinfer.integrations.vllm.nixl.landing_mixin import LandingMixin
from flashinfer.integrations.vllm.nixl.staging import KNOB, Read, Staging, whole_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

    from flashinfer.integrations.vllm.nixl.conversion import Conversions

logger = logging.getLogger("vllm.flashinfer.nixl")


class _Through(NamedTuple):
    """How a peer's pages are read through staging: handles of its ranks' whole pages, and how many it has."""

    agreement: Agreement
    ranks: dict[int, Any]
    blocks: int


class StagingMixin(LandingMixin):
    """Between `PageFormatMixin` and `LandingMixin`."""

    _agreements: dict[str, Agreement]
    _converter: Conversions | None

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._staging: Staging | None = None
        # What is being read for the converter; where there is none, what arrives is what is wanted.
        self._reads: dict[str, Read] = {}
        self._through: dict[str, _Through] = {}
        # Of the read that is being listed now; vLLM then counts whole pages of a layer where it counts halves else.
        self._reading: _Through | None = None
        self._told_of_full_staging = False

    # Before any peer.

    def _stages(self, wanted: int) -> bool:
        """Whether memory for staging would be used: this engine reads, and its pages lie in two places each."""
        if not wanted or not self._pages.two_slots or self.kv_transfer_config.kv_role == "kv_producer":
            return False
        addresses = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        one_format = len(set(self._pages.formats.values())) == 1 and not self._uses_region_group_mapping
        return self._TRANSFER_MODE == "pull" and one_format and not abut(addresses, self.block_stride_per_layer)

    def _prepare_staging(self, cache: torch.Tensor, wanted: int) -> None:
        layers, page = len(self._pages.formats), next(iter(self._pages.formats.values()))
        slots = min(wanted // (layers * page.page_bytes), self.num_blocks)
        if not slots:
            raise InvalidArgumentError(
                f'kv_connector_extra_config: "{KNOB}" must hold a page of all layers, {layers * page.page_bytes} '
                f"bytes, got {wanted >> 20} MiB; set 0 for none"
            )
        try:
            self._staging = Staging(cache, layers, page.page_bytes, slots)
        except RuntimeError as error:
            raise InvalidArgumentError(
                f'kv_connector_extra_config: "{KNOB}" must fit into the memory beside the KV cache, got '
                f"{slots * layers * page.page_bytes >> 20} MiB; set less, or 0 for none"
            ) from error
        memory = self._staging.memory
        descs = self.nixl_wrapper.get_reg_descs(
            [(memory.data_ptr(), memory.nbytes, self.device_id, "")], self.region_mem_types[0]
        )
        self.nixl_wrapper.register_memory(descs, backends=self.nixl_backends)
        # vLLM deregisters what is in this list, at shutdown and for as long as an engine sleeps.
        self._registered_descs.append(descs)

    # On vLLM's handshake thread.

    def add_remote_agent(
        self,
        nixl_agent_meta: NixlAgentMetadata,
        remote_tp_rank: int = 0,
        remote_tp_size: int = 1,
        remote_dcp_size: int = 1,
    ) -> Any:
        agent = super().add_remote_agent(nixl_agent_meta, remote_tp_rank, remote_tp_size, remote_dcp_size)
        if self._staging is not None and self._converter is not None:
            self._list_whole_pages(agent, nixl_agent_meta, remote_tp_rank, self._staging, self._converter)
        return agent

    def _list_whole_pages(
        self, agent: str, remote: NixlAgentMetadata, rank: int, staging: Staging, converter: Conversions
    ) -> None:
        plan = self.tp_mappings[remote.engine_id]
        ratio = self.transfer_topo.block_size_ratio(remote.block_size)
        rows = whole_pages(self._build_fa_remote(plan, remote, ratio))
        if rows is None:
            # Its halves lie apart: nothing would be joined.
            return
        pieces = len(plan.source_ranks_per_group[0])
        agreement = self._agreements[remote.engine_id]
        if agreement.src is None:
            page = next(iter(self._pages.formats.values()))
            part = dataclasses.replace(page, num_kv_heads=page.num_kv_heads // pieces)
            agreement = Agreement(part, part, pieces)
        key = ("staging", ratio, pieces)
        if key not in self.src_xfer_handles_by_tp_ratio:
            # Beside vLLM's own handles of parts of pages, and released with them.
            with contextlib.ExitStack() as undo:
                handles = []
                for piece in range(pieces):
                    rows_here = staging.rows(ratio, pieces, piece, self.device_id)
                    handles.append(
                        self.nixl_wrapper.prep_xfer_dlist(
                            "NIXL_INIT_AGENT", rows_here, mem_type=self.region_mem_types[0]
                        )
                    )
                    undo.callback(self.nixl_wrapper.release_dlist_handle, handles[-1])
                undo.pop_all()
            self.src_xfer_handles_by_tp_ratio[key] = handles
        converter.prepare_staged(agreement, staging)
        handle = self.nixl_wrapper.prep_xfer_dlist(agent, rows, mem_type=self.dst_region_mem_types[remote.engine_id][0])
        through = self._through.setdefault(remote.engine_id, _Through(agreement, {}, int(rows[0, 4])))
        through.ranks[rank] = handle

    def _forget_whole_pages(self, engine_id: str) -> None:
        through = self._through.pop(engine_id, None)
        for handle in through.ranks.values() if through else ():
            self.nixl_wrapper.release_dlist_handle(handle)

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._forget_whole_pages(engine_id)
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    # A read.

    @contextlib.contextmanager
    def _through_staging(self, req_id: str, engine_id: str, read_spec: Any) -> Iterator[dict[str, Any]]:
        """What of a call of `_read_blocks` is replaced: nothing if the request is read straight into its pages."""
        # A notification alone is no read.
        if self._converter is not None and any(map(len, read_spec.local_block_ids)):
            self._reads.setdefault(req_id, Read(self._agreements[engine_id]))
        through = self._through.get(engine_id)
        slots = through and self._stage(req_id, through, read_spec, self.tp_mappings[engine_id].all_source_ranks)
        if through is None or slots is None:
            yield {}
            return
        agreement, rank = through.agreement, read_spec.remote_rank
        slot = self.tp_mappings[engine_id].rank_to_attention_slot[rank] if agreement.pieces > 1 else 0
        self._reading = through
        try:
            yield {
                "read_spec": dataclasses.replace(read_spec, local_block_ids=[list(slots)]),
                "local_xfer_side_handle": self.src_xfer_handles_by_tp_ratio[
                    ("staging", agreement.ratio, agreement.pieces)
                ][slot],
                "remote_xfer_side_handle": through.ranks[rank],
            }
        finally:
            self._reading = None

    def _stage(self, req_id: str, through: _Through, read_spec: Any, ranks: Any) -> list[int] | None:
        """The request's slots. What the first rank of a peer gets, all get: a page's pieces are put together there."""
        pages = sum(map(len, read_spec.local_block_ids))
        if (
            self._staging is None
            or not pages
            or read_spec.block_ids_by_region
            or not through.ranks.keys() >= set(ranks)
        ):
            return None
        if read_spec.remote_rank != ranks[0]:
            return self._reads[req_id].slots
        slots = self._staging.slots.take(pages)
        if slots is None:
            self.xfer_stats.record_not_staged(pages)
            self._tell_of_full_staging(pages, self._staging)
            return None
        self.xfer_stats.record_staged(pages)
        self._reads[req_id] = Read(through.agreement, slots)
        return slots

    def _tell_of_full_staging(self, pages: int, staging: Staging) -> None:
        if self._told_of_full_staging:
            return
        self._told_of_full_staging = True
        logger.warning(
            "A request of %d pages found %d of %d slots of the staging memory free, and is read straight into its "
            'planes, in more pieces. Set "%s" to more MiB. Said once; flashinfer:kv_pages_not_staged counts on.',
            pages,
            staging.slots.free,
            staging.slots.count,
            KNOB,
        )

    def get_mapped_blocks(self, block_ids: Any, block_size_ratio: int) -> Any:
        if self._reading is None or self._staging is None:
            return super().get_mapped_blocks(block_ids, block_size_ratio)
        return self._staging.small_ids(block_ids, block_size_ratio, self._reading.agreement.pieces)

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
        if self._reading is not None and self._staging is not None:
            layers = len(self._pages.formats)
            # vLLM names a ratio with its own side's descriptors, which are the staging's here.
            own = block_size_ratio is not None
            count = self._staging.memory.shape[1] * self._reading.agreement.ratio if own else self._reading.blocks
            region_num_blocks, region_group_ids = [count] * layers, [0] * layers
            block_size_ratio, uses_region_group_mapping = None, False
        ids: npt.NDArray[np.int64] = super()._compute_desc_ids(
            block_ids,
            dst_num_blocks,
            block_size_ratio,
            physical_blocks_per_logical,
            region_num_blocks,
            region_group_ids,
            uses_region_group_mapping,
        )
        return ids

    def _end_reads(self) -> None:
        """Of requests that NIXL moves nothing for any more and nobody converts: neither is left among the transfers."""
        for req_id in self._reads.keys() - self._recving_transfers.keys():
            slots = self._reads.pop(req_id).slots
            if slots is not None and self._staging is not None:
                self._staging.slots.give_back(slots)
