// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Plain words as wide as one memory access, and the widest that a set of addresses and sizes allows.
#pragma once

#include <cstdint>

#include "kernels/common/gpu.h"

namespace fi {

struct alignas(16) Vec16 {
  unsigned w[4];
};
struct alignas(8) Vec8 {
  unsigned w[2];
};

#if FI_GPU_HIP
// A pointer picked at run time, or read from a table in the kernel argument, loses its address space and
// would be accessed through `flat_` instructions, which also count against LDS. These casts keep it global.
template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = unsigned __attribute__((ext_vector_type(4)));
};
template <>
struct Word<8> {
  using type = unsigned __attribute__((ext_vector_type(2)));
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<1> {
  using type = unsigned char;
};
template <typename Vec>
__device__ __forceinline__ Vec load_vec(const void* p) {
  using Raw = typename Word<sizeof(Vec)>::type;
  return __builtin_bit_cast(Vec, *(const __attribute__((address_space(1))) Raw*)p);
}
template <typename Vec>
__device__ __forceinline__ void store_vec(void* p, const Vec& v) {
  using Raw = typename Word<sizeof(Vec)>::type;
  *(__attribute__((address_space(1))) Raw*)p = __builtin_bit_cast(Raw, v);
}
#else
template <typename Vec>
__device__ __forceinline__ Vec load_vec(const void* p) {
  return *static_cast<const Vec*>(p);
}
template <typename Vec>
__device__ __forceinline__ void store_vec(void* p, const Vec& v) {
  *static_cast<Vec*>(p) = v;
}
#endif

// Largest of 16, 8, 4, 2, 1 that divides every argument.
template <typename... Values>
inline int common_width(Values... values) {
  const uint64_t bits = (uint64_t{16} | ... | static_cast<uint64_t>(values));
  return static_cast<int>(bits & (~bits + 1));
}

inline uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

}  // namespace fi
