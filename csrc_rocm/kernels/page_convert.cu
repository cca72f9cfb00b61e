// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Page conversion on a GPU, in place or from pool to pool: a fast kernel for `standard` <-> `shuffled` with the common
// geometries, and a generic one for every other pair, driven by the offset function of page_convert.h.
#include "kernels/page_convert.h"

#include <type_traits>

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"
#include "kernels/page_convert_tile.h"

namespace fi {
namespace {

constexpr int kStoreUnroll = 2;  // four would spill at 64 registers, which is what two workgroups leave on sm_90
constexpr int kInvalidConfiguration = 9;  // cudaErrorInvalidConfiguration and hipErrorInvalidConfiguration

// ---------------------------------------------------------------------------------------------------------------
// Fast kernel. A workgroup holds a tile of up to 64 KiB of units in registers, eight vectors a thread. Everything that
// it reads is in registers before it writes, which makes the conversion safe in place.

struct Tiling {
  int units_per_page;
  int units_per_group;  // units a workgroup holds
  int groups_per_page;  // workgroups that share a page (1 for pages of at most a tile)
  int pages_per_group;  // pages a workgroup holds (1 for larger pages)
  int items;            // pages x layers
};

struct Place {
  uint8_t* k;  // the page in the K plane
  uint8_t* v;  // and in the V plane
};

// The page of one item in a pool. For a bad block id it is page 0, to be read but not written, and the result false.
__device__ __forceinline__ bool find_page(const ConvertParams& p, const Planes& planes, FaultCode code, int item,
                                          Place* place) {
  const int layer = item / int(p.num_blocks);
  const int block = item - layer * int(p.num_blocks);
  int64_t page = planes.ids[block];
  const bool valid = page >= 0 && page < planes.num_pages;
  if (!valid) {
    report(p.fault, kOpConvert << 8 | code, block, page, planes.num_pages);
    page = 0;
  }
  place->k = planes.k[layer] + page * planes.k_stride;
  place->v = planes.v[layer] + page * planes.v_stride;
  return valid;
}

// Eight token rows, from `row0` on, of the unit of head `h` and 16-token group `g` in a standard page. The page's first
// half of rows lives in the K plane and the second in the V plane, whatever they hold; H * N / 2 is a multiple of
// eight, so eight rows never straddle. `tokens` is the size of its token blocks.
template <class U>
__device__ __forceinline__ uint8_t* standard_rows(const Place& place, int H, int N, int tokens, int h, int g,
                                                  int row0) {
  const int n = g * kUnitTokens, block = n / tokens;
  const int row = (block * H + h) * tokens + (n - block * tokens) + row0, half_rows = H * N / 2;
  return row < half_rows ? place.k + row * U::kRowBytes : place.v + (row - half_rows) * U::kRowBytes;
}

template <class U>
__device__ __forceinline__ ShuffledUnit<U> shuffled_unit(const Place& place, int N, int h, int g) {
  const int head = h * N * (U::kRowBytes / 2);
  return {place.k + head + g * (kUnitTokens * 16), place.v + head + g * (U::kHalfVectors * 16), N * 16};
}

// Meeting point of the workgroups that share a page. Counters are reused in a ring; `before` is what the pages that had
// this one earlier have left in it, and nobody adds to it before they all have.
struct Meeting {
  unsigned* arrived;
  unsigned before;
  unsigned target;
};

// Makes a thread's loads return before it goes on: their sum decides about a store to LDS that is overwritten anyway.
// Not to slot 0, where other threads may still be reading the workgroup's ticket.
__device__ __forceinline__ void await_loads(const Vec16 (&data)[kVectors], Vec16* lds) {
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum ^= data[i].w[0] ^ data[i].w[1] ^ data[i].w[2] ^ data[i].w[3];
  if (sum == 0x5eed1e55u) lds[threadIdx.x + 1].w[0] = sum;
}

// Nobody writes to the page before all have read it. Relaxed atomics will do: only loads must come before the others'
// stores, and they have returned. A device-wide fence would also write back the L2 of gfx942, and cost 12% on an H200.
__device__ __forceinline__ void wait_for_page(const Meeting& m) {
  __syncthreads();
  if (threadIdx.x == 0) {
    // Not in the first lap: a look costs the way to the last-level cache and back.
    while (m.before > 0 && load_counter(m.arrived) < m.before) {
    }
    atomicAdd(m.arrived, 1u);
    while (load_counter(m.arrived) < m.target) {
    }
  }
  __syncthreads();
}

template <Recode kMode>
__device__ __forceinline__ void recode_vectors(Vec16 (&data)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) data[i].w[w] = recode_word(kMode, data[i].w[w]);
  }
}

