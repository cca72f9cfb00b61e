# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""How the bytes of one KV page are arranged.

A page holds one layer's keys and values for `N` tokens of `H` heads of size `D`. `PageFormat.offset` says
where element `(kv, h, n, d)` lies; everything else about a layout is derived from it. `e` is the element size
in bytes and `x = 16 / e` the elements of a 16-byte vector.

| kind        | page, row-major                                  |
|-------------|--------------------------------------------------|
| `standard`  | `[H, N, 2D]`, per token K then V                 |
| `shuffled`  | K `[H, D/x, N, x]`, then V `[H, N/x, D, x]`      |
| `x_packed`  | K `[H, D/x, N, x]`, then V `[H, D, N]`           |
| `split_hnd` | K `[H, N, D]`, then V alike                      |
| `split_nhd` | K `[N, H, D]`, then V alike                      |
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TypeVar

import torch

from flashinfer.core.errors import InvalidArgumentError

KINDS = ("standard", "shuffled", "x_packed", "split_hnd", "split_nhd")

# FP8 only with its flavour spelled out: the same byte means twice the value in the other one.
DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int8",
    "uint8",
)

# How many elements share one scale. None means that the page's values are what its bytes say.
SCALE_MODES = ("per_tensor", "per_head", "per_token", "per_block")

# A new version is a new meaning of some field: peers of unlike versions must not match.
TAG_PREFIX = "fi-kv/1"

VECTOR_BYTES = 16

# Kernels count within a page in 32 bits.
MAX_PAGE_BYTES = 1 << 30

Index = TypeVar("Index", int, torch.Tensor)


def why_not_format(kind: str, element_size: int, page_size: int, head_dim: int) -> str | None:
    """A sentence if pages of this geometry cannot have this kind, else None."""
    x = VECTOR_BYTES // element_size
    pages = f"{kind} pages of {element_size}-byte elements"
    if kind in ("shuffled", "x_packed") and head_dim % x != 0:
        return f"{pages} need head_dim to be a multiple of {x}, got {head_dim}"
    if kind == "shuffled" and page_size % x != 0:
        return f"{pages} need page_size to be a multiple of {x}, got {page_size}"
    return None


