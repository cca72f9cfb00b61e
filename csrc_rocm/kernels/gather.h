// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged gather: keys and values of token ranges out of pages into dense rows. Parameters shared by the GPU kernels
// (gather.cu), the CPU kernel (kernels_cpu/gather.cc) and the shim. Strides are in bytes. The launcher returns 0 or the
// runtime's error code.
#pragma once

#include "kernels/common/fault.h"
#include "kernels/page.h"

namespace fi {

// What becomes of an element on its way.
enum class GatherOut : int32_t {
  kCopy = 0,   // bits as they are
  kBf16 = 1,   // FP8 times scale, rounded to nearest even
  kHalf = 2,   // likewise
  kFloat = 3,  // likewise
};

constexpr int64_t kOpGather = 6;

// Which token comes into which row: request b's piece, `starts[b]` and on, fills rows out_indptr[b] to
// out_indptr[b + 1] - 1.
struct GatherTable {
  IndexArray kv_indices;  // [>= kv_indptr[batch]], over-allocation allowed
  IndexArray kv_indptr;   // [batch + 1]
  IndexArray starts;      // [batch]
  IndexArray out_indptr;  // [batch + 1]
  int64_t batch_size;
  int64_t rows;         // rows of the output
  int64_t num_indices;  // length of kv_indices
  int64_t num_pages;    // pages in the pool
  int32_t page_size;
};

// K or V of one gather.
struct GatherSide {
  const void* pool;  // NHD, HND or `standard` by its strides, or shuffled (PoolLayout)
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;  // kStrided only
  void* out;             // [rows, heads, dim], dense dim
  int64_t row_stride;
  int64_t row_head_stride;
  float scale;  // of dequantised elements
};

struct GatherParams {
  GatherTable table;
  GatherSide k, v;
  PoolLayout layout;
  GatherOut out;
  int32_t num_heads;
  int32_t head_dim;
  int32_t element_bytes;  // of the pool: 1, 2 or 4
  bool fnuz;              // the pool's FP8 flavour, where it is dequantised
  Fault* fault;
};

// Source of one output row.
struct GatherRow {
  int64_t page;
  int32_t token;  // in the page; -1: nothing to write
  int32_t left;   // rows of the same piece from this one on
  bool first;     // of its piece
};

FI_HOST_DEVICE int out_bytes(GatherOut out, int element_bytes) {
  return out == GatherOut::kCopy ? element_bytes : out == GatherOut::kFloat ? 4 : 2;
}

// Whether request `b`'s rows make sense; reports them if not.
FI_HOST_DEVICE bool check_piece(const GatherTable& t, int64_t b, Fault* fault) {
  const int64_t first = t.out_indptr[b], next = t.out_indptr[b + 1];
  if (first < 0 || next < first) {
    report(fault, kOpGather << 8 | kOutIndptrOrder, b, first, next);
    return false;
  }
  if (next > t.rows) {
    report(fault, kOpGather << 8 | kOutShort, b + 1, next, t.rows);
    return false;
  }
  return true;
}

// Source of row `i`. Reports what it cannot use.
FI_HOST_DEVICE GatherRow find_row(const GatherTable& t, int64_t i, Fault* fault) {
  const GatherRow none{0, -1, 0, false};
  if (t.batch_size == 0 || i < t.out_indptr[0] || i >= t.out_indptr[t.batch_size]) return none;
  int64_t low = 0, high = t.batch_size;  // out_indptr[low] <= i < out_indptr[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (t.out_indptr[middle] <= i ? low : high) = middle;
  }
  const int64_t begin = t.out_indptr[low], end = t.out_indptr[low + 1];
  const int64_t first = t.kv_indptr[low], last = t.kv_indptr[low + 1];
  if (begin < 0 || end <= i) return none;  // out of order: check_piece reports it
  if (first < 0 || last < first) {
    report(fault, kOpGather << 8 | kIndptrOrder, low, first, last);
    return none;
  }
  if (last > t.num_indices) {
    report(fault, kOpGather << 8 | kPageTableShort, low + 1, last, t.num_indices);
    return none;
  }
  const int64_t token = t.starts[low] + (i - begin);
  if (token < 0 || token >= (last - first) * t.page_size || token > INT32_MAX) {
    report(fault, kOpGather << 8 | kTokenRange, low, token, (last - first) * t.page_size);
    return none;
  }
  const uint32_t column = static_cast<uint32_t>(token) / static_cast<uint32_t>(t.page_size);
  const int64_t page = t.kv_indices[first + column];
  if (page < 0 || page >= t.num_pages) {
    report(fault, kOpGather << 8 | kPageIdRange, first + column, page, t.num_pages);
    return none;
  }
  const auto in_page = static_cast<int32_t>(static_cast<uint32_t>(token) - column * static_cast<uint32_t>(t.page_size));
  const int64_t left = end - i;
  return GatherRow{page, in_page, static_cast<int32_t>(left < INT32_MAX ? left : INT32_MAX), i == begin};
}

FI_HOST_DEVICE char* out_at(const GatherSide& s, int64_t row, int head) {
  return static_cast<char*>(s.out) + row * s.row_stride + head * s.row_head_stride;
}

int gather_paged_kv(const GatherParams& params, void* stream);

}  // namespace fi
