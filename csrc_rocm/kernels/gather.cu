// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged gather on a GPU. A workgroup fills some consecutive rows: it looks up where they come from once, shares that
// through LDS, and then moves 16-byte vectors of all heads, several in flight to a thread. Work is cut by rows (and
// heads, where rows are few), never by requests: few long ones fill the machine as well as many short ones.
#include "kernels/gather.h"

#include "kernels/common/fp8.h"
#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"

namespace fi {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
// Rows of a workgroup at most: a lookup each, in parallel.
constexpr int kMaxRows = 64;

__device__ __forceinline__ void look_up(const GatherTable& table, int64_t row0, int rows, Fault* fault,
                                        GatherRow* found) {
  const int i = int(threadIdx.x);
  if (i < rows) found[i] = find_row(table, row0 + i, fault);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int64_t b = i; b < table.batch_size; b += kThreads) check_piece(table, b, fault);
  }
}

// Four FP8 bytes as floats, times a scale. By way of fp16: a fifth of the instructions that a byte by itself takes.
__device__ __forceinline__ void dequantise(unsigned bytes, bool fnuz, float scale, float (&values)[4]) {
  const float factor = scale * fp8_halves_scale(fnuz);
  const unsigned even = fp8_halves(bytes), odd = fp8_halves(bytes >> 8);
  values[0] = half_value(even & 0xffffu) * factor;
  values[1] = half_value(odd & 0xffffu) * factor;
  values[2] = half_value(even >> 16) * factor;
  values[3] = half_value(odd >> 16) * factor;
  const unsigned nans = fp8_nans(bytes, fnuz);
  if (nans != 0) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (nans >> (8 * j + 7) & 1u) values[j] = float_of_bits(0x7fc00000u);
    }
  }
}

template <GatherOut kOut>
__device__ __forceinline__ unsigned rounded_pair(float low, float high) {
  if constexpr (kOut == GatherOut::kHalf) return half_bits(low) | half_bits(high) << 16;
  return byte_perm<0x7632>(bf16_above(low), bf16_above(high));
}

// Stores `kWords` words of a row, bytes of FP8 to be dequantised or anything to be copied. `kNarrow`: addresses are
// multiples of an element only.
template <GatherOut kOut, int kElement, bool kNarrow, int kWords>
__device__ __forceinline__ void store_words(char* to, const unsigned (&words)[kWords], bool fnuz, float scale) {
  if constexpr (kOut == GatherOut::kCopy && kNarrow) {
#pragma unroll
    for (int b = 0; b < kWords * 4; b += kElement) {
      const unsigned value = words[b / 4] >> (b % 4 * 8);
      if constexpr (kElement == 1) store_vec(to + b, static_cast<unsigned char>(value));
      if constexpr (kElement == 2) store_vec(to + b, static_cast<unsigned short>(value));
      if constexpr (kElement == 4) store_vec(to + b, value);
    }
  } else if constexpr (kOut == GatherOut::kCopy) {
    if constexpr (kWords == 2) {
      store_vec(to, Vec8{{words[0], words[1]}});
    } else {
      store_vec(to, Vec16{{words[0], words[1], words[2], words[3]}});
    }
  } else if constexpr (kOut == GatherOut::kFloat) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float f[4];
      dequantise(words[w], fnuz, scale, f);
      const unsigned bits[4] = {float_bits(f[0]), float_bits(f[1]), float_bits(f[2]), float_bits(f[3])};
      store_words<GatherOut::kCopy, 4, kNarrow>(to + w * 16, bits, fnuz, scale);
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWords; w += 2) {
      unsigned bits[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float f[4];
        dequantise(words[w + j], fnuz, scale, f);
        bits[2 * j] = rounded_pair<kOut>(f[0], f[1]);
        bits[2 * j + 1] = rounded_pair<kOut>(f[2], f[3]);
      }
      store_words<GatherOut::kCopy, 2, kNarrow>(to + w * 8, bits, fnuz, scale);
    }
  }
}

