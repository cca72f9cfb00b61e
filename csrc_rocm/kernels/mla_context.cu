// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Rows of a paged cache that hold the contexts of a batch: a thread a token, all chunks of a step in one launch.
#include "kernels/mla_context.h"

#include "kernels/common/gpu.h"

namespace fi {
namespace {

constexpr int kThreads = 256;

__global__ void mla_context_indices_kernel(const MlaContextIndicesParams p) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.tokens) p.rows[i] = context_row(p, i);
}

}  // namespace

int mla_context_indices(const MlaContextIndicesParams& p, void* stream) {
  if (p.tokens == 0) return 0;
  const auto blocks = static_cast<unsigned>((p.tokens + kThreads - 1) / kThreads);
  mla_context_indices_kernel<<<blocks, kThreads, 0, static_cast<gpuStream_t>(stream)>>>(p);
  return gpu_last_error();
}

}  // namespace fi
