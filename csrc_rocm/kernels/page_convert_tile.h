// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Building blocks of the fast `standard` <-> `shuffled` kernels: units, their addresses, their LDS slots, and the
// transposes of V.
//
// A unit is 16 tokens of one head. A vector is 16 bytes, x = 16 / e elements. Either half of a unit (K or V) has D * e
// vectors.
#pragma once

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"

namespace fi {

constexpr int kUnitTokens = 16;
constexpr int kVectors = 8;  // vectors a thread holds
constexpr int kTileThreads = 512;

template <int kElement, int D>
struct Unit {
  static constexpr int kX = 16 / kElement;
  static constexpr int kRowVectors = D / kX;                      // K (or V) vectors of one token
  static constexpr int kColumns = 2 * kRowVectors;                // K and V vectors of one token
  static constexpr int kRowBytes = kColumns * 16;                 // a token in a standard page
  static constexpr int kHalfVectors = kUnitTokens * kRowVectors;  // K (or V) vectors of the unit
  static constexpr int kThreads = 2 * kHalfVectors / kVectors;    // threads that carry it: two rows of kColumns
  static constexpr int kPerTile = kTileThreads / kThreads;        // units of a full tile: 64 KiB
  // Whether a token's K and V are stored together, at the price of registers: halves of 128 bytes are too short a run
  // by themselves (86% of copy on an H200, 92% together).
  static constexpr bool kWholeRows = kRowVectors <= 8;
  static constexpr int kTileVectors = kPerTile * kHalfVectors;  // vectors of either half of a full tile
};

// A unit of a shuffled page. Shuffled order of its vectors: K [D/x][16], V [16/x][D].
template <class U>
struct ShuffledUnit {
  uint8_t* k;
  uint8_t* v;
  int k_run;  // bytes from one K vector column to the next: 16 for each token of the page

  __device__ __forceinline__ uint8_t* at(bool is_v, int index) const {
    if (is_v) return v + index * 16;
    return k + index / kUnitTokens * k_run + index % kUnitTokens * 16;
  }
};

// LDS slots of a half-unit are its shuffled order, XOR-swizzled so that neither the scattered side (threads a run
// apart) nor the contiguous side conflicts.
template <class U>
__device__ __forceinline__ int k_slot(int n, int vec) {
  return vec * kUnitTokens + (n ^ (vec & (kUnitTokens - 1)));
}
template <class U>
__device__ __forceinline__ int v_slot(int index) {  // index in shuffled order; x dimensions of a tile are neighbours
  return index ^ (index / U::kX & (U::kX - 1));
}
template <class U>
__device__ __forceinline__ int slot_of(bool is_v, int index) {
  return is_v ? v_slot<U>(index) : k_slot<U>(index % kUnitTokens, index / kUnitTokens);
}

// V tile of a thread: eight token rows of x dimensions. In shuffled order these are x vectors of which the thread owns
// eight tokens each: whole vectors for 2-byte elements, halves for 1-byte ones. `row0` is the first of the tokens.
template <class U>
__device__ __forceinline__ int v_tile_index(int D, int row0, int vec, int j) {
  return (U::kX == 8 ? row0 / 8 * D : 0) + vec * U::kX + j;
}

// 4x4 transpose of bytes held as four words.
__device__ __forceinline__ void transpose_bytes(unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
  const unsigned ab_low = byte_perm<0x5140>(a, b), ab_high = byte_perm<0x7362>(a, b);
  const unsigned cd_low = byte_perm<0x5140>(c, d), cd_high = byte_perm<0x7362>(c, d);
  a = byte_perm<0x5410>(ab_low, cd_low);
  b = byte_perm<0x7632>(ab_low, cd_low);
  c = byte_perm<0x5410>(ab_high, cd_high);
  d = byte_perm<0x7632>(ab_high, cd_high);
}

// A thread's V tile from token rows into LDS in shuffled order. A word of every row at a time, so that few registers
// are in flight beside the tile.
template <class U, int D>
__device__ __forceinline__ void v_rows_to_lds(int row0, int vec, const Vec16 (&data)[kVectors], Vec16* lds) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (U::kX == 8) {  // dimensions 2 * w and 2 * w + 1
      Vec16 even, odd;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        even.w[r] = byte_perm<0x5410>(data[2 * r].w[w], data[2 * r + 1].w[w]);
        odd.w[r] = byte_perm<0x7632>(data[2 * r].w[w], data[2 * r + 1].w[w]);
      }
      lds[v_slot<U>(v_tile_index<U>(D, row0, vec, 2 * w))] = even;
      lds[v_slot<U>(v_tile_index<U>(D, row0, vec, 2 * w + 1))] = odd;
    } else {  // dimensions 4 * w .. 4 * w + 3
      unsigned low[4], high[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        low[r] = data[r].w[w];
        high[r] = data[4 + r].w[w];
      }
      transpose_bytes(low[0], low[1], low[2], low[3]);
      transpose_bytes(high[0], high[1], high[2], high[3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Vec16* const slot = lds + v_slot<U>(v_tile_index<U>(D, row0, vec, 4 * w + j));
        reinterpret_cast<Vec8*>(slot)[row0 / 8] = Vec8{{low[j], high[j]}};
      }
    }
  }
}

// The reverse: a thread's V tile from LDS in shuffled order to token rows.
template <class U, int D>
__device__ __forceinline__ void v_rows_from_lds(int row0, int vec, Vec16 (&data)[kVectors], const Vec16* lds) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (U::kX == 8) {
      const Vec16 even = lds[v_slot<U>(v_tile_index<U>(D, row0, vec, 2 * w))];
      const Vec16 odd = lds[v_slot<U>(v_tile_index<U>(D, row0, vec, 2 * w + 1))];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        data[2 * r].w[w] = byte_perm<0x5410>(even.w[r], odd.w[r]);
        data[2 * r + 1].w[w] = byte_perm<0x7632>(even.w[r], odd.w[r]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Vec16* const slot = lds + v_slot<U>(v_tile_index<U>(D, row0, vec, 4 * w + j));
        const Vec8 eight = reinterpret_cast<const Vec8*>(slot)[row0 / 8];
        data[j].w[w] = eight.w[0];
        data[4 + j].w[w] = eight.w[1];
      }
      transpose_bytes(data[0].w[w], data[1].w[w], data[2].w[w], data[3].w[w]);
      transpose_bytes(data[4].w[w], data[5].w[w], data[6].w[w], data[7].w[w]);
    }
  }
}

}  // namespace fi
