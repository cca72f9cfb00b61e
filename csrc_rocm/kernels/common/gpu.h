// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The only file that maps HIP and CUDA names onto one set. Kernels include this and nothing of either runtime.
#pragma once

#if defined(__HIP__)
#include <hip/hip_runtime.h>
using gpuStream_t = hipStream_t;
#define FI_GPU_HIP 1
// HIP's second argument counts waves per SIMD (four to a CU), CUDA's counts blocks per multiprocessor.
#define FI_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, (blocks) * (threads) / 256)
inline int gpu_last_error() { return static_cast<int>(hipGetLastError()); }
inline int gpu_multiprocessors(int* count) {
  int device = 0;
  hipError_t e = hipGetDevice(&device);
  if (e == hipSuccess) e = hipDeviceGetAttribute(count, hipDeviceAttributeMultiprocessorCount, device);
  return static_cast<int>(e);
}
#else
#include <cuda_runtime.h>
using gpuStream_t = cudaStream_t;
#define FI_GPU_HIP 0
#define FI_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
inline int gpu_last_error() { return static_cast<int>(cudaGetLastError()); }
inline int gpu_multiprocessors(int* count) {
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  return static_cast<int>(e);
}
#endif

namespace fi {

// Low halves of two words: [a.lo, b.lo] from the least significant end. v_perm_b32 selects bytes with byte-sized
// selectors and numbers its *second* operand first; __byte_perm takes nibbles and numbers its first operand first.
// Right on one vendor and wrong on the other is exactly how a transpose fails, so both live here and nowhere else.
__device__ __forceinline__ unsigned pack_low_halves(unsigned a, unsigned b) {
#if FI_GPU_HIP
  return __builtin_amdgcn_perm(b, a, 0x05040100u);
#else
  return __byte_perm(a, b, 0x5410);
#endif
}

// High halves of two words: [a.hi, b.hi].
__device__ __forceinline__ unsigned pack_high_halves(unsigned a, unsigned b) {
#if FI_GPU_HIP
  return __builtin_amdgcn_perm(b, a, 0x07060302u);
#else
  return __byte_perm(a, b, 0x7632);
#endif
}

// Device-wide view of a counter that other workgroups are raising.
__device__ __forceinline__ unsigned load_counter(const unsigned* p) {
#if FI_GPU_HIP
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
  return *reinterpret_cast<const volatile unsigned*>(p);
#endif
}

}  // namespace fi
