// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// In-place page conversion on a GPU: a fast kernel for `standard` <-> `shuffled` with 2-byte elements, and a generic
// one for every other pair, driven by the offset function of page_convert.h.
#include "kernels/page_convert.h"

#include <type_traits>

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"

namespace fi {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Fast kernel.
//
// A unit is 16 tokens of one head: 2 * D vectors of K and as many of V (a vector is 16 bytes, x = 8 elements). A
// workgroup holds a tile of up to 64 KiB of units in registers, eight vectors a thread: the first half of the threads
// carry K, the second half V. Everything the workgroup reads is in registers before it writes, which makes the
// conversion safe in place. Both halves then pass through the same 32 KiB of LDS, one after the other, so that global
// accesses are contiguous runs on both sides; 32 KiB lets two workgroups share a gfx942 CU (64 KiB of LDS each).
//
// V is transposed in 8x8 tiles: eight vectors (8 tokens of 8 head dimensions) become eight vectors (8 head dimensions
// of 8 tokens) inside one thread.
//
// LDS slots are XOR-swizzled so that neither the scattered nor the contiguous side conflicts.

constexpr int kUnitTokens = 16;
constexpr int kX = 8;           // elements to a vector
constexpr int kVectors = 8;     // vectors a thread holds
constexpr int kTileThreads = 512;
constexpr int kInvalidConfiguration = 9;  // cudaErrorInvalidConfiguration and hipErrorInvalidConfiguration

template <int D>
struct Unit {
  static constexpr int kRowVectors = D / kX;                    // K (or V) vectors of one token
  static constexpr int kHalfVectors = kUnitTokens * kRowVectors;  // K (or V) vectors of the unit
  static constexpr int kThreads = kHalfVectors / kVectors;      // threads that carry one half
  static constexpr int kRowsPerStep = kThreads / kRowVectors;     // rows that they cover with one vector each
  static constexpr int kPerTile = kTileThreads / (2 * kThreads);  // units of a full tile
};

// Vector index inside a half-unit. `standard` order: token row by token row. `shuffled` order: K [D/x][16], V [2][D].
template <int D>
__device__ __forceinline__ int shuffled_k_index(int n, int dv) {
  return dv * kUnitTokens + n;
}
template <int D>
__device__ __forceinline__ int shuffled_v_index(int nt, int d) {
  return nt * D + d;
}

// LDS slot of a vector: K spreads the tokens of equal dv, V the dimensions of a tile, over the banks.
template <int D>
__device__ __forceinline__ int k_slot(int n, int dv) {
  return shuffled_k_index<D>(n, dv) ^ (dv & (kUnitTokens - 1));
}
template <int D>
__device__ __forceinline__ int v_slot(int nt, int d) {
  return shuffled_v_index<D>(nt, d) ^ ((d / kX) & (kX - 1));
}

// Where a unit lives. Byte addresses of its first vector in either format.
struct Place {
  uint8_t* k;  // K plane of the page
  uint8_t* v;  // V plane of the page
  int h;       // head
  int g;       // group of 16 tokens
};

// `standard` byte position of (n, kv, vector) relative to the page; the page's second half lives in the V plane.
template <int D>
__device__ __forceinline__ uint8_t* standard_at(const Place& p, int N, int half, int n, int kv, int vec) {
  const int at = ((p.h * N + p.g * kUnitTokens + n) * 2 + kv) * (D * 2) + vec * 16;
  return at >= half ? p.v + (at - half) : p.k + at;
}

template <int D>
__device__ __forceinline__ uint8_t* shuffled_k_at(const Place& p, int N, int index) {
  const int dv = index / kUnitTokens, n = index % kUnitTokens;
  return p.k + ((p.h * (D / kX) + dv) * N + p.g * kUnitTokens + n) * 16;
}
template <int D>
__device__ __forceinline__ uint8_t* shuffled_v_at(const Place& p, int N, int index) {
  return p.v + (p.h * (N * D / kX) + p.g * (kUnitTokens / kX) * D + index) * 16;
}

// Transpose an 8x8 tile of 16-bit elements held as eight vectors.
__device__ __forceinline__ void transpose_tile(Vec16 (&t)[kVectors]) {
  Vec16 out[kVectors];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {  // columns 2 * pair and 2 * pair + 1 are one word of every row
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      out[2 * pair].w[w] = pack_low_halves(t[2 * w].w[pair], t[2 * w + 1].w[pair]);
      out[2 * pair + 1].w[w] = pack_high_halves(t[2 * w].w[pair], t[2 * w + 1].w[pair]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) t[i] = out[i];
}

struct Tiling {
  int units_per_page;
  int units_per_group;  // units a workgroup holds
  int groups_per_page;  // workgroups that share a page (1 for pages of at most a tile)
  int pages_per_group;  // pages a workgroup holds (1 for larger pages)
  int items;            // pages x layers
};

// Place of unit `unit` counted from the first unit of item `item0`; false past the end or for a bad block id.
__device__ __forceinline__ bool find_place(const ConvertParams& p, const Tiling& t, int item0, int unit, Place* place) {
  const int item = item0 + unit / t.units_per_page;
  if (item >= t.items || (t.groups_per_page > 1 && unit >= t.units_per_page)) return false;
  const int layer = item / int(p.num_blocks);
  const int block = item - layer * int(p.num_blocks);
  const int64_t page = p.block_ids[block];
  if (page < 0 || page >= p.num_pages) {
    report(p.fault, kOpConvert << 8 | kBlockIdRange, block, page, p.num_pages);
    return false;
  }
  const int in_page = unit % t.units_per_page;
  const int groups = p.page_size / kUnitTokens;
  place->k = p.planes.k[layer] + page * p.k_stride;
  place->v = p.planes.v[layer] + page * p.v_stride;
  place->h = in_page / groups;
  place->g = in_page - place->h * groups;
  return true;
}

// Hand-over between the workgroups that share a page: nobody writes before all have read.
__device__ __forceinline__ void wait_for_page(unsigned* arrived, unsigned target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (load_counter(arrived) < target) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Eight vectors of thread `lane` of half `is_v` of a unit.
template <int D, bool kToShuffled>
__device__ __forceinline__ void load_half(const Place& from, int N, int half, bool is_v, int lane,
                                          Vec16 (&data)[kVectors]) {
  using U = Unit<D>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (kToShuffled) {
      // K: lanes run along rows. V: a lane walks down the rows of its 8x8 tile.
      const int row = lane / U::kRowVectors, vec = lane % U::kRowVectors;
      const int n = is_v ? row * kX + i : i * U::kRowsPerStep + row;
      data[i] = load_vec<Vec16>(standard_at<D>(from, N, half, n, is_v ? 1 : 0, vec));
    } else {
      const int index = i * U::kThreads + lane;
      data[i] = load_vec<Vec16>(is_v ? shuffled_v_at<D>(from, N, index) : shuffled_k_at<D>(from, N, index));
    }
  }
}

// LDS slot of the vector at `index` of the shuffled order.
template <int D>
__device__ __forceinline__ int shuffled_slot(bool is_v, int index) {
  return is_v ? v_slot<D>(index / D, index % D) : k_slot<D>(index % kUnitTokens, index / kUnitTokens);
}

template <int D, bool kToShuffled>
__device__ __forceinline__ void half_to_lds(bool is_v, int lane, Vec16 (&data)[kVectors], Vec16* lds) {
  using U = Unit<D>;
  const int row = lane / U::kRowVectors, vec = lane % U::kRowVectors;
  if (kToShuffled && is_v) transpose_tile(data);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int slot = !kToShuffled ? shuffled_slot<D>(is_v, i * U::kThreads + lane)
                     : is_v       ? v_slot<D>(row, vec * kX + i)
                                  : k_slot<D>(i * U::kRowsPerStep + row, vec);
    lds[slot] = data[i];
  }
}

// One workgroup's share: units `unit0` onwards of the pages from item `item0` on.
template <int D, bool kToShuffled>
__device__ __forceinline__ void convert_tile(const ConvertParams& p, const Tiling& t, int item0, int unit0,
                                             unsigned* arrived, unsigned target, Vec16* lds) {
  using U = Unit<D>;
  const int N = p.page_size;
  const int half = p.num_heads * N * D * 2;  // a page is at most 4 MiB here

  // As a loader a thread belongs to one half of a unit; as a storer to a whole unit.
  const int half_threads = t.units_per_group * U::kThreads;
  const bool is_v = int(threadIdx.x) >= half_threads;
  const int q = int(threadIdx.x) - (is_v ? half_threads : 0);
  const int unit = q / U::kThreads, lane = q % U::kThreads;
  const int unit_out = int(threadIdx.x) / (2 * U::kThreads), lane_out = int(threadIdx.x) % (2 * U::kThreads);
  Place from, to;
  const bool loads = find_place(p, t, item0, unit0 + unit, &from);
  const bool stores = find_place(p, t, item0, unit0 + unit_out, &to);

  Vec16 data[kVectors];
  if (loads) load_half<D, kToShuffled>(from, N, half, is_v, lane, data);
  if (t.groups_per_page > 1) {
    wait_for_page(arrived, target);
  } else {
    __syncthreads();
  }

  Vec16* const own = lds + unit * U::kHalfVectors;
  const Vec16* const out = lds + unit_out * U::kHalfVectors;
  if (loads && !is_v) half_to_lds<D, kToShuffled>(false, lane, data, own);
  __syncthreads();
  if (stores) {
#pragma unroll
    for (int i = 0; i < kVectors / 2; ++i) {
      const int index = i * 2 * U::kThreads + lane_out;
      if (kToShuffled) {
        store_vec(shuffled_k_at<D>(to, N, index), out[shuffled_slot<D>(false, index)]);
      } else {
        const int n = index / U::kRowVectors, vec = index % U::kRowVectors;
        store_vec(standard_at<D>(to, N, half, n, 0, vec), out[k_slot<D>(n, vec)]);
      }
    }
  }
  __syncthreads();
  if (loads && is_v) half_to_lds<D, kToShuffled>(true, lane, data, own);
  __syncthreads();
  if (kToShuffled) {
    if (!stores) return;
#pragma unroll
    for (int i = 0; i < kVectors / 2; ++i) {
      const int index = i * 2 * U::kThreads + lane_out;
      store_vec(shuffled_v_at<D>(to, N, index), out[shuffled_slot<D>(true, index)]);
    }
  } else if (loads && is_v) {
    // Back to rows: V leaves LDS as 8x8 tiles and is transposed on the way to its rows.
    const int row = lane / U::kRowVectors, vec = lane % U::kRowVectors;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) data[i] = own[v_slot<D>(row, vec * kX + i)];
    transpose_tile(data);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) store_vec(standard_at<D>(from, N, half, row * kX + i, 1, vec), data[i]);
  }
}