// Whether an element of the output is `kBytes` wide is all that a single byte of the pool needs to know.
template <GatherOut kOut>
__device__ __forceinline__ void store_byte(char* to, unsigned char byte, bool fnuz, float scale) {
  const float value = fp8_value(byte, fnuz) * scale;
  if constexpr (kOut == GatherOut::kFloat) store_vec(to, float_bits(value));
  if constexpr (kOut == GatherOut::kHalf) store_vec(to, static_cast<unsigned short>(half_bits(value)));
  if constexpr (kOut == GatherOut::kBf16) store_vec(to, static_cast<unsigned short>(bf16_bits(value)));
}

template <GatherOut kOut, typename Vec>
__device__ __forceinline__ void store_strided(char* row, int c, const Vec& v, bool fnuz, float scale) {
  constexpr int kGrowth = kOut == GatherOut::kCopy ? 1 : kOut == GatherOut::kFloat ? 4 : 2;
  if constexpr (kOut == GatherOut::kCopy) {
    store_vec(row + c, v);
  } else if constexpr (sizeof(Vec) == 16) {
    store_words<kOut, 1, false>(row + c * kGrowth, v.w, fnuz, scale);
  } else {
    store_byte<kOut>(row + c * kGrowth, v, fnuz, scale);
  }
}

__device__ __forceinline__ const char* strided_at(const GatherSide& s, const GatherRow& row, int head) {
  return static_cast<const char*>(s.pool) + row.page * s.page_stride + head * s.head_stride +
         row.token * s.token_stride;
}

