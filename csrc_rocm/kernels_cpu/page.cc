// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged append on the CPU. Metadata is checked in a first pass, so that a bad call writes nothing at all.
#include "kernels/page.h"

#include <cstring>
#include <vector>

namespace fi {
namespace {

// Below this many bytes a second thread costs more than it saves (measured: about 64 KiB on a laptop core).
constexpr int64_t kParallelBytes = 1 << 16;

// Slots of all rows; false if any was reported.
bool find_slots(const PageTable& table, int64_t op, Fault* fault, std::vector<Slot>& slots) {
  slots.resize(static_cast<size_t>(table.nnz));
  for (int64_t i = 0; i < table.nnz; ++i) {
    slots[static_cast<size_t>(i)] = find_slot(table, i, op, fault);
    if (fault->code != kNoFault) return false;
  }
  return true;
}

// `bytes` of the cache's row.
void put_row(char* to, const char* row, int bytes, RowKind from, const Quantizer& q) {
  if (from == RowKind::kAsIs) {
    std::memcpy(to, row, static_cast<size_t>(bytes));
    return;
  }
  const auto* source = reinterpret_cast<const unsigned char*>(row);
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<char>(quantize_one(from, source + i * row_ratio(from), q));
}

void write_shuffled_v(const AppendParams& p, Slot slot, int head, const char* row) {
  const int head_dim = p.head_bytes / p.element_bytes;
  for (int d = 0; d < head_dim; ++d) {
    std::memcpy(shuffled_v_at(p.v, slot, head, d, head_dim, p.element_bytes), row + d * p.element_bytes,
                static_cast<size_t>(p.element_bytes));
  }
}

void write_row(const AppendParams& p, int64_t i, Slot slot) {
  const int ratio = row_ratio(p.from);
  std::vector<char> stored_v(p.layout == PoolLayout::kShuffled ? static_cast<size_t>(p.head_bytes) : 0);
  for (int head = 0; head < p.num_heads; ++head) {
    const char* k = row_at(p.k, i, head);
    const char* v = row_at(p.v, i, head);
    if (p.layout == PoolLayout::kStrided) {
      put_row(strided_at(p.k, slot, head), k, p.head_bytes, p.from, p.k.quantizer);
      put_row(strided_at(p.v, slot, head), v, p.head_bytes, p.from, p.v.quantizer);
      continue;
    }
    for (int c = 0; c < p.head_bytes; c += 16) {
      put_row(shuffled_k_at(p.k, slot, head, c, p.table.page_size), k + c * ratio, 16, p.from, p.k.quantizer);
    }
    put_row(stored_v.data(), v, p.head_bytes, p.from, p.v.quantizer);
    write_shuffled_v(p, slot, head, stored_v.data());
  }
}

}  // namespace

int append_paged_kv_cache(const AppendParams& p, void*) {
  std::vector<Slot> slots;
  if (!find_slots(p.table, kOpAppend, p.fault, slots)) return 0;
  const int64_t bytes = p.table.nnz * p.num_heads * p.head_bytes * 2;
#pragma omp parallel for schedule(static) if (bytes > kParallelBytes)
  for (int64_t i = 0; i < p.table.nnz; ++i) {
    const Slot slot = slots[static_cast<size_t>(i)];
    if (slot.token >= 0) write_row(p, i, slot);
  }
  return 0;
}

int append_paged_mla_kv_cache(const MlaAppendParams& p, void*) {
  std::vector<Slot> slots;
  if (!find_slots(p.table, kOpAppendMla, p.fault, slots)) return 0;
  const int64_t bytes = p.table.nnz * (int64_t(p.ckv.width_bytes) + p.kpe.width_bytes);
#pragma omp parallel for schedule(static) if (bytes > kParallelBytes)
  for (int64_t i = 0; i < p.table.nnz; ++i) {
    const Slot slot = slots[static_cast<size_t>(i)];
    if (slot.token < 0) continue;
    for (const MlaSide* side : {&p.ckv, &p.kpe}) {
      char* to = static_cast<char*>(side->pool) + slot.page * side->page_stride + slot.token * side->token_stride;
      put_row(to, static_cast<const char*>(side->rows) + i * side->row_stride, side->width_bytes, p.from, p.quantizer);
    }
  }
  return 0;
}

int get_batch_indices_positions(const BatchPositionsParams& p, void*) {
  for (int64_t b = 0; b < p.batch_size; ++b) {
    if (!check_append(p, b)) return 0;
  }
  for (int64_t i = 0; i < p.nnz; ++i) batch_position(p, i);
  return 0;
}

int get_seq_lens(const SeqLensParams& p, void*) {
  for (int64_t b = 0; b < p.batch_size; ++b) seq_len(p, b);
  return 0;
}

}  // namespace fi
