// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Rows of a paged cache that hold the contexts of a batch, token by token. Shared by the GPU kernel (mla_context.cu),
// the CPU kernel (kernels_cpu/mla_context.cc) and the shim.
#pragma once

#include "kernels/common/fault.h"

namespace fi {

constexpr int64_t kOpMlaContextIndices = 8;
constexpr int64_t kOpGatherKvBProj = 9;  // reports from flashinfer/backends/triton/kernels/mla_context.py

// A piece is a run of one request's tokens. Row of a token: its page times the page size, plus its place in the page.
struct MlaContextIndicesParams {
  IndexArray block_tables;  // [requests, columns], rows `table_stride` entries apart
  int64_t table_stride;
  int64_t requests;
  int64_t columns;
  const int32_t* piece_requests;  // [pieces]
  const int32_t* piece_starts;    // [pieces], first token of the piece in its request
  const int32_t* piece_indptr;    // [pieces + 1], where each piece begins in `rows`
  int64_t pieces;
  int64_t tokens;  // length of `rows`
  int64_t num_pages;
  int32_t page_size;
  int32_t* rows;  // -1 beyond piece_indptr[pieces] and for what was reported
  Fault* fault;
};

// Row of output `i`; the piece is the last that begins at or before it.
FI_HOST_DEVICE int32_t context_row(const MlaContextIndicesParams& p, int64_t i) {
  if (p.pieces == 0 || i < p.piece_indptr[0] || i >= p.piece_indptr[p.pieces]) return -1;
  int64_t low = 0, high = p.pieces;  // piece_indptr[low] <= i < piece_indptr[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.piece_indptr[middle] <= i ? low : high) = middle;
  }
  const int64_t request = p.piece_requests[low];
  const int64_t position = i - p.piece_indptr[low] + p.piece_starts[low];
  if (request < 0 || request >= p.requests) {
    report(p.fault, kOpMlaContextIndices << 8 | kPieceRequest, low, request, p.requests);
    return -1;
  }
  const int64_t column = position / p.page_size;
  if (position < 0 || column >= p.columns) {
    report(p.fault, kOpMlaContextIndices << 8 | kBlockTableShort, request, position, p.columns * p.page_size);
    return -1;
  }
  const int64_t page = p.block_tables[request * p.table_stride + column];
  if (page < 0 || page >= p.num_pages) {
    report(p.fault, kOpMlaContextIndices << 8 | kBlockTableRange, request * p.columns + column, page, p.num_pages);
    return -1;
  }
  return static_cast<int32_t>(page * p.page_size + position % p.page_size);
}

int mla_context_indices(const MlaContextIndicesParams& params, void* stream);

}  // namespace fi