template <typename Vec, GatherOut kOut>
__global__ __launch_bounds__(kThreads) void gather_strided_kernel(const GatherParams p, int rows) {
  __shared__ GatherRow found[kMaxRows];
  const int vecs_per_head = p.head_dim * p.element_bytes / int(sizeof(Vec));
  const int vecs_per_row = vecs_per_head * p.num_heads;
  const int64_t row0 = int64_t(blockIdx.x) * rows;
  const int64_t left = p.table.rows - row0;
  const int count = int(left < rows ? left : rows);
  look_up(p.table, row0, count, p.fault, found);
  __syncthreads();
  const int total = count * vecs_per_row;
  for (int begin = 0; begin < total; begin += kThreads * kUnroll) {
    Vec k[kUnroll], v[kUnroll];
    int row[kUnroll], head[kUnroll], c[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = begin + int(threadIdx.x) + u * kThreads;
      row[u] = i < total ? i / vecs_per_row : -1;
      if (row[u] < 0) continue;
      const GatherRow source = found[row[u]];
      const int in_row = i - row[u] * vecs_per_row;
      head[u] = in_row / vecs_per_head;
      c[u] = (in_row - head[u] * vecs_per_head) * int(sizeof(Vec));
      if (source.token < 0) row[u] = -1;
      if (row[u] < 0) continue;
      k[u] = load_vec<Vec>(strided_at(p.k, source, head[u]) + c[u]);
      v[u] = load_vec<Vec>(strided_at(p.v, source, head[u]) + c[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (row[u] < 0) continue;
      store_strided<kOut>(out_at(p.k, row0 + row[u], head[u]), c[u], k[u], p.fnuz, p.k.scale);
      store_strided<kOut>(out_at(p.v, row0 + row[u], head[u]), c[u], v[u], p.fnuz, p.v.scale);
    }
  }
}

// A run of output rows whose tokens are neighbours in a page, up to the next multiple of x tokens.
struct Run {
  int64_t page;
  int row;    // of the workgroup's
  int token;  // in the page, of the first of the x tokens
  int begin;  // first of the x tokens that is wanted
  int end;    // behind the last one
};

// Finds the runs among a workgroup's rows; their order does not matter. Follows a barrier, ends with one.
template <int kX>
__device__ __forceinline__ int find_runs(const GatherRow* found, int rows, int* count, Run* runs) {
  const int i = int(threadIdx.x);
  if (i < rows) {
    const GatherRow r = found[i];
    const int begin = r.token & (kX - 1);
    // A run also begins where the run before ended early: at the first row of a piece, or behind a row without source.
    const bool leads = begin == 0 || i == 0 || r.first || found[i - 1].token < 0;
    if (r.token >= 0 && leads) {
      int end = begin + 1;
      while (end < kX && i + end - begin < rows && end - begin < r.left && found[i + end - begin].token >= 0) ++end;
      runs[atomicAdd(count, 1)] = Run{r.page, i, r.token - begin, begin, end};
    }
  }
  __syncthreads();
  return *count;
}

// Four bytes from an address that is a multiple of an element only.
template <int kElement>
__device__ __forceinline__ unsigned load_word(const char* from) {
  unsigned word = 0;
#pragma unroll
  for (int b = 0; b < 4; b += kElement) {
    if constexpr (kElement == 1) word |= unsigned(load_vec<unsigned char>(from + b)) << (8 * b);
    if constexpr (kElement == 2) word |= unsigned(load_vec<unsigned short>(from + b)) << (8 * b);
    if constexpr (kElement == 4) word = load_vec<unsigned>(from);
  }
  return word;
}

template <int kElement, bool kNarrow>
__device__ __forceinline__ Vec16 load_shuffled(const char* from) {
  if constexpr (kNarrow) {
    return Vec16{{load_word<kElement>(from), load_word<kElement>(from + 4), load_word<kElement>(from + 8),
                  load_word<kElement>(from + 12)}};
  } else {
    return load_vec<Vec16>(from);
  }
}

// One chunk of 16 bytes of a K head, of up to eight tokens. K [D/x, N, x]: the chunks of neighbouring tokens are
// neighbours.
template <int kElement, GatherOut kOut, bool kNarrow>
__device__ __forceinline__ void gather_k(const GatherParams& p, const Run& run, int64_t row0, int head, int chunk,
                                         int half) {
  constexpr int kX = 16 / kElement, kTokens = kX < 8 ? kX : 8;
  const int out_element = out_bytes(kOut, kElement);
  const char* const from = static_cast<const char*>(p.k.pool) + run.page * p.k.page_stride + head * p.k.head_stride +
                           (int64_t(chunk) * p.table.page_size + run.token + half * kTokens) * 16;
  Vec16 data[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) data[t] = load_shuffled<kElement, kNarrow>(from + t * 16);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int token = half * kTokens + t;
    if (token < run.begin || token >= run.end) continue;
    char* const to = out_at(p.k, row0 + run.row + token - run.begin, head) + chunk * kX * out_element;
    store_words<kOut, kElement, kNarrow>(to, data[t].w, p.fnuz, p.k.scale);
  }
}

// A few dimensions of a V head, of x tokens, transposed. V [N/x, D, x]: the tokens of one dimension are neighbours, and
// so are the dimensions.
template <int kElement, GatherOut kOut, bool kNarrow>
__device__ __forceinline__ void gather_v(const GatherParams& p, const Run& run, int64_t row0, int head, int tile) {
  constexpr int kX = 16 / kElement, kDims = kX < 8 ? kX : 8, kWords = kDims * kElement / 4;
  const int out_element = out_bytes(kOut, kElement);
  const char* const from = static_cast<const char*>(p.v.pool) + run.page * p.v.page_stride + head * p.v.head_stride +
                           (int64_t(run.token / kX) * p.head_dim + tile * kDims) * 16;
  Vec16 data[kDims];
#pragma unroll
  for (int d = 0; d < kDims; ++d) data[d] = load_shuffled<kElement, kNarrow>(from + d * 16);
#pragma unroll
  for (int q = 0; q < 4; ++q) {            // word q of every vector holds the tokens of this word
    unsigned words[4 / kElement][kWords];  // by token and dimension
    if constexpr (kElement == 4) {
#pragma unroll
      for (int d = 0; d < kDims; ++d) words[0][d] = data[d].w[q];
    } else if constexpr (kElement == 2) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[0][w] = byte_perm<0x5410>(data[2 * w].w[q], data[2 * w + 1].w[q]);
        words[1][w] = byte_perm<0x7632>(data[2 * w].w[q], data[2 * w + 1].w[q]);
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const unsigned low0 = byte_perm<0x5140>(data[4 * w].w[q], data[4 * w + 1].w[q]);
        const unsigned high0 = byte_perm<0x7362>(data[4 * w].w[q], data[4 * w + 1].w[q]);
        const unsigned low1 = byte_perm<0x5140>(data[4 * w + 2].w[q], data[4 * w + 3].w[q]);
        const unsigned high1 = byte_perm<0x7362>(data[4 * w + 2].w[q], data[4 * w + 3].w[q]);
        words[0][w] = byte_perm<0x5410>(low0, low1);
        words[1][w] = byte_perm<0x7632>(low0, low1);
        words[2][w] = byte_perm<0x5410>(high0, high1);
        words[3][w] = byte_perm<0x7632>(high0, high1);
      }
    }
#pragma unroll
    for (int j = 0; j < 4 / kElement; ++j) {
      const int token = q * (4 / kElement) + j;
      if (token < run.begin || token >= run.end) continue;
      char* const to = out_at(p.v, row0 + run.row + token - run.begin, head) + tile * kDims * out_element;
      store_words<kOut, kElement, kNarrow>(to, words[j], p.fnuz, p.v.scale);
    }
  }
}