// One branch a tile, not one a word.
__device__ __forceinline__ void recode_tile(Recode mode, Vec16 (&data)[kVectors]) {
  switch (mode) {
    case Recode::kOcpToFnuzScaled:
      return recode_vectors<Recode::kOcpToFnuzScaled>(data);
    case Recode::kFnuzToOcpScaled:
      return recode_vectors<Recode::kFnuzToOcpScaled>(data);
    case Recode::kOcpToFnuzByValue:
      return recode_vectors<Recode::kOcpToFnuzByValue>(data);
    case Recode::kFnuzToOcpByValue:
      return recode_vectors<Recode::kFnuzToOcpByValue>(data);
    default:
      return;
  }
}

template <class U>
__device__ __forceinline__ void store_rows(uint8_t* at, const Vec16 (&rows)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) store_vec(at + i * U::kRowBytes, rows[i]);
}

// One workgroup's share: units `unit0` onwards of the pages from item `item0` on.
//
// A unit's threads stand in two rows of eight tokens. In a row, each thread owns one 16-byte column of the token's K
// and V: the columns of K come first. So `standard` is read and written in whole token rows, and a V thread's eight
// vectors are the tile that its transpose needs. In shuffled order every thread takes the next vector, K and V alike.
template <class U, int D, bool kToShuffled, bool kLarge>
__device__ __forceinline__ void convert_tile(const ConvertParams& p, const Tiling& t, int item0, int unit0,
                                             const Meeting& meeting, Vec16* lds) {
  const int unit = int(threadIdx.x) / U::kThreads, lane = int(threadIdx.x) % U::kThreads;
  const int row0 = lane / U::kColumns * kVectors, column = lane % U::kColumns;
  const bool is_v = column >= U::kRowVectors;
  const int vec = is_v ? column - U::kRowVectors : column;
  // Units past the end are the last unit again: it is read and written twice with the same values, which costs less
  // than a predicate around everything.
  int item = item0, in_page = unit0 + unit;
  if constexpr (kLarge) {
    in_page = in_page < t.units_per_page ? in_page : t.units_per_page - 1;
  } else {
    item += in_page / t.units_per_page;
    in_page %= t.units_per_page;
    item = item < t.items ? item : t.items - 1;
  }
  const int N = p.page_size, groups = N / kUnitTokens;
  const int h = in_page / groups, g = in_page - h * groups;
  Place from, to;
  bool valid = find_page(p, p.from, read_fault(p), item, &from);
  valid = find_page(p, p.to, kBlockIdRange, item, &to) && valid;
  const int tokens = kToShuffled ? p.src.tokens : p.dst.tokens;
  uint8_t* const rows_at = standard_rows<U>(kToShuffled ? from : to, p.num_heads, N, tokens, h, g, row0) + column * 16;
  const auto shuffled = shuffled_unit<U>(kToShuffled ? to : from, N, h, g);
  Vec16* const own = lds + unit * U::kHalfVectors;

  Vec16 data[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const bool v_half = i >= kVectors / 2;
    data[i] = load_vec<Vec16>(kToShuffled ? rows_at + i * U::kRowBytes
                                          : shuffled.at(v_half, i % (kVectors / 2) * U::kThreads + lane));
  }
  // Nobody writes to a page before all of it is in registers.
  if (kLarge && p.in_place) {
    await_loads(data, lds);
    wait_for_page(meeting);
  } else {
    __syncthreads();
  }
  if constexpr (U::kX == 16) recode_tile(p.recode, data);

  Vec16 rows[kVectors];
  // Both halves go through the same 32 KiB of LDS, K first, so that two workgroups share a gfx942 CU.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool v_half = half == 1;
    // The lane comes through an opaque value, so that addresses are not computed ahead of the barriers and kept in
    // registers across them.
    const int late = lane + opaque_zero();
    const int row1 = late / U::kColumns * kVectors;
    if constexpr (kToShuffled) {
      if (is_v && v_half) v_rows_to_lds<U, D>(row1, vec, data, own);
      if (!is_v && !v_half) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) own[k_slot<U>(row1 + i, vec)] = data[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors / 2; ++i) {
        own[slot_of<U>(v_half, i * U::kThreads + late)] = data[half * (kVectors / 2) + i];
      }
    }
    __syncthreads();
    if constexpr (kToShuffled) {
#pragma unroll kStoreUnroll
      for (int i = 0; i < kVectors / 2; ++i) {
        const int index = i * U::kThreads + late;
        if (valid) store_vec(shuffled.at(v_half, index), own[slot_of<U>(v_half, index)]);
      }
    } else if (is_v == v_half) {
      if (v_half) {
        v_rows_from_lds<U, D>(row1, vec, rows, own);
      } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) rows[i] = own[k_slot<U>(row1 + i, vec)];
      }
      if (!U::kWholeRows && valid) store_rows<U>(rows_at, rows);
    }
    if (half == 0) __syncthreads();
  }
  if (!kToShuffled && U::kWholeRows && valid) store_rows<U>(rows_at, rows);
}

