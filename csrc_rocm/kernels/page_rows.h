// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// What a thread holds of an appended row between its load and its store.
#pragma once

#include "kernels/common/gpu.h"
#include "kernels/common/quantize.h"
#include "kernels/common/vec.h"
#include "kernels/page.h"

namespace fi {

// So much of a row as becomes one `Vec` of the cache: Vec16, or a byte, where floats become FP8.
template <typename Vec, RowKind kFrom>
struct Piece {
  static constexpr int kRatio = row_ratio(kFrom);
  Vec part[kRatio];

  // `c` is the byte in the cache's row.
  __device__ __forceinline__ void load(const char* row, int c) {
#pragma unroll
    for (int i = 0; i < kRatio; ++i) part[i] = load_vec<Vec>(row + int64_t(c) * kRatio + i * int(sizeof(Vec)));
  }

  __device__ __forceinline__ Vec stored(const Quantizer& q) const {
    if constexpr (kFrom == RowKind::kAsIs) {
      return part[0];
    } else if constexpr (sizeof(Vec) == 1) {
      return quantize_one(kFrom, part, q);
    } else {
      Vec out;
      uint32_t words[4 * kRatio];
#pragma unroll
      for (int i = 0; i < 4 * kRatio; ++i) words[i] = part[i / 4].w[i % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) out.w[i] = quantize_word<kFrom>(words + i * kRatio, q);
      return out;
    }
  }
};

// One element of a vector that the compiler keeps in registers.
template <int kElement>
struct Element;
template <>
struct Element<1> {
  using type = unsigned char;
};
template <>
struct Element<2> {
  using type = unsigned short;
};
template <>
struct Element<4> {
  using type = unsigned;
};

template <int kElement, typename Vec>
__device__ __forceinline__ void scatter_v(const AppendSide& s, Slot slot, int head, int c, int head_dim, const Vec& v) {
  using E = typename Element<kElement>::type;
  char* const first = shuffled_v_at(s, slot, head, c / kElement, head_dim, kElement);
#pragma unroll
  for (int j = 0; j < int(sizeof(Vec)) / kElement; ++j) {
    store_vec(first + j * 16, reinterpret_cast<const E*>(&v)[j]);  // the next dimension is a vector on
  }
}

// One vector of K and one of V, of a single token: V element by element, as its neighbours are other tokens'.
template <typename Vec>
__device__ __forceinline__ void write_shuffled(const AppendParams& p, Slot slot, int head, int c, const Vec& k,
                                               const Vec& v) {
  store_vec(shuffled_k_at(p.k, slot, head, c, p.table.page_size), k);
  const int head_dim = p.head_bytes / p.element_bytes;
  if (p.element_bytes == 1) {
    scatter_v<1>(p.v, slot, head, c, head_dim, v);
  } else if (p.element_bytes == 2) {
    if constexpr (sizeof(Vec) >= 2) scatter_v<2>(p.v, slot, head, c, head_dim, v);
  } else {
    if constexpr (sizeof(Vec) >= 4) scatter_v<4>(p.v, slot, head, c, head_dim, v);
  }
}

}  // namespace fi
