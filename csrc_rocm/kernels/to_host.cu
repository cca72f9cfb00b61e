// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Stores over the bus: for the kilobytes that a plan waits for, one launch is cheaper to queue than a copy of each
// vector, or than joining them before one.
#include "kernels/to_host.h"

#include "kernels/common/gpu.h"

namespace fi {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 64;

template <typename T>
__device__ __forceinline__ void copy(const ToHostVector& v, void* block) {
  const auto* from = static_cast<const T*>(v.from);
  auto* to = reinterpret_cast<T*>(static_cast<char*>(block) + v.begin);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < v.size; i += step) to[i] = from[i * v.stride];
}

__global__ __launch_bounds__(kThreads) void to_host_kernel(const ToHostParams p) {
  const ToHostVector& v = p.vectors[blockIdx.y];
  v.wide ? copy<int64_t>(v, p.block) : copy<int32_t>(v, p.block);
}

}  // namespace

int to_host(const ToHostParams& params, void* stream_) {
  ToHostParams p = params;
  int64_t longest = 0;
  for (int i = 0; i < p.count; ++i) longest = p.vectors[i].size > longest ? p.vectors[i].size : longest;
  if (longest == 0) return 0;
  // Memory that was pinned where it lay, and not allocated as such, has an address of its own on the device.
  if (const int error = gpu_host_pointer(&p.block, p.block)) return error;
  const int64_t blocks = (longest + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), static_cast<unsigned>(p.count));
  to_host_kernel<<<grid, kThreads, 0, static_cast<gpuStream_t>(stream_)>>>(p);
  return gpu_last_error();
}

}  // namespace fi