template <int kElement, int D, bool kToShuffled>
__global__ FI_LAUNCH_BOUNDS(kTileThreads, 2) void convert_pages_kernel(const ConvertParams p, const Tiling t) {
  using U = Unit<kElement, D>;
  __shared__ Vec16 lds[U::kTileVectors];
  convert_tile<U, D, kToShuffled, false>(p, t, int(blockIdx.x) * t.pages_per_group, 0, Meeting{}, lds);
}

// Pages larger than a tile: several workgroups to a page. Tickets number them in the order in which they start, so
// those that a workgroup waits for are running already, or start before any later one.
template <int kElement, int D, bool kToShuffled>
__global__ FI_LAUNCH_BOUNDS(kTileThreads, 2) void convert_large_pages_kernel(const ConvertParams p, const Tiling t) {
  using U = Unit<kElement, D>;
  __shared__ Vec16 lds[U::kTileVectors];
  unsigned ticket = blockIdx.x;
  if (p.in_place) {
    if (threadIdx.x == 0) lds[0].w[0] = atomicAdd(p.tickets, 1u);
    __syncthreads();
    ticket = lds[0].w[0];
  }
  const unsigned groups = unsigned(t.groups_per_page);
  const unsigned item = ticket / groups, lap = item / kTicketRing;
  const Meeting meeting{p.tickets + 1 + item % kTicketRing, lap * groups, (lap + 1) * groups};
  convert_tile<U, D, kToShuffled, true>(p, t, int(item), int(ticket - item * groups) * t.units_per_group, meeting, lds);
}

template <int kElement, int D, bool kToShuffled>
int launch_fast(const ConvertParams& p, gpuStream_t stream) {
  using U = Unit<kElement, D>;
  Tiling t{};
  t.units_per_page = p.num_heads * (p.page_size / kUnitTokens);
  t.items = int(p.num_blocks) * p.num_layers;
  t.groups_per_page = (t.units_per_page + U::kPerTile - 1) / U::kPerTile;
  if (t.groups_per_page == 1) {
    t.pages_per_group = U::kPerTile / t.units_per_page;
    t.units_per_group = t.pages_per_group * t.units_per_page;
    const int grid = (t.items + t.pages_per_group - 1) / t.pages_per_group;
    convert_pages_kernel<kElement, D, kToShuffled><<<grid, t.units_per_group * U::kThreads, 0, stream>>>(p, t);
    return gpu_last_error();
  }
  t.pages_per_group = 1;
  t.units_per_group = U::kPerTile;
  int units = 0;
  if (const int error = gpu_multiprocessors(&units)) return error;
  // A page's workgroups wait for one another, so they must fit the machine together. Two fit every multiprocessor.
  if (p.in_place && t.groups_per_page > 2 * units) return kInvalidConfiguration;
  convert_large_pages_kernel<kElement, D, kToShuffled><<<t.items * t.groups_per_page, kTileThreads, 0, stream>>>(p, t);
  return gpu_last_error();
}

template <int kElement, int D>
int launch_direction(const ConvertParams& p, gpuStream_t stream) {
  return p.dst.kind == PageKind::kShuffled ? launch_fast<kElement, D, true>(p, stream)
                                           : launch_fast<kElement, D, false>(p, stream);
}

