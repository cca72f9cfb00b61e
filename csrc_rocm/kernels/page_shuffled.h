// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Append to shuffled pages. V holds x = 16 / element tokens side by side, so a token by itself is written in pieces of
// one element (11% of a copy's rate on an H200). Where x consecutive rows are x consecutive tokens that begin at a
// multiple of x, they make whole vectors: such a group is turned in LDS, and K with it, whose tokens of one column are
// neighbours. Rows outside such groups (decode steps, the ends of a prompt) are scattered.
//
// A workgroup has a window of 16 rows. It writes the groups that begin there, wherever they end, and the window's rows
// that no group has. So prompts may begin at any row.
#pragma once

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"
#include "kernels/page.h"
#include "kernels/page_rows.h"

namespace fi {

constexpr int kTileRows = 16;

// `kColumns` vectors of a row's K, and of its V: 32 to read 512 bytes in a run, 16 for rows that have no more.
template <int kElement, int kColumns_>
struct Tile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = kTileRows / 2 * kColumns;  // two tokens of a column each
  static constexpr int kX = 16 / kElement;
  static constexpr int kGroups = kTileRows / kX;          // at most this many begin in a window
  static constexpr int kDims = kColumns * kX;             // elements of a tile's row
  static constexpr int kLook = kTileRows + 2 * (kX - 1);  // rows that can belong to a group of the window's
};

// A group's place, and its first row in the window; row -1 where there is none.
struct Group {
  Slot slot;
  int row;
};

// Slots of K and V in LDS, XOR-swizzled so that neither the side that follows rows nor the one that follows tokens
// meets the same bank over and over.
__device__ __forceinline__ int tile_k_slot(int column, int n) {
  return column * kTileRows + (n ^ (column & (kTileRows - 1)));
}
template <class T>
__device__ __forceinline__ int tile_v_slot(int unit) {  // of the group's order: x tokens of one dimension are a unit
  return unit ^ (unit / T::kX & (T::kX - 1));
}

// Finds the groups and the rows that none has. Ends with a barrier.
template <class T>
__device__ __forceinline__ void find_groups(const AppendParams& p, Slot* slots, Group* groups, unsigned* leaders,
                                            unsigned* strays) {
  const int t = int(threadIdx.x);
  if (t == 0) *leaders = *strays = 0;
  if (t < T::kLook) {
    const int64_t row = int64_t(blockIdx.x) * kTileRows + t - (T::kX - 1);
    slots[t] = row >= 0 && row < p.table.nnz ? find_slot(p.table, row, kOpAppend, p.fault) : Slot{0, -1};
  }
  __syncthreads();
  if (t < kTileRows) {
    const Slot own = slots[t + T::kX - 1];
    if (own.token >= 0) {
      const int in_group = own.token % T::kX;
      const Slot* const first = slots + t + T::kX - 1 - in_group;
      bool whole = true;
#pragma unroll
      for (int j = 0; j < T::kX; ++j) {
        whole &= first[j].page == own.page && first[j].token == own.token - in_group + j;
      }
      if (!whole) {
        atomicOr(strays, 1u << t);
      } else if (in_group == 0) {
        atomicOr(leaders, 1u << t);
      }
    }
  }
  __syncthreads();
  if (t < T::kGroups) {
    unsigned left = *leaders;
    for (int i = 0; i < t; ++i) left &= left - 1;
    const int row = __ffs(int(left)) - 1;
    groups[t] = Group{row < 0 ? Slot{0, -1} : slots[row + T::kX - 1], row};
  }
  __syncthreads();
}

// Two tokens of V into LDS, a pair of elements at a time; `n` is even.
template <class T>
__device__ __forceinline__ void v_pair_to_lds(int column, int n, const Vec16& a, const Vec16& b, Vec16* lds) {
  const int unit0 = n / T::kX * T::kDims + column * T::kX, pair = n % T::kX / 2;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (T::kX == 4) {
      reinterpret_cast<Vec8*>(lds + tile_v_slot<T>(unit0 + w))[pair] = Vec8{{a.w[w], b.w[w]}};
    } else if constexpr (T::kX == 8) {
      reinterpret_cast<unsigned*>(lds + tile_v_slot<T>(unit0 + 2 * w))[pair] = byte_perm<0x5410>(a.w[w], b.w[w]);
      reinterpret_cast<unsigned*>(lds + tile_v_slot<T>(unit0 + 2 * w + 1))[pair] = byte_perm<0x7632>(a.w[w], b.w[w]);
    } else {
      const unsigned low = byte_perm<0x5140>(a.w[w], b.w[w]), high = byte_perm<0x7362>(a.w[w], b.w[w]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned both = j < 2 ? low : high;
        reinterpret_cast<unsigned short*>(lds + tile_v_slot<T>(unit0 + 4 * w + j))[pair] =
            static_cast<unsigned short>(j % 2 ? both >> 16 : both & 0xffffu);
      }
    }
  }
}

