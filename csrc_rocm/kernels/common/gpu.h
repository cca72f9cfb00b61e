// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The only file that maps HIP and CUDA names onto one set. Kernels include this and nothing of either
// runtime.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__HIP__)
#include <hip/hip_runtime.h>
using gpuStream_t = hipStream_t;
#define FI_GPU_HIP 1
// HIP's second argument counts waves per SIMD (four to a CU), CUDA's counts blocks per multiprocessor.
#define FI_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, (blocks) * (threads) / 256)
inline int gpu_last_error() { return static_cast<int>(hipGetLastError()); }
inline int gpu_current_device(int* device) { return static_cast<int>(hipGetDevice(device)); }
inline int gpu_ask_multiprocessors(int* count, int device) {
  return static_cast<int>(hipDeviceGetAttribute(count, hipDeviceAttributeMultiprocessorCount, device));
}
inline int gpu_host_pointer(void** on_device, void* on_host) {
  return static_cast<int>(hipHostGetDevicePointer(on_device, on_host, 0));
}
#else
#include <cuda_runtime.h>
using gpuStream_t = cudaStream_t;
#define FI_GPU_HIP 0
#define FI_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
inline int gpu_last_error() { return static_cast<int>(cudaGetLastError()); }
inline int gpu_current_device(int* device) { return static_cast<int>(cudaGetDevice(device)); }
inline int gpu_ask_multiprocessors(int* count, int device) {
  return static_cast<int>(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
}
inline int gpu_host_pointer(void** on_device, void* on_host) {
  return static_cast<int>(cudaHostGetDevicePointer(on_device, on_host, 0));
}
#endif

namespace fi {

// Multiprocessors of the current device. Asked at every launch, so answers are kept.
inline int gpu_multiprocessors(int* count) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> known[kMostDevices];
  int device = 0;
  if (const int error = gpu_current_device(&device)) return error;
  const bool kept = device >= 0 && device < kMostDevices;
  *count = kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (*count > 0) return 0;
  const int error = gpu_ask_multiprocessors(count, device);
  if (error == 0 && kept) known[device].store(*count, std::memory_order_relaxed);
  return error;
}

// Division of small numbers by one that is the same for a whole launch, as one multiplication.
struct Divisor {
  unsigned by;
  unsigned magic;  // 2^32 / by, rounded up; 0 stands for plain division

  Divisor() = default;
  // Exact for every number up to `most`: the error of the magic number, times the number, must stay below 2^32.
  Divisor(uint64_t by_, uint64_t most) : by(static_cast<unsigned>(by_)), magic(0) {
    if (by_ > 1 && by_ * most < uint64_t{1} << 32) magic = static_cast<unsigned>(((uint64_t{1} << 32) + by_ - 1) / by_);
  }
  __device__ __forceinline__ int operator()(int number) const {
    return magic ? int(__umulhi(unsigned(number), magic)) : by == 1 ? number : int(unsigned(number) / by);
  }
};

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

// A float rounded to a 16-bit one, as its bits. The hardware converts to fp16 on both vendors.
__device__ __forceinline__ unsigned half_bits(float f) {
#if FI_GPU_HIP
  return __builtin_bit_cast(unsigned short, static_cast<_Float16>(f));
#else
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
#endif
}

// Value of an fp16, subnormals included.
__device__ __forceinline__ float half_value(unsigned bits) {
#if FI_GPU_HIP
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<unsigned short>(bits)));
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<unsigned short>(bits)));
  return f;
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