template <int D, bool kToShuffled>
__global__ FI_LAUNCH_BOUNDS(kTileThreads, 2) void convert_pages_kernel(const ConvertParams p, const Tiling t) {
  __shared__ Vec16 lds[Unit<D>::kHalfVectors * Unit<D>::kPerTile];
  convert_tile<D, kToShuffled>(p, t, int(blockIdx.x) * t.pages_per_group, 0, nullptr, 0, lds);
}

// Pages larger than a tile: clusters of workgroups, each cluster a page at a time. Tickets number the workgroups in the
// order in which they start, so the members of a cluster are running together, or will be without waiting for others.
template <int D, bool kToShuffled>
__global__ FI_LAUNCH_BOUNDS(kTileThreads, 1) void convert_large_pages_kernel(const ConvertParams p, const Tiling t) {
  __shared__ Vec16 lds[Unit<D>::kHalfVectors * Unit<D>::kPerTile];
  if (threadIdx.x == 0) lds[0].w[0] = atomicAdd(p.tickets, 1u);
  __syncthreads();
  const int ticket = int(lds[0].w[0]);
  const int cluster = ticket / t.groups_per_page, clusters = int(gridDim.x) / t.groups_per_page;
  const int unit0 = (ticket - cluster * t.groups_per_page) * t.units_per_group;
  unsigned target = 0;
  for (int item = cluster; item < t.items; item += clusters) {
    target += unsigned(t.groups_per_page);
    convert_tile<D, kToShuffled>(p, t, item, unit0, p.tickets + 1 + cluster, target, lds);
    __syncthreads();
  }
}

