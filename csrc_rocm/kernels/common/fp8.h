// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Encoding of 8-bit floats and re-encoding between their two flavours, in integer arithmetic: the conversion
// instructions of an architecture know only one of them.
//
//   OCP  e4m3fn    bias 7, NaN is 0x7f and 0xff, largest 448 (0x7e), has -0
//   FNUZ e4m3fnuz  bias 8, NaN is 0x80 alone,    largest 240 (0x7f), no -0
//
// The same byte means half as much in FNUZ, so there are two ways. *Scaled*: the byte stays and the scale that goes
// with it doubles (or halves). *By value*: the scale stays and the byte changes.
#pragma once

#include <cstdint>

#include "kernels/common/fault.h"

namespace fi {

FI_HOST_DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
FI_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// Mirrored by flashinfer/core/dtypes.py.
enum class Recode : int32_t {
  kKeep = 0,
  kOcpToFnuzScaled = 1,   // exact
  kFnuzToOcpScaled = 2,   // exact but for the largest FNUZ code, which is NaN's in OCP and becomes 0x7e
  kOcpToFnuzByValue = 3,  // saturates above 240
  kFnuzToOcpByValue = 4,  // rounds to nearest even below 2^-6, where FNUZ is twice as fine
};

// One bit per byte, at bit 7: which bytes of a word have all lower seven bits set, and which have any of them.
FI_HOST_DEVICE uint32_t bytes_full(uint32_t w) { return ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }
FI_HOST_DEVICE uint32_t bytes_nonzero(uint32_t w) { return ((w & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u; }
// From bit 7 of a byte to all of its bits.
FI_HOST_DEVICE uint32_t spread(uint32_t high) { return (high >> 7) * 0xffu; }

// Four bytes at a time; in each, the magnitude is the lower seven bits.
FI_HOST_DEVICE uint32_t recode_word(Recode mode, uint32_t w) {
  const uint32_t sign = w & 0x80808080u;
  uint32_t magnitude = w & 0x7f7f7f7fu;
  switch (mode) {
    case Recode::kOcpToFnuzScaled: {
      // Both NaNs become 0x80, and -0 becomes 0.
      const uint32_t nan = bytes_full(w);
      return (magnitude & ~(nan - (nan >> 7))) | (sign & bytes_nonzero(w)) | nan;
    }
    case Recode::kFnuzToOcpScaled:
      // NaN, 0x80, becomes 0x7f, and the largest codes, 0x7f and 0xff, those below them: each is one less.
      return w - (((sign & ~bytes_nonzero(w)) | bytes_full(w)) >> 7);
    case Recode::kOcpToFnuzByValue: {
      const uint32_t nan = bytes_full(w);
      // Below 0x08 values are multiples of 2^-9, twice FNUZ's unit; from there on the exponent field grows by one.
      const uint32_t normal = spread((magnitude + 0x78787878u) & 0x80808080u);
      const uint32_t high = spread((magnitude + 0x08080808u) & 0x80808080u);
      const uint32_t shifted = (magnitude & ~high & normal) + (0x08080808u & ~high & normal);
      const uint32_t doubled = (magnitude & ~normal) << 1;
      const uint32_t value = shifted | doubled | (0x7f7f7f7fu & high);
      return (value & ~spread(nan)) | (sign & bytes_nonzero(w)) | nan;
    }
    case Recode::kFnuzToOcpByValue: {
      const uint32_t nan = sign & ~bytes_nonzero(w);
      // Below 0x10 values are multiples of 2^-10, half of OCP's unit; from there on the exponent field shrinks by one.
      const uint32_t normal = spread((magnitude + 0x70707070u) & 0x80808080u);
      const uint32_t low = magnitude & ~normal;
      const uint32_t half = (low >> 1) & 0x07070707u;
      const uint32_t halved = half + (low & half & 0x01010101u);  // ties to even
      const uint32_t value = ((magnitude & normal) - (0x08080808u & normal)) | halved;
      return ((value | sign) & ~spread(nan)) | (nan - (nan >> 7));
    }
    default:
      return w;
  }
}

// Value of one byte, without arithmetic on subnormal floats, which some modes flush to zero.
FI_HOST_DEVICE float fp8_value(uint32_t byte, bool fnuz) {
  const uint32_t magnitude = byte & 0x7fu;
  const bool nan = fnuz ? byte == 0x80u : magnitude == 0x7fu;
  const float normal = float_of_bits((magnitude << 20) + 0x3c000000u);
  const float value = magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-9f : normal;
  const float signed_value = float_of_bits(float_bits(fnuz ? value * 0.5f : value) | (byte & 0x80u) << 24);
  return nan ? float_of_bits(0x7fc00000u) : signed_value;
}

// The bytes of a word that are NaN, at bit 7 of each.
FI_HOST_DEVICE uint32_t fp8_nans(uint32_t w, bool fnuz) {
  return fnuz ? w & 0x80808080u & ~bytes_nonzero(w) : bytes_full(w);
}

// Bytes 0 and 2 of a word as two fp16, each smaller than its value by a power of two: exponent and mantissa have the
// same place beside each other there, and subnormals are subnormal.
FI_HOST_DEVICE uint32_t fp8_halves(uint32_t w) { return (w & 0x00800080u) << 8 | (w & 0x007f007fu) << 7; }
FI_HOST_DEVICE float fp8_halves_scale(bool fnuz) { return fnuz ? 0x1p7f : 0x1p8f; }

// A float whose upper half, after rounding to nearest even, is its bfloat16. NaN must be one with low bits of zero.
FI_HOST_DEVICE uint32_t bf16_above(float f) {
  const uint32_t bits = float_bits(f);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}
// Of any float: what a product makes of NaN has all its bits set on NVIDIA, and would be carried over to zero.
FI_HOST_DEVICE uint32_t bf16_bits(float f) { return f == f ? bf16_above(f) >> 16 : 0x7fc0u; }

FI_HOST_DEVICE uint8_t recode_byte(Recode mode, uint8_t b) { return static_cast<uint8_t>(recode_word(mode, b)); }

// A float as FP8: to nearest even, held to the largest value, NaN as 0x7f or FNUZ's 0x80.
FI_HOST_DEVICE uint32_t fp8_of(float x, bool fnuz) {
  const uint32_t bits = float_bits(x), sign = bits >> 24 & 0x80u;
  if ((bits & 0x7fffffffu) > 0x7f800000u) return fnuz ? 0x80u : 0x7fu;
  const float most = fnuz ? 240.0f : 448.0f, size = float_of_bits(bits & 0x7fffffffu);
  const float held = size < most ? size : most;
  // From the smallest normal value on, 20 bits of mantissa are rounded off and the exponent is rebased. Below it,
  // adding a power of two whose last bit is FP8's smallest step leaves the number of steps in the sum's low bits.
  const uint32_t from = float_bits(held), bias = fnuz ? 119u << 3 : 120u << 3;
  const uint32_t normal = ((from + 0x7ffffu + (from >> 20 & 1u)) >> 20) - bias;
  const uint32_t subnormal = float_bits(held + (fnuz ? 8192.0f : 16384.0f)) & 0xffu;
  const uint32_t code = held < (fnuz ? 0x1p-7f : 0x1p-6f) ? subnormal : normal;
  return code | (fnuz && code == 0 ? 0u : sign);
}

// Four at a time, the first in the lowest byte.
FI_HOST_DEVICE uint32_t fp8x4_of(float a, float b, float c, float d, bool fnuz) {
#if defined(__CUDA_ARCH__)
  // The instruction knows OCP. FNUZ's code of a value is OCP's of its double, but for NaN, -0 and the largest code.
  const float by = fnuz ? 2.0f : 1.0f;
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b * by), "f"(a * by));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d * by), "f"(c * by));
  const uint32_t ocp = uint32_t(low) | uint32_t(high) << 16;
  if (!fnuz) return ocp;
  constexpr float kTie = 232.0f;  // between the two largest codes, 224 and 240
  const uint32_t largest = uint32_t(fabsf(a) > kTie) | uint32_t(fabsf(b) > kTie) << 8 |
                           uint32_t(fabsf(c) > kTie) << 16 | uint32_t(fabsf(d) > kTie) << 24;
  return recode_word(Recode::kOcpToFnuzScaled, ocp) | largest;
#else
  return fp8_of(a, fnuz) | fp8_of(b, fnuz) << 8 | fp8_of(c, fnuz) << 16 | fp8_of(d, fnuz) << 24;
#endif
}

}  // namespace fi