@dataclasses.dataclass(frozen=True, init=False)
class PageFormat:
    """The byte layout of one layer's KV page.

    Parameters
    ----------
    kind
        One of `KINDS`.
    dtype
        A torch dtype or its name, one of `DTYPES`.
    num_kv_heads, page_size, head_dim
        `H`, `N` (tokens) and `D`.
    scale_mode
        One of `SCALE_MODES` for quantised pages whose values need a scale, else None.

    Raises
    ------
    InvalidArgumentError
        If an argument is unknown, or the geometry has no such page.
    """

    kind: str
    dtype: str
    num_kv_heads: int
    page_size: int
    head_dim: int
    scale_mode: str | None

    def __init__(
        self,
        kind: str,
        dtype: str | torch.dtype,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        scale_mode: str | None = None,
    ) -> None:
        fields = {
            "kind": _one_of("kind", kind, KINDS),
            "dtype": _one_of("dtype", str(dtype).removeprefix("torch."), DTYPES),
            "num_kv_heads": _positive("num_kv_heads", num_kv_heads),
            "page_size": _positive("page_size", page_size),
            "head_dim": _positive("head_dim", head_dim),
            "scale_mode": None if scale_mode is None else _one_of("scale_mode", scale_mode, SCALE_MODES),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        reason = why_not_format(self.kind, self.element_size, self.page_size, self.head_dim)
        if reason is not None:
            raise InvalidArgumentError(f"PageFormat: {reason}")
        if self.page_bytes >= MAX_PAGE_BYTES:
            raise InvalidArgumentError(f"PageFormat: a page must be below 1 GiB, got {self.page_bytes} bytes")
        if self.scale_mode is not None and self.element_size != 1:
            raise InvalidArgumentError(
                f"PageFormat: scale_mode must be None for {self.dtype} pages, got {self.scale_mode!r}; "
                "only 1-byte elements carry scales"
            )

    @functools.cached_property
    def geometry(self) -> tuple[str, int, int, int, str | None]:
        """All that two formats must share for their pages to hold the same values: everything but the kind."""
        return (self.dtype, self.num_kv_heads, self.page_size, self.head_dim, self.scale_mode)

    @functools.cached_property
    def element_size(self) -> int:
        """Bytes of one element."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    @property
    def x(self) -> int:
        """Elements of one 16-byte vector."""
        return VECTOR_BYTES // self.element_size

    @property
    def half_bytes(self) -> int:
        """Bytes of half a page: of a K plane's block where K and V are apart."""
        return self.num_kv_heads * self.page_size * self.head_dim * self.element_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V together."""
        return 2 * self.half_bytes

    @property
    def head_slots(self) -> int:
        """2 where K of all heads comes before V of all heads, 1 where a token's K and V are neighbours."""
        return 1 if self.kind == "standard" else 2

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """`(start, length)` in bytes of the parts of the page that may live apart."""
        length = self.page_bytes // self.head_slots
        return tuple((slot * length, length) for slot in range(self.head_slots))

    @property
    def shape(self) -> str:
        """The page's row-major shape, for people."""
        x = self.x
        return {
            "standard": "[H, N, 2D], per token K then V",
            "shuffled": f"K [H, D/{x}, N, {x}], then V [H, N/{x}, D, {x}]",
            "x_packed": f"K [H, D/{x}, N, {x}], then V [H, D, N]",
            "split_hnd": "K [H, N, D], then V [H, N, D]",
            "split_nhd": "K [N, H, D], then V [N, H, D]",
        }[self.kind]

    @property
    def tag(self) -> str:
        """Canonical ASCII name, to be compared byte by byte and never parsed."""
        parts = [
            TAG_PREFIX,
            self.kind,
            self.dtype,
            f"h{self.num_kv_heads}",
            f"n{self.page_size}",
            f"d{self.head_dim}",
        ]
        if self.scale_mode is not None:
            parts.append(self.scale_mode)
        return ";".join(parts)

    def offset(self, kv: int, h: Index, n: Index, d: Index) -> Index:
        """Byte offset in the page of `[h, n, d]` of K (`kv` 0) or V (`kv` 1).

        `h`, `n` and `d` are three integers, or three integer tensors that broadcast. A tensor's values are not
        checked.
        """
        _in_range("kv", kv, 2)
        if isinstance(h, int) and isinstance(n, int) and isinstance(d, int):
            _in_range("h", h, self.num_kv_heads)
            _in_range("n", n, self.page_size)
            _in_range("d", d, self.head_dim)
        H, N, D, x = self.num_kv_heads, self.page_size, self.head_dim, self.x
        if self.kind == "standard":
            return ((h * N + n) * 2 * D + kv * D + d) * self.element_size
        if self.kind == "split_hnd":
            element = (h * N + n) * D + d
        elif self.kind == "split_nhd":
            element = (n * H + h) * D + d
        elif kv == 0:
            element = ((h * (D // x) + d // x) * N + n) * x + d % x
        elif self.kind == "shuffled":
            element = ((h * (N // x) + n // x) * D + d) * x + n % x
        else:
            element = (h * D + d) * N + n
        return kv * self.half_bytes + element * self.element_size

    def offsets(self) -> torch.Tensor:
        """Byte offset of every element, int64 `[2, H, N, D]`."""
        h = torch.arange(self.num_kv_heads).view(-1, 1, 1)
        n = torch.arange(self.page_size).view(-1, 1)
        d = torch.arange(self.head_dim)
        return torch.stack([self.offset(kv, h, n, d) for kv in (0, 1)])

    def head_ranges(self, first: int, count: int) -> tuple[tuple[int, int], ...]:
        """`(start, length)` in bytes of heads `first .. first + count - 1`, in ascending order.

        Neighbouring ranges are merged, but never across a plane boundary, since planes may live apart. The
        bytes of the ranges, one after the other, are a page of this kind with `count` heads: what a
        tensor-parallel rank that owns just those heads holds.
        """
        if count < 1 or first < 0 or first + count > self.num_kv_heads:
            raise InvalidArgumentError(
                f"PageFormat.head_ranges: heads must be a non-empty part of 0..{self.num_kv_heads - 1}, "
                f"got first {first}, count {count}"
            )
        return _head_ranges(self, first, count)


# Handshakes ask for the same few slices once per layer and peer.
@functools.lru_cache(maxsize=256)
def _head_ranges(page: PageFormat, first: int, count: int) -> tuple[tuple[int, int], ...]:
    starts = page.offsets()[:, first : first + count].flatten().sort().values
    opens = torch.ones_like(starts, dtype=torch.bool)
    opens[1:] = starts.diff() != page.element_size
    for plane_start, _ in page.planes:
        opens |= starts == plane_start
    bounds = [*opens.nonzero().flatten().tolist(), starts.numel()]
    begins = starts[opens].tolist()
    return tuple((begin, (bounds[i + 1] - bounds[i]) * page.element_size) for i, begin in enumerate(begins))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidArgumentError(f"PageFormat: {name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InvalidArgumentError(f"PageFormat: {name} must be a positive integer, got {value!r}") from error
    if number < 1:
        raise InvalidArgumentError(f"PageFormat: {name} must be a positive integer, got {number}")
    return number


def _in_range(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise InvalidArgumentError(f"PageFormat.offset: {name} must be in 0..{limit - 1}, got {value}")
