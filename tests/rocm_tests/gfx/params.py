# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels' parameter structs as ctypes, field for field as in csrc_rocm/kernels/*.h.

The emulator compares their sizes with those in the kernels' metadata, so that a field added on one side is noticed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int32, c_int64, c_uint32, c_uint64

KINDS = ("standard", "shuffled", "x_packed", "split_hnd", "split_nhd")


class Fault(ctypes.Structure):
    _fields_ = (("code", c_int64), ("where", c_int64), ("value", c_int64), ("bound", c_int64))


class IndexArray(ctypes.Structure):
    _fields_ = (("data", c_uint64), ("wide", c_bool))


class PageLayout(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("heads", c_int32), ("tokens", c_int32))


class Planes(ctypes.Structure):
    _fields_ = (
        ("k", c_uint64 * 128),
        ("v", c_uint64 * 128),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("ids", IndexArray),
        ("num_pages", c_int64),
    )


class ConvertParams(ctypes.Structure):
    _fields_ = (
        ("source", Planes),
        ("to", Planes),
        ("num_blocks", c_int64),
        ("fault", c_uint64),
        ("scratch", c_uint64),
        ("tickets", c_uint64),
        ("scratch_pages", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("page_size", c_int32),
        ("head_dim", c_int32),
        ("element_bytes", c_int32),
        ("src", PageLayout),
        ("dst", PageLayout),
        ("recode", c_int32),
        ("in_place", c_bool),
    )


class Tiling(ctypes.Structure):
    _fields_ = (
        ("units_per_page", c_int32),
        ("units_per_group", c_int32),
        ("groups_per_page", c_int32),
        ("pages_per_group", c_int32),
        ("items", c_int32),
    )


class PageTable(ctypes.Structure):
    _fields_ = (
        ("batch_indices", IndexArray),
        ("positions", IndexArray),
        ("kv_indptr", IndexArray),
        ("kv_indices", IndexArray),
        ("nnz", c_int64),
        ("batch_size", c_int64),
        ("num_indices", c_int64),
        ("num_pages", c_int64),
        ("page_size", c_int32),
    )


class SlotMappingParams(ctypes.Structure):
    _fields_ = (("table", PageTable), ("slots", c_uint64), ("fault", c_uint64))


class Quantizer(ctypes.Structure):
    _fields_ = (("inverse", c_float), ("fnuz", c_bool))


class AppendSide(ctypes.Structure):
    _fields_ = (
        ("rows", c_uint64),
        ("row_stride", c_int64),
        ("row_head_stride", c_int64),
        ("pool", c_uint64),
        ("page_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
        ("quantizer", Quantizer),
    )


class AppendParams(ctypes.Structure):
    _fields_ = (
        ("table", PageTable),
        ("k", AppendSide),
        ("v", AppendSide),
        ("layout", c_int32),
        ("row_kind", c_int32),
        ("num_heads", c_int32),
        ("head_bytes", c_int32),
        ("element_bytes", c_int32),
        ("fault", c_uint64),
    )


class MlaSide(ctypes.Structure):
    _fields_ = (
        ("rows", c_uint64),
        ("row_stride", c_int64),
        ("pool", c_uint64),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("width_bytes", c_int32),
    )


class MlaAppendParams(ctypes.Structure):
    _fields_ = (
        ("table", PageTable),
        ("ckv", MlaSide),
        ("kpe", MlaSide),
        ("row_kind", c_int32),
        ("quantizer", Quantizer),
        ("fault", c_uint64),
    )


class Divisor(ctypes.Structure):
    """Division by `by` as one multiplication, exact up to `most`."""

    _fields_ = (("by", c_uint32), ("magic", c_uint32))

    def __init__(self, by: int, most: int) -> None:
        super().__init__(by, -(-(2**32) // by) if by > 1 and by * most < 2**32 else 0)


class Strides(ctypes.Structure):
    _fields_ = (("rows", c_int32), ("per_row", Divisor), ("per_head", Divisor))

    def __init__(self, rows: int, per_row: int, per_head: int) -> None:
        super().__init__(rows, Divisor(per_row, per_row * rows), Divisor(per_head, per_row))


class BatchPositionsParams(ctypes.Structure):
    _fields_ = (
        ("append_indptr", IndexArray),
        ("seq_lens", IndexArray),
        ("batch_size", c_int64),
        ("nnz", c_int64),
        ("batch_indices", c_uint64),
        ("positions", c_uint64),
        ("fault", c_uint64),
    )


class SeqLensParams(ctypes.Structure):
    _fields_ = (
        ("kv_indptr", IndexArray),
        ("kv_last_page_len", IndexArray),
        ("batch_size", c_int64),
        ("page_size", c_int32),
        ("seq_lens", c_uint64),
        ("fault", c_uint64),
    )


class GatherTable(ctypes.Structure):
    _fields_ = (
        ("kv_indices", IndexArray),
        ("kv_indptr", IndexArray),
        ("starts", IndexArray),
        ("out_indptr", IndexArray),
        ("batch_size", c_int64),
        ("rows", c_int64),
        ("num_indices", c_int64),
        ("num_pages", c_int64),
        ("page_size", c_int32),
    )


class GatherSide(ctypes.Structure):
    _fields_ = (
        ("pool", c_uint64),
        ("page_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
        ("out", c_uint64),
        ("row_stride", c_int64),
        ("row_head_stride", c_int64),
        ("scale", c_float),
    )


class GatherParams(ctypes.Structure):
    _fields_ = (
        ("table", GatherTable),
        ("k", GatherSide),
        ("v", GatherSide),
        ("layout", c_int32),
        ("out", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("element_bytes", c_int32),
        ("fnuz", c_bool),
        ("fault", c_uint64),
    )


class ToHostVector(ctypes.Structure):
    _fields_ = (("source", c_uint64), ("begin", c_int64), ("size", c_int64), ("stride", c_int64), ("wide", c_bool))


class ToHostParams(ctypes.Structure):
    _fields_ = (("block", c_uint64), ("vectors", ToHostVector * 8), ("count", c_int32))


def as_bytes(value: ctypes.Structure) -> bytes:
    return bytes(value)