template <int kElement, GatherOut kOut, bool kNarrow>
__global__ __launch_bounds__(kThreads) void gather_shuffled_kernel(const GatherParams p, int rows, int heads) {
  constexpr int kX = 16 / kElement, kHalves = kX > 8 ? 2 : 1, kDims = kX < 8 ? kX : 8;
  __shared__ GatherRow found[kMaxRows];
  __shared__ Run runs[kMaxRows];
  __shared__ int run_count;
  if (threadIdx.x == 0) run_count = 0;
  const int64_t row0 = int64_t(blockIdx.x) * rows;
  const int64_t left = p.table.rows - row0;
  const int rows_here = int(left < rows ? left : rows);
  const int head0 = int(blockIdx.y) * heads;
  const int heads_here = p.num_heads - head0 < heads ? p.num_heads - head0 : heads;
  look_up(p.table, row0, rows_here, p.fault, found);
  __syncthreads();
  const int count = find_runs<kX>(found, rows_here, &run_count, runs);
  // Threads next to each other take chunks next to each other: what they store is one run of memory.
  const int chunks = p.head_dim / kX;
  for (int i = int(threadIdx.x); i < count * kHalves * heads_here * chunks; i += kThreads) {
    const int r = i / (heads_here * chunks), head = i / chunks - r * heads_here;
    gather_k<kElement, kOut, kNarrow>(p, runs[r / kHalves], row0, head0 + head, i % chunks, r % kHalves);
  }
  const int tiles = p.head_dim / kDims;
  for (int i = int(threadIdx.x); i < count * heads_here * tiles; i += kThreads) {
    const int r = i / (heads_here * tiles), head = i / tiles - r * heads_here;
    gather_v<kElement, kOut, kNarrow>(p, runs[r], row0, head0 + head, i % tiles);
  }
}

