// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Keys of MLA out of their two parts, on a GPU. Vectors of all rows are numbered through; a thread moves a few of them,
// a workgroup's width apart, and has all its loads under way before its first store. The shared part is read once from
// memory and for the other heads from the cache.
#include "kernels/concat_mla.h"

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"

namespace fi {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

// Rows are (token, head) pairs, `rows` of them to a workgroup.
template <typename Vec>
__global__ __launch_bounds__(kThreads) void concat_mla_kernel(const ConcatMlaParams p, int rows) {
  const int vecs_per_row = (p.nope_bytes + p.rope_bytes) / int(sizeof(Vec));
  const int64_t row0 = int64_t(blockIdx.x) * rows;
  const int64_t left = p.tokens * p.heads - row0;
  const int count = int(left < rows ? left : rows) * vecs_per_row;
  const int64_t token0 = row0 / p.heads;
  const int head0 = int(row0 - token0 * p.heads);
  for (int begin = int(threadIdx.x); begin < count; begin += kThreads * kUnroll) {
    Vec data[kUnroll];
    char* to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = begin + u * kThreads;
      if (i < count) {
        const int row = i / vecs_per_row;
        const int c = (i - row * vecs_per_row) * int(sizeof(Vec));
        const int tokens_on = (head0 + row) / p.heads;
        const int head = head0 + row - tokens_on * p.heads;
        const int64_t token = token0 + tokens_on;
        const char* from = c < p.nope_bytes
                               ? static_cast<const char*>(p.nope) + token * p.nope_token + head * p.nope_head + c
                               : static_cast<const char*>(p.rope) + token * p.rope_token + (c - p.nope_bytes);
        to[u] = static_cast<char*>(p.k) + token * p.k_token + head * p.k_head + c;
        data[u] = load_vec<Vec>(from);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (begin + u * kThreads < count) store_vec(to[u], data[u]);
    }
  }
}

template <typename Vec>
int launch(const ConcatMlaParams& p, gpuStream_t stream) {
  const int64_t vecs_per_row = (int64_t(p.nope_bytes) + p.rope_bytes) / int(sizeof(Vec));
  const int64_t fit = int64_t{kThreads} * kUnroll / vecs_per_row;
  const int rows = int(fit < 1 ? 1 : fit);
  const int64_t blocks = (p.tokens * p.heads + rows - 1) / rows;
  concat_mla_kernel<Vec><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, rows);
  return gpu_last_error();
}

}  // namespace

int concat_mla_k(const ConcatMlaParams& p, void* stream_) {
  if (p.tokens == 0 || p.heads == 0) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  switch (common_width(p.nope_bytes, p.rope_bytes, address(p.k), address(p.nope), address(p.rope), p.k_token, p.k_head,
                       p.nope_token, p.nope_head, p.rope_token)) {
    case 16:
      return launch<Vec16>(p, stream);
    case 8:
      return launch<Vec8>(p, stream);
    case 4:
      return launch<unsigned>(p, stream);
    case 2:
      return launch<unsigned short>(p, stream);
    default:
      return launch<unsigned char>(p, stream);
  }
}

}  // namespace fi
