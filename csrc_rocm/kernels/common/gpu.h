// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The only file that maps HIP and CUDA names onto one set. Kernels include this and nothing of either
// runtime.
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

// Picks four bytes of (a, b). Nibble i of the selector, from the least significant end, names byte i of the result:
// 0-3 are a's bytes, 4-7 are b's. The hardware's own forms differ: v_perm_b32 takes whole bytes as selectors and
// numbers its *second* operand first. A transpose that is right on one vendor and wrong on the other fails exactly
// here, so this is the only place that knows.
template <unsigned kSelector>
__device__ __forceinline__ unsigned byte_perm(unsigned a, unsigned b) {
#if FI_GPU_HIP
  constexpr unsigned kBytes =
      (kSelector & 0xF) | (kSelector & 0xF0) << 4 | (kSelector & 0xF00) << 8 | (kSelector & 0xF000) << 12;
  return __builtin_amdgcn_perm(b, a, kBytes);
#else
  return __byte_perm(a, b, kSelector);
#endif
}

// Zero that the compiler cannot see through: keeps address arithmetic inside a loop, where hoisting it would cost more
// registers than the data.
__device__ __forceinline__ int opaque_zero() {
  int zero = 0;
#if FI_GPU_HIP
  asm volatile("" : "+v"(zero));
#else
  asm volatile("" : "+r"(zero));
#endif
  return zero;
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
