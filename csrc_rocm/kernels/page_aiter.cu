// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The slot mapping on a GPU: one row a thread. Per row it reads 16 to 32 bytes of metadata and writes 8, against the
// 4 KiB or so that the append then moves.
#include "kernels/page_aiter.h"

#include "kernels/common/gpu.h"

namespace fi {
namespace {

constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void map_slots_kernel(const SlotMappingParams p) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < p.table.nnz) p.slots[i] = slot_of_row(p, i);
}

}  // namespace

int map_slots(const SlotMappingParams& p, void* stream) {
  if (p.table.nnz == 0) return 0;
  const auto blocks = static_cast<unsigned>((p.table.nnz + kThreads - 1) / kThreads);
  map_slots_kernel<<<blocks, kThreads, 0, static_cast<gpuStream_t>(stream)>>>(p);
  return gpu_last_error();
}

}  // namespace fi
