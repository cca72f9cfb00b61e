# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What our pull and push workers add to vLLM's: page formats, half-page regions, conversion.

The idea that keeps this small: a two-slot page is registered as two half-page regions a layer, and a standard page of a
peer is presented as two half pages before vLLM builds anything for the peer. vLLM's descriptors, reads and writes then
do the right thing unchanged, for unlike tensor parallelism too.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm
import zmq
from vllm.distributed.kv_transfer.kv_connector.utils import (
    EngineTransferInfo,
    TransferTopology,
    get_current_attn_backends,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
    RemoteMeta,
    ReqMeta,
    compute_nixl_compatibility_hash,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec, TPMapping, compute_head_offset
from vllm.platforms import current_platform
from vllm.utils.network_utils import make_zmq_path, make_zmq_socket
from vllm.v1.kv_cache_interface import FullAttentionSpec

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.integrations.vllm.nixl import conversion, internals, landing, local_pages, metadata, staging
from flashinfer.integrations.vllm.nixl.agreement import (
    WHOLE_PAGES,
    Agreement,
    Group,
    PageFormatError,
    Peer,
    agree_to_receive,
    agree_to_send,
)
from flashinfer.integrations.vllm.nixl.conversion import Conversion, Conversions
from flashinfer.integrations.vllm.nixl.halves import Alternating, abut
from flashinfer.integrations.vllm.nixl.landing import regions_in_halves
from flashinfer.integrations.vllm.nixl.local_pages import LocalPages
from flashinfer.integrations.vllm.nixl.metadata import PageAgentMetadata
from flashinfer.integrations.vllm.nixl.staging_mixin import StagingMixin
from flashinfer.integrations.vllm.nixl.stats import PageStats
from flashinfer.kv import PageFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Below vLLM's root, so that --log-level and VLLM_LOGGING_CONFIG hold for it.
logger = logging.getLogger("vllm.flashinfer.nixl")

# Whose fields are read or replaced, here or in the mixins behind.
RECORDS = (
    NixlAgentMetadata,
    NixlHandshakePayload,
    TransferTopology,
    EngineTransferInfo,
    TPMapping,
    ReadSpec,
    ReqMeta,
    RemoteMeta,
)

# As long as vLLM waits for the same answer.
_HANDSHAKE_TIMEOUT_MS = 5000


class PageFormatMixin(StagingMixin):
    """In front of `NixlPullConnectorWorker` or `NixlPushConnectorWorker`."""

    compat_hash: str | None
    # The class behind this one, and what of its methods is overridden or called.
    _STOCK: type = NixlBaseConnectorWorker
    _LEANED_ON: Mapping[str, tuple[str, ...]] = internals.METHODS

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        internals.check_release(vllm.__version__, self._STOCK, TransferTopology, RECORDS, self._LEANED_ON)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        self._convert = conversion.knob(extra(conversion.KNOB, False))
        self._staging_bytes = staging.knob(extra(staging.KNOB, None), convert=bool(self._convert))
        if self._TRANSFER_MODE == "push" and extra(staging.KNOB, None):
            raise InvalidArgumentError(
                f'kv_connector_extra_config: "{staging.KNOB}" must be unset in push mode, where a prefill writes into '
                "the pages themselves; remove it, or use pull mode"
            )
        super().__init__(vllm_config, engine_id, kv_cache_config)
        internals.check_state(self)
        self.xfer_stats = PageStats()
        self._pages = self._local_pages(extra(local_pages.KNOB, None))
        # Formats of the regions, once they are final.
        self._region_pages: list[PageFormat] = []
        # Of each peer what was agreed, and while a handshake is running what its ranks said of their pages.
        self._agreements: dict[str, Agreement] = {}
        self._said: dict[bytes, PageAgentMetadata] = {}
        self._converter: Conversions | None = None
        self._conversions: dict[str, Conversion] = {}
        # Why the latest peer was refused. vLLM has no way to hand this to a request: it is in the log, by request.
        self.last_refusal = ""

    # What this engine has.

    def _local_pages(self, stated: str | None) -> LocalPages:
        reason = self._why_not_model()
        if reason is not None:
            raise InvalidArgumentError(f"flashinfer's NIXL connector: {reason}; use vLLM's own connector")
        formats, scales = {}, {}
        for name, spec in self._layer_specs.items():
            (backend,) = get_current_attn_backends(self.vllm_config, [name])[:1]
            formats[name] = local_pages.format_of(
                local_pages.kind_of(backend, spec, stated),
                spec,
                self.block_size,
                spec.page_size_bytes // self._physical_blocks_per_logical_kv_block,
                current_platform.fp8_dtype(),
                str(self.vllm_config.cache_config.cache_dtype),
            )
            if formats[name].scale_mode is not None:
                layer = self.vllm_config.compilation_config.static_forward_context.get(name)
                scales[name] = local_pages.scales_of(layer, name)
        return LocalPages(formats, self.backend_name, scales)

    def _why_not_model(self) -> str | None:
        unlike = [name for name, spec in self._layer_specs.items() if type(spec) is not FullAttentionSpec]
        for is_so, what in (
            (self.use_mla, "MLA pages hold no K and V"),
            (self._has_mamba or self._is_hma_required or unlike, f"only full attention is supported, not {unlike[:1]}"),
            (self._has_packed_cache, f"layout {self.kv_cache_layout} keeps the pages of all layers together"),
            (self.kv_cache_layout not in (WHOLE_PAGES, "LHBNC"), f"layout {self.kv_cache_layout} splits heads up"),
            (max(self.pp_size, self.dcp_size, self.pcp_size) > 1, "only tensor parallelism is supported"),
        ):
            if is_so:
                return what
        return None

    @property
    def _sends_halves(self) -> bool:
        """Whether standard pages are registered as halves: a writer cannot cut a page for one peer only."""
        producer = self.kv_transfer_config.kv_role == "kv_producer"
        return bool(self._convert) and self._TRANSFER_MODE == "push" and producer and not self._pages.two_slots

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._publish()
        if self._pages.two_slots and (self._convert or self._stages(self._staging_bytes)):
            self._prepare_conversion(kv_caches)

    def restore_kv_caches(self) -> None:
        super().restore_kv_caches()
        self._publish()

    def register_local_xfer_handler(self, block_size: int) -> Any:
        # First called when the lists of regions are final and nothing has been made of them or published.
        if not self._region_pages:
            self._finish_regions()
        return super().register_local_xfer_handler(block_size)

    def _finish_regions(self) -> None:
        addresses = self.kv_caches_base_addr[self.engine_id][self.tp_rank]
        internals.check_regions(self, addresses)
        in_halves = self._pages.two_slots or self._sends_halves
        if in_halves:
            if self.use_host_buffer:
                raise InvalidArgumentError(
                    "flashinfer's NIXL connector: half pages need kv_buffer_device on the device"
                )
            self._split_regions(addresses)
            # Of half pages either layout is the same; that of whole pages is what vLLM's checks know to split by head.
            self.kv_cache_layout = WHOLE_PAGES
            internals.check_halves(self.region_names, self.region_num_blocks)
        self._region_pages = [self._pages.formats[name] for name in self.region_names]

    def _split_regions(self, addresses: list[int]) -> None:
        parts: list[tuple[int, int]] = []
        for index, name in enumerate(self.region_names):
            page, length = self._pages.formats[name], self.block_len_per_layer[index]
            if length == page.page_bytes:
                parts += [(index, 0), (index, page.half_bytes)]
            elif length == page.half_bytes and self.region_names.count(name) == 2 and page.head_slots == 2:
                parts.append((index, 0))
            else:
                raise InvalidArgumentError(
                    f"flashinfer's NIXL connector: regions of {name} must be pages or half pages of {page.tag}, got "
                    f"{length} bytes; set VLLM_KV_CACHE_LAYOUT={WHOLE_PAGES}"
                )
        addresses[:] = [addresses[index] + start for index, start in parts]
        for name in internals.REGION_LISTS:
            whole = getattr(self, name)
            whole[:] = [whole[index] for index, _ in parts]
        self.block_len_per_layer[:] = [self._pages.formats[name].half_bytes for name in self.region_names]
        self.num_regions = len(parts)
        self.num_descs = sum(self.region_num_blocks)
        self.dst_region_num_blocks[self.engine_id] = self.region_num_blocks
        # Shares of whole pages, which a writer of halves cuts for more ranks than its own, cannot be listed like this.
        joinable = self._pages.two_slots and not self._uses_region_group_mapping
        if joinable and abut(addresses, self.block_stride_per_layer):
            self.dst_region_num_blocks[self.engine_id] = Alternating(self.region_num_blocks)
        self.dst_region_group_ids[self.engine_id] = self.region_group_ids
        self.dst_region_mem_types[self.engine_id] = self.region_mem_types

    def _publish(self) -> None:
        payload = self.xfer_handshake_metadata
        stock = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
        payload.agent_metadata_bytes = metadata.encode(
            metadata.tagged(stock, self.region_names, self._region_pages, self._pages.scales)
        )

    # What a peer has. All of this runs on vLLM's one handshake thread.

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        remote_dcp_size: int = 1,
        remote_pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Any:
        # vLLM reads the hash on this thread only.
        own_hash = self.compat_hash
        self._agreements.pop(expected_engine_id, None)
        # What an earlier handshake left that failed at a later rank.
        self._forget_whole_pages(expected_engine_id)
        # vLLM decodes the answer into its own class, which loses our fields: asked once more, for those alone.
        ranks = self.transfer_topo.handshake_target_ranks(remote_tp_size, remote_dcp_size)
        keys = list(itertools.product(range(remote_pp_size), ranks))
        try:
            for payload in self._ask(host, port, keys):
                self._listen_to(payload)
            return super()._nixl_handshake(
                host, port, remote_tp_size, expected_engine_id, remote_dcp_size, remote_pp_size, notif_agents_only
            )
        finally:
            self.compat_hash = own_hash
            self._said.clear()

    def _ask(self, host: str, port: int, keys: list[tuple[int, int]]) -> Iterator[NixlHandshakePayload]:
        decoder = msgspec.msgpack.Decoder(NixlHandshakePayload)
        # The process's own context: to make one, as vLLM does, takes longer than the question.
        path = make_zmq_path("tcp", host, port)
        with make_zmq_socket(zmq.Context.instance(), path, zmq.REQ, bind=False, linger=0) as socket:
            socket.setsockopt(zmq.RCVTIMEO, _HANDSHAKE_TIMEOUT_MS)
            for pp_rank, tp_rank in keys:
                socket.send(msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank)))
                answer = socket.recv_multipart()[0]
                try:
                    yield decoder.decode(answer)
                except msgspec.DecodeError:
                    # vLLM asks next, and has the words for it.
                    return

    def _listen_to(self, payload: NixlHandshakePayload) -> None:
        try:
            said = metadata.decode(payload.agent_metadata_bytes)
        except msgspec.DecodeError:
            # Of another release, which vLLM's own check of the hash reports.
            return
        self._said[said.agent_metadata] = said
        if payload.compatibility_hash == self.compat_hash or not said.page_format_version:
            return
        # The name of the backend stands for its page format in the hash. Where both sides state the format it is
        # compared itself, and only all the rest of what goes into the hash must be equal.
        theirs = compute_nixl_compatibility_hash(
            self.vllm_config, said.attn_backend_name, transfer_mode=self._TRANSFER_MODE
        )
        if payload.compatibility_hash == theirs:
            self.compat_hash = theirs

    def add_remote_agent(
        self,
        nixl_agent_meta: NixlAgentMetadata,
        remote_tp_rank: int = 0,
        remote_tp_size: int = 1,
        remote_dcp_size: int = 1,
    ) -> Any:
        said = self._agree(nixl_agent_meta, remote_tp_size)
        if said.region_names is not None:
            nixl_agent_meta.region_names = metadata.plain_names(said)
        agreement = self._agreements[said.engine_id]
        if agreement.src is not None and len(said.block_lens) < len(self.region_names):
            self._present_halves(nixl_agent_meta, remote_tp_size)
        if self._alternates and abut(nixl_agent_meta.kv_caches_base_addr, nixl_agent_meta.block_strides):
            nixl_agent_meta.region_num_blocks = Alternating(nixl_agent_meta.region_num_blocks)
        return super().add_remote_agent(nixl_agent_meta, remote_tp_rank, remote_tp_size, remote_dcp_size)

    def _add_notif_only_remote_agent(
        self, metadata: NixlAgentMetadata, remote_tp_size: int, remote_dcp_size: int = 1
    ) -> Any:
        # A decoder that is pushed to: only here can it refuse at once, instead of waiting for a push that never comes.
        self._agree(metadata, remote_tp_size)
        return super()._add_notif_only_remote_agent(metadata, remote_tp_size, remote_dcp_size)

    def _agree(self, stock: NixlAgentMetadata, remote_tp_size: int) -> PageAgentMetadata:
        """Decide about a peer, before anything is built for it."""
        said = self._said.get(stock.agent_metadata)
        if said is None:
            raise PageFormatError("restarted", f"Peer {stock.engine_id} changed during the handshake; it is retried")
        peer = Peer(
            backend=said.attn_backend_name,
            tp_size=remote_tp_size,
            block_size=said.block_size,
            layout=said.kv_cache_layout,
            version=said.page_format_version,
            names=metadata.plain_names(said) if len(said.page_formats) == len(said.region_names or ()) else (),
            tags=said.page_formats,
            block_lens=said.block_lens,
            scales=said.page_scales,
            kernel_pages=said.physical_blocks_per_logical_kv_block,
        )
        group = Group(self.transfer_tp_size, self.transfer_topo.total_num_kv_heads, self._TRANSFER_MODE == "pull")
        sends = self._TRANSFER_MODE == "push" and self.kv_transfer_config.kv_role == "kv_producer"
        agree = agree_to_send if sends else agree_to_receive
        try:
            agreement = agree(self._pages, peer, group, convert=bool(self._convert))
            if self._agreements.setdefault(said.engine_id, agreement) != agreement:
                raise PageFormatError("format", f"Ranks of peer {said.engine_id} state unlike page formats")
            if self._converter is not None:
                # Whatever is made at first use is made before the first request.
                self._converter.prepare(agreement)
        except PageFormatError as error:
            self.last_refusal = str(error)
            self.xfer_stats.record_refused_peer(error.code)
            raise
        return said

    def _present_halves(self, remote: NixlAgentMetadata, remote_tp_size: int) -> None:
        """Rewrite a peer's standard pages into two regions each, as this engine has them."""
        own = [
            dataclasses.replace(self._pages.formats[name], kind="standard", page_size=remote.block_size)
            for name in remote.region_names
        ]
        heads = max(1, self.transfer_topo.total_num_kv_heads // remote_tp_size)
        theirs = [dataclasses.replace(page, num_kv_heads=heads) for page in own]
        share = compute_head_offset(
            self.transfer_tp_rank, self.transfer_tp_size, remote_tp_size, self.transfer_topo.total_num_kv_heads
        )
        remote.kv_caches_base_addr, remote.block_lens = regions_in_halves(
            remote.kv_caches_base_addr, theirs, own, share
        )
        for name in ("block_strides", "region_num_blocks", "region_group_ids", "region_names", "region_mem_types"):
            values = getattr(remote, name)
            if values is not None:
                setattr(remote, name, [value for value in values for _ in (0, 1)])

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self._agreements.pop(engine_id, None)
        # Either side's memory is another now, and vLLM looks up the peer's page size when a read ends well.
        for req_id in list(self._recving_transfers):
            meta = self._recving_metadata.get(req_id)
            if meta is not None and meta.remote.engine_id == engine_id:
                self._fail(req_id, "peer_forgotten", "The peer was forgotten while the request was read")
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)

    # What was received.

    def _prepare_conversion(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # In the order of the regions, and so of what lands in staging: vLLM sorts them by name, but not its layers.
        caches = [kv_caches[name] for name in self.region_names[::2]]
        blocks = {cache.shape[0] for cache in caches}
        if blocks != {self.num_blocks}:
            raise InvalidArgumentError(
                f"flashinfer's NIXL connector: caches must have {self.num_blocks} kernel blocks, got {blocks}; set "
                "--block-size to the block size of the attention kernels"
            )
        pages = self._pages.formats.values()
        page_bytes = sum(page.page_bytes for page in pages)
        self._converter = Conversions(caches, page_bytes, in_step=self._convert == "sync")
        page = next(iter(pages))
        # What most peers need is compiled and loaded before there is one.
        usual = Agreement(dataclasses.replace(page, kind="standard") if self._convert else page, page)
        if self._convert:
            self._converter.prepare(usual)
        if self._stages(self._staging_bytes):
            self._prepare_staging(caches[0], self._staging_bytes)
        if self._staging is not None:
            self._converter.prepare_staged(usual, self._staging)

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        if transfers is not self._recving_transfers or self._converter is None:
            polled: tuple[set[str], set[str]] = super()._pop_done_transfers(transfers)
            return polled
        for req_id in self._conversions:
            transfers.pop(req_id, None)
        done, failed = super()._pop_done_transfers(transfers)
        for req_id in sorted(done - failed - self._recv_failures):
            self._start_conversion(req_id, self._converter)
        done -= self._conversions.keys()
        for req_id, running in list(self._conversions.items()):
            if not running.done():
                # As a transfer without handles: vLLM then keeps the request, its blocks and its peer.
                transfers[req_id] = []
                continue
            del self._conversions[req_id]
            done.add(req_id)
            self._end_conversion(req_id, running, failed)
        self._end_reads()
        return done, failed

    def _start_conversion(self, req_id: str, converter: Conversions) -> None:
        meta = self._recving_metadata[req_id]
        read = self._reads.get(req_id)
        # Of a peer that writes, which tells only when it has written.
        agreement = read.agreement if read else self._agreements.get(meta.remote.engine_id)
        if agreement is None:
            self._fail(req_id, "peer_forgotten", "Nothing says what pages the peer has written")
            return
        if agreement.src is None:
            return
        # Just the pages that were read: those of a local prefix are not in this list.
        pages = [(page, agreement.ratio) for group in meta.local_physical_block_ids for page in group]
        if agreement.ratio > 1:
            groups = zip(meta.local_physical_block_ids, meta.remote.block_ids, strict=True)
            pages = [page for local, remote in groups for page in landing.covered(local, remote, agreement.ratio)]
        if pages:
            self._conversions[req_id] = converter.start(agreement, pages, read.slots if read else None)

    def _fail(self, req_id: str, failure_type: str, why: str) -> None:
        """Have vLLM report a request as a failed receive, with its blocks, when its last handle has ended."""
        self._log_failure(failure_type=failure_type, req_id=req_id, msg=why)
        self._recv_failures.add(req_id)

    def _refuses_second_read(self, req_id: str, meta: Any) -> bool:
        """Whether a request of this name is being read, which then fails."""
        if req_id not in self._reads or not any(map(len, meta.local_block_ids)):
            return False
        # Two reads of one name would share the slots, and the second's handles end with the first's conversion.
        self._fail(req_id, "read_twice", "A request of this name is still being read")
        return True

    def _end_conversion(self, req_id: str, ended: Conversion, failed: set[str]) -> None:
        error = ended.error()
        if error is None and ended.moves:
            return
        if error is None:
            self.xfer_stats.record_conversion(ended.pages, ended.page_bytes, ended.seconds)
            return
        self.xfer_stats.record_failed_conversion()
        # vLLM reports the request as a failed receive, with its blocks, and nothing else is lost.
        self._log_failure(failure_type="page_conversion_failed", req_id=req_id, msg=str(error), error=error)
        failed.add(req_id)

    def unregister_kv_caches(self) -> None:
        for running in self._conversions.values():
            running.wait()
        super().unregister_kv_caches()

    def shutdown(self) -> None:
        # vLLM may free the pages next. It calls this in __del__ too, also of a worker that its constructor refused.
        converter = getattr(self, "_converter", None)
        if converter is not None:
            converter.close()
        super().shutdown()
        # The caches are freed when nobody refers to them, and this worker may be kept for longer.
        self._converter = self._staging = None
        self._conversions, self._reads = {}, {}