// Writes a tile from LDS. K: 16 tokens of a column are neighbours; V: all dimensions of a head are.
template <class T>
__device__ __forceinline__ void store_tile(const AppendParams& p, const Divisor& per_head, int columns, int column0,
                                           const Group* groups, const Vec16* k_lds, const Vec16* v_lds) {
  const int vecs_per_head = int(per_head.by), head_dim = vecs_per_head * T::kX;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int o = int(threadIdx.x) + i * T::kThreads;
    const int n = o % kTileRows, column = o / kTileRows;
    const Group g = groups[n / T::kX];
    if (g.row >= 0 && column0 + column < columns) {
      const int head = per_head(column0 + column), c = (column0 + column - head * vecs_per_head) * 16;
      const Slot slot{g.slot.page, g.slot.token + n % T::kX};
      store_vec(shuffled_k_at(p.k, slot, head, c, p.table.page_size), k_lds[tile_k_slot(column, n)]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int o = int(threadIdx.x) + i * T::kThreads;
    const int dim = o % T::kDims, column = dim / T::kX;
    const Group g = groups[o / T::kDims];
    if (g.row >= 0 && column0 + column < columns) {
      const int head = per_head(column0 + column), d = column0 * T::kX + dim - head * head_dim;
      store_vec(shuffled_v_at(p.v, g.slot, head, d, head_dim, 16 / T::kX), v_lds[tile_v_slot<T>(o)]);
    }
  }
}

template <int kElement, RowKind kFrom, int kColumns>
__global__ __launch_bounds__(kTileRows / 2 * kColumns) void append_shuffled_kernel(const AppendParams p,
                                                                                   const Divisor per_head,
                                                                                   int columns) {
  using T = Tile<kElement, kColumns>;
  using Held = Piece<Vec16, kFrom>;
  __shared__ Vec16 k_lds[kTileRows * kColumns], v_lds[kTileRows * kColumns];
  __shared__ Slot slots[T::kLook];
  __shared__ Group groups[T::kGroups];
  __shared__ unsigned leaders, strays;
  find_groups<T>(p, slots, groups, &leaders, &strays);

  const int64_t window = int64_t(blockIdx.x) * kTileRows;
  const int lane = int(threadIdx.x) % kColumns, n = int(threadIdx.x) / kColumns * 2;
  const int step = int(gridDim.y) * kColumns;
  const bool any_group = leaders != 0;
  const int group_row = groups[n / T::kX].row;
  const int64_t row = window + group_row + n % T::kX;
  Held k[2], v[2];
  auto load = [&](int column) {
    if (group_row < 0 || column >= columns) return;
    const int head = per_head(column), c = (column - head * int(per_head.by)) * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      k[i].load(row_at(p.k, row + i, head), c);
      v[i].load(row_at(p.v, row + i, head), c);
    }
  };
  load(int(blockIdx.y) * kColumns + lane);
  for (int column0 = int(blockIdx.y) * kColumns; column0 < columns; column0 += step) {
    if (any_group) {
      if (group_row >= 0 && column0 + lane < columns) {
        k_lds[tile_k_slot(lane, n)] = k[0].stored(p.k.quantizer);
        k_lds[tile_k_slot(lane, n + 1)] = k[1].stored(p.k.quantizer);
        v_pair_to_lds<T>(lane, n, v[0].stored(p.v.quantizer), v[1].stored(p.v.quantizer), v_lds);
      }
      __syncthreads();
      load(column0 + step + lane);
      store_tile<T>(p, per_head, columns, column0, groups, k_lds, v_lds);
      __syncthreads();
    }
    const int column = column0 + lane;
    if (strays == 0 || column >= columns) continue;
    const int head = per_head(column), c = (column - head * int(per_head.by)) * 16;
    for (int r = n / 2; r < kTileRows; r += kTileRows / 2) {
      if ((strays >> r & 1) == 0) continue;
      Held one_k, one_v;
      one_k.load(row_at(p.k, window + r, head), c);
      one_v.load(row_at(p.v, window + r, head), c);
      const Slot slot = slots[r + T::kX - 1];
      store_vec(shuffled_k_at(p.k, slot, head, c, p.table.page_size), one_k.stored(p.k.quantizer));
      scatter_v<kElement>(p.v, slot, head, c, int(per_head.by) * T::kX, one_v.stored(p.v.quantizer));
    }
  }
}

template <int kElement, RowKind kFrom, int kColumns>
int launch_tiles(const AppendParams& p, gpuStream_t stream) {
  const int vecs_per_head = p.head_bytes / 16;
  const int64_t columns = int64_t(vecs_per_head) * p.num_heads;
  const int64_t windows = (p.table.nnz + kTileRows - 1) / kTileRows;
  const int64_t chunks = (columns + kColumns - 1) / kColumns;
  int units = 0;
  if (const int error = gpu_multiprocessors(&units)) return error;
  // A workgroup takes all columns of its window, one tile after the other, unless that leaves the machine empty.
  constexpr int kBlocksPerUnit = 8;
  const int64_t spread = (int64_t{kBlocksPerUnit} * units + windows - 1) / windows;
  const dim3 grid(static_cast<unsigned>(windows), static_cast<unsigned>(spread < chunks ? spread : chunks));
  const Divisor per_head(static_cast<uint64_t>(vecs_per_head), static_cast<uint64_t>(columns));
  append_shuffled_kernel<kElement, kFrom, kColumns>
      <<<grid, kTileRows / 2 * kColumns, 0, stream>>>(p, per_head, static_cast<int>(columns));
  return gpu_last_error();
}

// For addresses and strides that are multiples of 16 bytes.
template <int kElement, RowKind kFrom>
int launch_shuffled(const AppendParams& p, gpuStream_t stream) {
  return int64_t(p.head_bytes) * p.num_heads <= 16 * 16 ? launch_tiles<kElement, kFrom, 16>(p, stream)
                                                        : launch_tiles<kElement, kFrom, 32>(p, stream);
}

}  // namespace fi
