// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Re-encoding between the two flavours of 8-bit floats, in integer arithmetic: the conversion instructions of an
// architecture know only one of them.
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

FI_HOST_DEVICE uint8_t recode_byte(Recode mode, uint8_t b) { return static_cast<uint8_t>(recode_word(mode, b)); }

}  // namespace fi