// Workgroups that a machine should have to work on, so that none of it idles.
inline int64_t workgroups_wanted() {
  int units = 0;
  return gpu_multiprocessors(&units) == 0 ? int64_t{4} * units : 1;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename Vec, GatherOut kOut>
int launch_strided(const GatherParams& p, gpuStream_t stream) {
  const int64_t vecs_per_row = int64_t(p.head_dim) * p.element_bytes / int(sizeof(Vec)) * p.num_heads;
  // As many rows as give each thread `kUnroll` vectors, but no more than spreads them over the machine.
  int64_t rows = int64_t{kThreads} * kUnroll / vecs_per_row;
  const int64_t fair = divide_up(p.table.rows, workgroups_wanted());
  rows = rows < fair ? rows : fair;
  rows = rows < 1 ? 1 : rows > kMaxRows ? kMaxRows : rows;
  const auto grid = static_cast<unsigned>(divide_up(p.table.rows, rows));
  gather_strided_kernel<Vec, kOut><<<grid, kThreads, 0, stream>>>(p, int(rows));
  return gpu_last_error();
}

template <int kElement, GatherOut kOut, bool kNarrow>
int launch_shuffled(const GatherParams& p, gpuStream_t stream) {
  // Halves of runs cost whole ones, so rows go by 16 at least; few rows are cut by heads instead.
  int64_t rows = kMaxRows;
  const int64_t wanted = workgroups_wanted();
  while (rows > 16 && divide_up(p.table.rows, rows) < wanted) rows /= 2;
  const int64_t row_groups = divide_up(p.table.rows, rows);
  int64_t heads = p.num_heads;
  while (heads > 1 && row_groups * divide_up(p.num_heads, heads) < wanted) heads = divide_up(heads, 2);
  const dim3 grid(static_cast<unsigned>(row_groups), static_cast<unsigned>(divide_up(p.num_heads, heads)));
  gather_shuffled_kernel<kElement, kOut, kNarrow><<<grid, kThreads, 0, stream>>>(p, int(rows), int(heads));
  return gpu_last_error();
}

// Largest access that everything outside of a row allows.
int width_of(const GatherParams& p) {
  int width = 16;
  for (const GatherSide* s : {&p.k, &p.v}) {
    width = common_width(width, address(s->pool), s->page_stride, s->head_stride, address(s->out), s->row_stride,
                         s->row_head_stride);
    if (p.layout == PoolLayout::kStrided) width = common_width(width, s->token_stride);
  }
  return width;
}

template <GatherOut kOut>
int launch_dequantised(const GatherParams& p, gpuStream_t stream) {
  const bool narrow = width_of(p) < 16;
  if (p.layout == PoolLayout::kShuffled) {
    return narrow ? launch_shuffled<1, kOut, true>(p, stream) : launch_shuffled<1, kOut, false>(p, stream);
  }
  if (narrow || p.head_dim % 16) return launch_strided<unsigned char, kOut>(p, stream);
  return launch_strided<Vec16, kOut>(p, stream);
}

template <int kElement>
int launch_shuffled_copy(const GatherParams& p, gpuStream_t stream) {
  if (width_of(p) < 16) return launch_shuffled<kElement, GatherOut::kCopy, true>(p, stream);
  return launch_shuffled<kElement, GatherOut::kCopy, false>(p, stream);
}

int launch_copy(const GatherParams& p, gpuStream_t stream) {
  if (p.layout == PoolLayout::kShuffled) {
    switch (p.element_bytes) {
      case 1:
        return launch_shuffled_copy<1>(p, stream);
      case 2:
        return launch_shuffled_copy<2>(p, stream);
      default:
        return launch_shuffled_copy<4>(p, stream);
    }
  }
  switch (common_width(width_of(p), p.head_dim * p.element_bytes)) {
    case 16:
      return launch_strided<Vec16, GatherOut::kCopy>(p, stream);
    case 8:
      return launch_strided<Vec8, GatherOut::kCopy>(p, stream);
    case 4:
      return launch_strided<unsigned, GatherOut::kCopy>(p, stream);
    case 2:
      return launch_strided<unsigned short, GatherOut::kCopy>(p, stream);
    default:
      return launch_strided<unsigned char, GatherOut::kCopy>(p, stream);
  }
}

}  // namespace

int gather_paged_kv(const GatherParams& p, void* stream_) {
  if (p.table.rows == 0 || p.num_heads == 0) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  switch (p.out) {
    case GatherOut::kBf16:
      return launch_dequantised<GatherOut::kBf16>(p, stream);
    case GatherOut::kHalf:
      return launch_dequantised<GatherOut::kHalf>(p, stream);
    case GatherOut::kFloat:
      return launch_dequantised<GatherOut::kFloat>(p, stream);
    default:
      return launch_copy(p, stream);
  }
}

}  // namespace fi
