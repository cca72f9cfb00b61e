# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine says about its pages in the handshake, next to what vLLM's own connector says.

A stock peer decodes the same bytes: it ignores fields that it does not know. So that it also *refuses* pages that are
not standard, the names of their regions carry the tag; stock compares those names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

from flashinfer.kv import PageFormat

# A new version is a new meaning of the fields below. vLLM's own connector version stays vLLM's.
PAGE_METADATA_VERSION = 1


@dataclasses.dataclass
class PageAgentMetadata(NixlAgentMetadata):
    """vLLM's metadata with the page format of each region.

    Parameters
    ----------
    page_format_version
        `PAGE_METADATA_VERSION` of the sender; 0 if it says nothing about its pages.
    page_formats
        `PageFormat.tag` of each region, in the order of the regions.
    page_scales
        Scales of K and V of each region, in the order of the regions; empty unless pages are quantised.
    """

    page_format_version: int = 0
    page_formats: list[str] = dataclasses.field(default_factory=list)
    page_scales: list[list[float]] = dataclasses.field(default_factory=list)


def decode(data: bytes) -> PageAgentMetadata:
    """Metadata of a peer, stock or not.

    Raises
    ------
    msgspec.DecodeError
        If it is neither; `msgspec.ValidationError` is one.
    """
    metadata: PageAgentMetadata = msgspec.msgpack.decode(data, type=PageAgentMetadata)
    return metadata


def encode(metadata: NixlAgentMetadata) -> bytes:
    return bytes(msgspec.msgpack.encode(metadata))


def tagged(
    metadata: NixlAgentMetadata,
    names: Sequence[str],
    formats: Sequence[PageFormat],
    scales: Mapping[str, tuple[float, float]],
) -> PageAgentMetadata:
    """`metadata` with the page formats of its regions, whose plain names are `names`, and their layers' scales."""
    fields: dict[str, Any] = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(NixlAgentMetadata)}
    fields["region_names"] = [_wire_name(name, page) for name, page in zip(names, formats, strict=True)]
    return PageAgentMetadata(
        **fields,
        page_format_version=PAGE_METADATA_VERSION,
        page_formats=[page.tag for page in formats],
        page_scales=[list(scales.get(name, ())) for name in names] if scales else [],
    )


def plain_names(metadata: PageAgentMetadata) -> list[str]:
    """Region names without the tags that `tagged` put there."""
    names = list(metadata.region_names or [])
    tags = metadata.page_formats or [""] * len(names)
    return [name.removesuffix(f"#{tag}") if tag else name for name, tag in zip(names, tags, strict=True)]


def _wire_name(name: str, page: PageFormat) -> str:
    return name if page.kind == "standard" else f"{name}#{page.tag}"
