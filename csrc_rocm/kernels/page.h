// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged append: parameters shared by the GPU kernels (page.cu), the CPU kernels (kernels_cpu/page.cc) and the
// shim. Strides are in bytes. A row is one token's data; a destination element sits at
//   page * page_stride + head * head_stride + token * token_stride + d * element            (kStrided)
// or inside a shuffled page (see shuffled_k_at and shuffled_v_at). All launchers return 0 or the runtime's error code.
#pragma once

#include "kernels/common/fault.h"
#include "kernels/common/quantize.h"

namespace fi {

// Where a token goes: FlashInfer's page table, plus the rows' (request, position) pairs.
struct PageTable {
  IndexArray batch_indices;  // [nnz]; negative = padding, skipped in silence
  IndexArray positions;      // [nnz], position of the row in its request
  IndexArray kv_indptr;      // [batch + 1]
  IndexArray kv_indices;     // [>= kv_indptr[batch]], over-allocation allowed
  int64_t nnz;
  int64_t batch_size;
  int64_t num_indices;  // length of kv_indices
  int64_t num_pages;    // pages in the pool
  int32_t page_size;
};

struct Slot {
  int64_t page;
  int32_t token;  // -1: nothing to write
};

// Slot of row `i`. Reports what it cannot use; `op` goes into the report.
FI_HOST_DEVICE Slot find_slot(const PageTable& t, int64_t i, int64_t op, Fault* fault) {
  const Slot none{0, -1};
  // Both at once: the look-up is a chain of loads, and its length is what a small append takes.
  const int64_t b = t.batch_indices[i], position = t.positions[i];
  if (b < 0) return none;
  if (b >= t.batch_size) {
    report(fault, op << 8 | kBatchIndexRange, i, b, t.batch_size);
    return none;
  }
  const int64_t first = t.kv_indptr[b], last = t.kv_indptr[b + 1];
  if (first < 0 || last < first) {
    report(fault, op << 8 | kIndptrOrder, b, first, last);
    return none;
  }
  if (last > t.num_indices) {
    report(fault, op << 8 | kPageTableShort, b + 1, last, t.num_indices);
    return none;
  }
  const int64_t column = position / t.page_size;
  if (position < 0 || column >= last - first) {
    report(fault, op << 8 | kPositionRange, i, position, (last - first) * t.page_size);
    return none;
  }
  const int64_t page = t.kv_indices[first + column];
  if (page < 0 || page >= t.num_pages) {
    report(fault, op << 8 | kPageIdRange, first + column, page, t.num_pages);
    return none;
  }
  return Slot{page, static_cast<int32_t>(position % t.page_size)};
}

enum class PoolLayout : int32_t {
  kStrided = 0,   // NHD, HND, `standard` slices: any strides, dense head dimension
  kShuffled = 1,  // K [H, D/x, N, x] and V [H, N/x, D, x] inside a page
};

// K or V of one append.
struct AppendSide {
  const void* rows;         // [nnz, heads, dim], dense dim; of type `from`
  int64_t row_stride;       // bytes between tokens
  int64_t row_head_stride;  // bytes between heads of a token
  void* pool;
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;  // kStrided only
  Quantizer quantizer;
};

struct AppendParams {
  PageTable table;
  AppendSide k, v;
  PoolLayout layout;
  RowKind from;
  int32_t num_heads;
  int32_t head_bytes;     // bytes of one head's row in the cache: head_dim * element size
  int32_t element_bytes;  // of the cache: 1, 2 or 4
  Fault* fault;
};

FI_HOST_DEVICE const char* row_at(const AppendSide& s, int64_t i, int head) {
  return static_cast<const char*>(s.rows) + i * s.row_stride + head * s.row_head_stride;
}

FI_HOST_DEVICE char* strided_at(const AppendSide& s, Slot slot, int head) {
  return static_cast<char*>(s.pool) + slot.page * s.page_stride + head * s.head_stride + slot.token * s.token_stride;
}

// Byte `c` of a head's K row in a shuffled page: 16-byte vectors of one head dimension chunk lie token after
// token.
FI_HOST_DEVICE char* shuffled_k_at(const AppendSide& s, Slot slot, int head, int c, int page_size) {
  return static_cast<char*>(s.pool) + slot.page * s.page_stride + head * s.head_stride +
         (int64_t(c / 16) * page_size + slot.token) * 16 + c % 16;
}

// Element `d` of a head's V row in a shuffled page: x tokens of one d lie side by side; next d is 16 bytes
// on.
FI_HOST_DEVICE char* shuffled_v_at(const AppendSide& s, Slot slot, int head, int d, int head_dim, int element) {
  const int x = 16 / element;
  return static_cast<char*>(s.pool) + slot.page * s.page_stride + head * s.head_stride +
         (int64_t(slot.token / x) * head_dim + d) * 16 + slot.token % x * element;
}

// ckv and kpe rows of an MLA append are two independent "heads" of unlike width.
struct MlaSide {
  const void* rows;  // [nnz, width]
  int64_t row_stride;
  void* pool;  // [pages, page_size, width]
  int64_t page_stride;
  int64_t token_stride;
  int32_t width_bytes;  // in the cache
};

struct MlaAppendParams {
  PageTable table;
  MlaSide ckv, kpe;
  RowKind from;
  Quantizer quantizer;
  Fault* fault;
};

constexpr int64_t kOpAppend = 1;
constexpr int64_t kOpAppendMla = 2;
constexpr int64_t kOpBatchPositions = 4;
constexpr int64_t kOpSeqLens = 5;

struct BatchPositionsParams {
  IndexArray append_indptr;  // [batch + 1]
  IndexArray seq_lens;       // [batch], appended tokens included
  int64_t batch_size;
  int64_t nnz;
  int32_t* batch_indices;  // [nnz], -1 beyond append_indptr[batch]
  int32_t* positions;      // [nnz], 0 there
  Fault* fault;
};

struct SeqLensParams {
  IndexArray kv_indptr;         // [batch + 1]
  IndexArray kv_last_page_len;  // [batch]
  int64_t batch_size;
  int32_t page_size;
  int32_t* seq_lens;  // [batch]
  Fault* fault;
};

// Whether request `b` of an append makes sense; reports it if not.
FI_HOST_DEVICE bool check_append(const BatchPositionsParams& p, int64_t b) {
  const int64_t first = p.append_indptr[b], next = p.append_indptr[b + 1];
  if (first < 0 || next < first) {
    report(p.fault, kOpBatchPositions << 8 | kAppendIndptrOrder, b, first, next);
    return false;
  }
  if (p.seq_lens[b] < next - first) {
    report(p.fault, kOpBatchPositions << 8 | kSeqLenShort, b, p.seq_lens[b], next - first);
    return false;
  }
  return true;
}

// Request and position of output row `i`: the last request whose first row is at or before `i`.
FI_HOST_DEVICE void batch_position(const BatchPositionsParams& p, int64_t i) {
  int64_t batch = -1, position = 0;
  if (p.batch_size > 0 && i < p.append_indptr[p.batch_size] && i >= p.append_indptr[0]) {
    int64_t low = 0, high = p.batch_size;  // append_indptr[low] <= i < append_indptr[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (p.append_indptr[middle] <= i ? low : high) = middle;
    }
    batch = low;
    const int64_t first = p.append_indptr[low], appended = p.append_indptr[low + 1] - first;
    position = i - first + p.seq_lens[low] - appended;
  }
  p.batch_indices[i] = static_cast<int32_t>(batch);
  p.positions[i] = static_cast<int32_t>(position);
}

FI_HOST_DEVICE void seq_len(const SeqLensParams& p, int64_t b) {
  const int64_t first = p.kv_indptr[b], pages = p.kv_indptr[b + 1] - first;
  if (first < 0 || pages < 0) report(p.fault, kOpSeqLens << 8 | kIndptrOrder, b, first, first + pages);
  const int64_t length = (pages > 1 ? pages - 1 : 0) * p.page_size + p.kv_last_page_len[b];
  if (length < 0 || length > INT32_MAX) report(p.fault, kOpSeqLens << 8 | kSeqLenRange, b, length, INT32_MAX);
  p.seq_lens[b] = static_cast<int32_t>(length);
}

int append_paged_kv_cache(const AppendParams& params, void* stream);
int append_paged_mla_kv_cache(const MlaAppendParams& params, void* stream);
int get_batch_indices_positions(const BatchPositionsParams& params, void* stream);
int get_seq_lens(const SeqLensParams& params, void* stream);

}  // namespace fi
