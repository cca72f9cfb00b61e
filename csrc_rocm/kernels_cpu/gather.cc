// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged gather on the CPU. Metadata is checked in a first pass, so that a bad call writes nothing at all.
#include "kernels/gather.h"

#include <cstring>
#include <vector>

#include "kernels/common/fp8.h"

namespace fi {
namespace {

// Below this many bytes a second thread costs more than it saves (measured: about 64 KiB on a laptop core).
constexpr int64_t kParallelBytes = 1 << 16;

bool find_rows(const GatherParams& p, std::vector<GatherRow>& found) {
  for (int64_t b = 0; b < p.table.batch_size; ++b) {
    if (!check_piece(p.table, b, p.fault)) return false;
  }
  for (int64_t i = 0; i < p.table.rows; ++i) {
    found[static_cast<size_t>(i)] = find_row(p.table, i, p.fault);
    if (p.fault->code != kNoFault) return false;
  }
  return true;
}

// A float rounded to fp16, to nearest even.
uint16_t half_bits(float f) {
  const uint32_t bits = float_bits(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14 in units of 2^-24: adding 1/2 leaves the units in the low bits
    half = float_bits(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// One element at `from` into place `d` of a row.
void write_element(const GatherParams& p, const char* from, char* row, int d, float scale) {
  if (p.out == GatherOut::kCopy) {
    std::memcpy(row + int64_t(d) * p.element_bytes, from, static_cast<size_t>(p.element_bytes));
    return;
  }
  const float value = fp8_value(static_cast<unsigned char>(*from), p.fnuz) * scale;
  const auto rounded = p.out == GatherOut::kHalf ? half_bits(value) : static_cast<uint16_t>(bf16_bits(value));
  if (p.out == GatherOut::kFloat) {
    std::memcpy(row + int64_t(d) * 4, &value, 4);
  } else {
    std::memcpy(row + int64_t(d) * 2, &rounded, 2);
  }
}

// Where element `d` of a token's head lies in the pool.
const char* element_at(const GatherParams& p, const GatherSide& s, bool is_v, const GatherRow& r, int head, int d) {
  const int e = p.element_bytes, x = 16 / e;
  const char* const base = static_cast<const char*>(s.pool) + r.page * s.page_stride + head * s.head_stride;
  if (p.layout == PoolLayout::kStrided) return base + r.token * s.token_stride + int64_t(d) * e;
  if (is_v) return base + (int64_t(r.token / x) * p.head_dim + d) * 16 + r.token % x * e;
  return base + (int64_t(d / x) * p.table.page_size + r.token) * 16 + d % x * e;
}

void write_row(const GatherParams& p, int64_t i, const GatherRow& r) {
  for (int head = 0; head < p.num_heads; ++head) {
    for (const bool is_v : {false, true}) {
      const GatherSide& side = is_v ? p.v : p.k;
      char* const row = out_at(side, i, head);
      if (p.layout == PoolLayout::kStrided && p.out == GatherOut::kCopy) {
        const auto bytes = static_cast<size_t>(p.head_dim) * static_cast<size_t>(p.element_bytes);
        std::memcpy(row, element_at(p, side, is_v, r, head, 0), bytes);
        continue;
      }
      for (int d = 0; d < p.head_dim; ++d) {
        write_element(p, element_at(p, side, is_v, r, head, d), row, d, side.scale);
      }
    }
  }
}

}  // namespace

int gather_paged_kv(const GatherParams& p, void*) {
  std::vector<GatherRow> found(static_cast<size_t>(p.table.rows));
  if (!find_rows(p, found)) return 0;
  const int64_t bytes = p.table.rows * p.num_heads * p.head_dim * p.element_bytes * 2;
#pragma omp parallel for schedule(static) if (bytes > kParallelBytes)
  for (int64_t i = 0; i < p.table.rows; ++i) {
    const GatherRow& r = found[static_cast<size_t>(i)];
    if (r.token >= 0) write_row(p, i, r);
  }
  return 0;
}

}  // namespace fi