template <int D, bool kToShuffled>
int launch_fast(const ConvertParams& p, gpuStream_t stream) {
  using U = Unit<D>;
  Tiling t{};
  t.units_per_page = p.num_heads * (p.page_size / kUnitTokens);
  t.items = int(p.num_blocks) * p.num_layers;
  t.groups_per_page = (t.units_per_page + U::kPerTile - 1) / U::kPerTile;
  if (t.groups_per_page == 1) {
    t.pages_per_group = U::kPerTile / t.units_per_page;
    t.units_per_group = t.pages_per_group * t.units_per_page;
    const int grid = (t.items + t.pages_per_group - 1) / t.pages_per_group;
    convert_pages_kernel<D, kToShuffled><<<grid, t.units_per_group * 2 * U::kThreads, 0, stream>>>(p, t);
    return gpu_last_error();
  }
  t.pages_per_group = 1;
  t.units_per_group = U::kPerTile;
  int units = 0;
  if (const int error = gpu_multiprocessors(&units)) return error;
  // One workgroup of this size fits every multiprocessor, so this many are resident together.
  const int clusters = units / t.groups_per_page;
  if (clusters == 0) return kInvalidConfiguration;
  const int grid = (clusters < t.items ? clusters : t.items) * t.groups_per_page;
  convert_large_pages_kernel<D, kToShuffled><<<grid, kTileThreads, 0, stream>>>(p, t);
  return gpu_last_error();
}