template <int kElement>
int launch_head_dim(const ConvertParams& p, gpuStream_t stream) {
  switch (p.head_dim) {
    case 64:
      return launch_direction<kElement, 64>(p, stream);
    case 128:
      return launch_direction<kElement, 128>(p, stream);
    default:
      return launch_direction<kElement, 256>(p, stream);
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Generic kernel: every vector of the converted page is gathered from the source. In place, a workgroup first copies
// the page to its scratch page and gathers from there; the scratch pages stay in the last-level cache, and their number
// does not grow with the request.

constexpr int kGenericThreads = 512;
constexpr int kMostGroups = 4096;

// A page whose halves may lie apart.
struct Halves {
  uint8_t* k;
  uint8_t* v;
  int64_t half;

  __device__ __forceinline__ uint8_t* at(int64_t offset) const {
    return offset < half ? k + offset : v + (offset - half);
  }
};

template <typename Move, typename Element>
__device__ __forceinline__ Move recoded(Recode mode, Move move) {
  if constexpr (sizeof(Element) == 1 && sizeof(Move) == 16) {
#pragma unroll
    for (int w = 0; w < 4; ++w) move.w[w] = recode_word(mode, move.w[w]);
  } else if constexpr (sizeof(Element) == 1) {
    move = recode_byte(mode, move);
  }
  return move;
}

// Pages are taken by twos: where an element comes from costs divisions, and holds for both.
template <typename Element, bool kVectors16>
__global__ __launch_bounds__(kGenericThreads) void convert_any_kernel(const ConvertParams p) {
  const PageGeometry g{p.num_heads, p.page_size, p.head_dim, int(sizeof(Element))};
  using Move = typename std::conditional<kVectors16, Vec16, Element>::type;
  constexpr int kCount = int(sizeof(Move) / sizeof(Element));
  constexpr int kBytes = int(sizeof(Move));
  const int64_t half = g.half_bytes();
  const int moves = int(2 * half / kBytes);
  const int items = int(p.num_blocks) * p.num_layers;
  for (int item = int(blockIdx.x) * kPagesAtOnce; item < items; item += int(gridDim.x) * kPagesAtOnce) {
    Halves from[kPagesAtOnce], to[kPagesAtOnce];
    bool valid[kPagesAtOnce];
#pragma unroll
    for (int k = 0; k < kPagesAtOnce; ++k) {
      Place source, target;
      valid[k] = item + k < items;
      if (!valid[k]) continue;
      valid[k] = find_page(p, p.from, read_fault(p), item + k, &source);
      valid[k] = find_page(p, p.to, kBlockIdRange, item + k, &target) && valid[k];
      from[k] = Halves{source.k, source.v, half};
      to[k] = Halves{target.k, target.v, half};
    }
    if (p.in_place) {
      uint8_t* const scratch = p.scratch + int64_t(blockIdx.x) * kPagesAtOnce * 2 * half;
#pragma unroll
      for (int k = 0; k < kPagesAtOnce; ++k) {
        if (!valid[k]) continue;
        uint8_t* const own = scratch + k * 2 * half;
        for (int i = int(threadIdx.x); i < moves; i += kGenericThreads) {
          store_vec(own + int64_t(i) * kBytes, load_vec<Move>(from[k].at(int64_t(i) * kBytes)));
        }
        from[k] = Halves{own, own + half, half};
      }
      __syncthreads();
    }
    for (int i = int(threadIdx.x); i < moves; i += kGenericThreads) {
      int64_t first, step;
      g.source_of(p.src, p.dst, i * kCount, &first, &step);
#pragma unroll
      for (int k = 0; k < kPagesAtOnce; ++k) {
        if (!valid[k]) continue;
        union {
          Move whole;
          Element part[kCount];
        } out;
        if (kVectors16 && step == int(sizeof(Element))) {
          out.whole = load_vec<Move>(from[k].at(first));
        } else {
#pragma unroll
          for (int j = 0; j < kCount; ++j) out.part[j] = load_vec<Element>(from[k].at(first + j * step));
        }
        store_vec(to[k].at(int64_t(i) * kBytes), recoded<Move, Element>(p.recode, out.whole));
      }
    }
    __syncthreads();
  }
}

template <typename Element>
int launch_any(const ConvertParams& p, gpuStream_t stream) {
  const int64_t items = p.num_blocks * p.num_layers, turns = (items + kPagesAtOnce - 1) / kPagesAtOnce;
  int64_t most = kMostGroups;
  if (p.in_place) {
    // No more than run at once: the fewer scratch pages are in use, the nearer they stay.
    int units = 0;
    if (const int error = gpu_multiprocessors(&units)) return error;
    most = units * kGroupsPerUnit;
    most = p.scratch_pages / kPagesAtOnce < most ? p.scratch_pages / kPagesAtOnce : most;
  }
  const int grid = static_cast<int>(turns < most ? turns : most);
  if (convert_is_aligned(p)) {
    convert_any_kernel<Element, true><<<grid, kGenericThreads, 0, stream>>>(p);
  } else {
    convert_any_kernel<Element, false><<<grid, kGenericThreads, 0, stream>>>(p);
  }
  return gpu_last_error();
}

}  // namespace

int convert_kv_pages(const ConvertParams& p, void* stream_) {
  if (p.num_blocks == 0 || p.num_layers == 0 || convert_is_identity(p)) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  if (convert_is_fast(p)) {
    return p.element_bytes == 2 ? launch_head_dim<2>(p, stream) : launch_head_dim<1>(p, stream);
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
