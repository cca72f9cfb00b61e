// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Rows on their way into a cache: as they are, or as FP8 of the row times the reciprocal of a scale.
#pragma once

#include <cstdint>

#include "kernels/common/fault.h"
#include "kernels/common/fp8.h"

namespace fi {

enum class RowKind : int32_t {
  kAsIs = 0,  // the cache's own dtype: bytes move
  kHalf = 1,
  kBfloat16 = 2,
  kFloat = 3,
};

// How floats become FP8; not looked at for kAsIs.
struct Quantizer {
  float inverse;  // 1 / scale, in float32
  bool fnuz;
};

// Bytes of a row to a byte of the cache.
FI_HOST_DEVICE constexpr int row_ratio(RowKind kind) {
  return kind == RowKind::kAsIs ? 1 : kind == RowKind::kFloat ? 4 : 2;
}

FI_HOST_DEVICE float float_of_half(uint32_t half) {
#if defined(__HIP_DEVICE_COMPILE__)
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<unsigned short>(half)));
#elif defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(half)));
  return x;
#else
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0) {
    const float size = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -size : size;
  }
  return float_of_bits(sign | (exponent == 0x1fu ? 0xffu : exponent + 112u) << 23 | mantissa << 13);
#endif
}

// Two neighbouring elements of 2 bytes.
template <RowKind kFrom>
FI_HOST_DEVICE void unpack(uint32_t word, float* low, float* high) {
  if constexpr (kFrom == RowKind::kHalf) {
    *low = float_of_half(word & 0xffffu);
    *high = float_of_half(word >> 16);
  } else {
    *low = float_of_bits(word << 16);
    *high = float_of_bits(word & 0xffff0000u);
  }
}

// Four elements of a row, `row_ratio(kFrom)` words of it, as one word of FP8.
template <RowKind kFrom>
FI_HOST_DEVICE uint32_t quantize_word(const uint32_t* row, const Quantizer& q) {
  float a, b, c, d;
  if constexpr (kFrom == RowKind::kFloat) {
    a = float_of_bits(row[0]);
    b = float_of_bits(row[1]);
    c = float_of_bits(row[2]);
    d = float_of_bits(row[3]);
  } else {
    unpack<kFrom>(row[0], &a, &b);
    unpack<kFrom>(row[1], &c, &d);
  }
  return fp8x4_of(a * q.inverse, b * q.inverse, c * q.inverse, d * q.inverse, q.fnuz);
}

// One element, of which `bytes` are all.
FI_HOST_DEVICE uint8_t quantize_one(RowKind from, const unsigned char* bytes, const Quantizer& q) {
  const uint32_t low = bytes[0] | uint32_t(bytes[1]) << 8;
  float x;
  if (from == RowKind::kFloat) {
    x = float_of_bits(low | uint32_t(bytes[2]) << 16 | uint32_t(bytes[3]) << 24);
  } else {
    x = from == RowKind::kHalf ? float_of_half(low) : float_of_bits(low << 16);
  }
  return static_cast<uint8_t>(fp8_of(x * q.inverse, q.fnuz));
}

}  // namespace fi