// ---------------------------------------------------------------------------------------------------------------
// Generic kernel: a workgroup copies a page to its scratch page, then gathers the converted page back from there. The
// scratch pages stay in the last-level cache, and their number does not grow with the request.

constexpr int kGenericThreads = 256;

template <typename Element, bool kVectors16>
__global__ __launch_bounds__(kGenericThreads) void convert_any_kernel(const ConvertParams p) {
  const PageGeometry g{p.num_heads, p.page_size, p.head_dim, int(sizeof(Element))};
  using Move = typename std::conditional<kVectors16, Vec16, Element>::type;
  constexpr int kCount = int(sizeof(Move) / sizeof(Element));
  const int moves = int(g.half_bytes() / int(sizeof(Move)));  // in half a page
  uint8_t* const scratch = p.scratch + int64_t(blockIdx.x) * 2 * g.half_bytes();
  const PageKind src = PageKind(p.src), dst = PageKind(p.dst);
  const int items = int(p.num_blocks) * p.num_layers;
  for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
    const int layer = item / int(p.num_blocks);
    const int block = item - layer * int(p.num_blocks);
    const int64_t page = p.block_ids[block];
    if (page < 0 || page >= p.num_pages) {
      report(p.fault, kOpConvert << 8 | kBlockIdRange, block, page, p.num_pages);
      continue;
    }
    uint8_t* const k = p.planes.k[layer] + page * p.k_stride;
    uint8_t* const v = p.planes.v[layer] + page * p.v_stride;
    for (int i = int(threadIdx.x); i < moves; i += kGenericThreads) {
      store_vec(scratch + int64_t(i) * int(sizeof(Move)), load_vec<Move>(k + int64_t(i) * int(sizeof(Move))));
      store_vec(scratch + g.half_bytes() + int64_t(i) * int(sizeof(Move)),
                load_vec<Move>(v + int64_t(i) * int(sizeof(Move))));
    }
    __syncthreads();
    for (int i = int(threadIdx.x); i < 2 * moves; i += kGenericThreads) {
      int64_t first, step;
      g.source_of(src, dst, i * kCount, &first, &step);
      union {
        Move whole;
        Element part[kCount];
      } out;
      if (kVectors16 && step == int(sizeof(Element))) {
        out.whole = load_vec<Move>(scratch + first);
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j) out.part[j] = load_vec<Element>(scratch + first + j * step);
      }
      uint8_t* const half = i < moves ? k : v;
      store_vec(half + int64_t(i < moves ? i : i - moves) * int(sizeof(Move)), out.whole);
    }
    __syncthreads();
  }
}

template <typename Element>
int launch_any(const ConvertParams& p, gpuStream_t stream) {
  const int64_t items = p.num_blocks * p.num_layers;
  const int grid = static_cast<int>(items < p.scratch_pages ? items : p.scratch_pages);
  if (convert_is_aligned(p)) {
    convert_any_kernel<Element, true><<<grid, kGenericThreads, 0, stream>>>(p);
  } else {
    convert_any_kernel<Element, false><<<grid, kGenericThreads, 0, stream>>>(p);
  }
  return gpu_last_error();
}

template <bool kToShuffled>
int launch_fast_dim(const ConvertParams& p, gpuStream_t stream) {
  switch (p.head_dim) {
    case 64:
      return launch_fast<64, kToShuffled>(p, stream);
    case 128:
      return launch_fast<128, kToShuffled>(p, stream);
    default:
      return launch_fast<256, kToShuffled>(p, stream);
  }
}

}  // namespace

int convert_kv_pages(const ConvertParams& p, void* stream_) {
  if (p.num_blocks == 0 || p.num_layers == 0 || p.src == p.dst) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  if (convert_is_fast(p)) {
    return p.dst == int32_t(PageKind::kShuffled) ? launch_fast_dim<true>(p, stream) : launch_fast_dim<false>(p, stream);
  }
  switch (p.element_bytes) {
    case 1:
      return launch_any<unsigned char>(p, stream);
    case 2:
      return launch_any<unsigned short>(p, stream);
    default:
      return launch_any<unsigned>(p, stream);
  }
}

}  // namespace fi
