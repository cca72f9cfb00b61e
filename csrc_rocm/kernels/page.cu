// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged append on a GPU. Every thread moves a few independent vectors; their loads are issued before the slot look-up,
// whose chain of dependent metadata loads would otherwise stand in front of them. Shuffled pages: page_shuffled.h.
#include "kernels/page.h"

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"
#include "kernels/page_rows.h"
#include "kernels/page_shuffled.h"

namespace fi {
namespace {

constexpr int kThreads = 256;
constexpr int kAppendUnroll = 4;  // vectors of K, and as many of V
constexpr int kMlaUnroll = 8;

inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

// Vectors that a thread holds at once: FP8 is made from two or four vectors of the row.
__host__ __device__ constexpr int unroll_of(int unroll, RowKind from) {
  return unroll / row_ratio(from) > 0 ? unroll / row_ratio(from) : 1;
}

// Rows given to one workgroup: as many as give each thread `unroll` vectors, but no more than spreads `nnz` rows over
// the machine.
inline int rows_per_block(int64_t nnz, int64_t vecs_per_row, int unroll) {
  int64_t rows = int64_t{kThreads} * unroll / vecs_per_row;
  int units = 0;
  if (gpu_multiprocessors(&units) == 0 && units > 0) {
    const int64_t fair = (nnz + 2 * units - 1) / (2 * units);
    rows = rows < fair ? rows : fair;
  }
  return static_cast<int>(rows < 1 ? 1 : rows > kThreads ? kThreads : rows);
}

// What a launch divides by: items are numbered row by row, vectors of a row head by head.
struct Strides {
  int rows;  // of a workgroup
  Divisor per_row;
  Divisor per_head;
};

inline Strides strides_of(int64_t nnz, int64_t vecs_per_row, int64_t vecs_per_head, int unroll) {
  const int rows = rows_per_block(nnz, vecs_per_row, unroll);
  const uint64_t items = static_cast<uint64_t>(vecs_per_row) * rows;
  return Strides{rows, Divisor(static_cast<uint64_t>(vecs_per_row), items),
                 Divisor(static_cast<uint64_t>(vecs_per_head), static_cast<uint64_t>(vecs_per_row))};
}

// Slots of this workgroup's rows, shared through LDS. The first use must follow a barrier.
__device__ __forceinline__ void find_slots(const PageTable& table, int64_t row0, int rows, int64_t op, Fault* fault,
                                           Slot* slots) {
  const int i = int(threadIdx.x);
  if (i < rows && row0 + i < table.nnz) slots[i] = find_slot(table, row0 + i, op, fault);
}

template <typename Vec, RowKind kFrom, PoolLayout kLayout>
__global__ __launch_bounds__(kThreads) void append_kernel(const AppendParams p, const Strides s) {
  constexpr int kUnroll = unroll_of(kAppendUnroll, kFrom);
  const int64_t row0 = int64_t(blockIdx.x) * s.rows;
  const int64_t left = p.table.nnz - row0;
  const int count = int(left < s.rows ? left : s.rows) * int(s.per_row.by);
  __shared__ Slot slots[kThreads];
  for (int begin = 0; begin < count; begin += kThreads * kUnroll) {
    const int first = begin + int(threadIdx.x);
    Piece<Vec, kFrom> k[kUnroll], v[kUnroll];
    int row[kUnroll], head[kUnroll], c[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * kThreads;
      if (i < count) {
        row[u] = s.per_row(i);
        const int r = i - row[u] * int(s.per_row.by);
        head[u] = s.per_head(r);
        c[u] = (r - head[u] * int(s.per_head.by)) * int(sizeof(Vec));
        k[u].load(row_at(p.k, row0 + row[u], head[u]), c[u]);
        v[u].load(row_at(p.v, row0 + row[u], head[u]), c[u]);
      }
    }
    if (begin == 0) {
      find_slots(p.table, row0, s.rows, kOpAppend, p.fault, slots);
      __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= count) break;
      const Slot slot = slots[row[u]];
      if (slot.token < 0) continue;
      const Vec k_out = k[u].stored(p.k.quantizer), v_out = v[u].stored(p.v.quantizer);
      if constexpr (kLayout == PoolLayout::kStrided) {
        store_vec(strided_at(p.k, slot, head[u]) + c[u], k_out);
        store_vec(strided_at(p.v, slot, head[u]) + c[u], v_out);
      } else {
        write_shuffled(p, slot, head[u], c[u], k_out, v_out);
      }
    }
  }
}

template <typename Vec, RowKind kFrom>
__global__ __launch_bounds__(kThreads) void append_mla_kernel(const MlaAppendParams p, const Strides s) {
  constexpr int kUnroll = unroll_of(kMlaUnroll, kFrom);
  const int ckv_vecs = p.ckv.width_bytes / int(sizeof(Vec));
  const int64_t row0 = int64_t(blockIdx.x) * s.rows;
  const int64_t left = p.table.nnz - row0;
  const int count = int(left < s.rows ? left : s.rows) * int(s.per_row.by);
  __shared__ Slot slots[kThreads];
  for (int begin = 0; begin < count; begin += kThreads * kUnroll) {
    const int first = begin + int(threadIdx.x);
    Piece<Vec, kFrom> data[kUnroll];
    int row[kUnroll], vec[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * kThreads;
      if (i < count) {
        row[u] = s.per_row(i);
        vec[u] = i - row[u] * int(s.per_row.by);
        // Two loads under a condition and not one from a chosen side: a pointer picked at run time loses its address
        // space.
        const int64_t r = row0 + row[u];
        if (vec[u] < ckv_vecs) {
          data[u].load(static_cast<const char*>(p.ckv.rows) + r * p.ckv.row_stride, vec[u] * int(sizeof(Vec)));
        } else {
          data[u].load(static_cast<const char*>(p.kpe.rows) + r * p.kpe.row_stride,
                       (vec[u] - ckv_vecs) * int(sizeof(Vec)));
        }
      }
    }
    if (begin == 0) {
      find_slots(p.table, row0, s.rows, kOpAppendMla, p.fault, slots);
      __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= count) break;
      const Slot slot = slots[row[u]];
      if (slot.token < 0) continue;
      const Vec out = data[u].stored(p.quantizer);
      if (vec[u] < ckv_vecs) {
        store_vec(static_cast<char*>(p.ckv.pool) + slot.page * p.ckv.page_stride + slot.token * p.ckv.token_stride +
                      vec[u] * int(sizeof(Vec)),
                  out);
      } else {
        store_vec(static_cast<char*>(p.kpe.pool) + slot.page * p.kpe.page_stride + slot.token * p.kpe.token_stride +
                      (vec[u] - ckv_vecs) * int(sizeof(Vec)),
                  out);
      }
    }
  }
}

__global__ void batch_positions_kernel(const BatchPositionsParams p) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.batch_size) check_append(p, i);
  if (i < p.nnz) batch_position(p, i);
}

__global__ void seq_lens_kernel(const SeqLensParams p) {
  const int64_t b = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (b < p.batch_size) seq_len(p, b);
}

template <typename Vec, RowKind kFrom>
int launch_append(const AppendParams& p, gpuStream_t stream) {
  const int64_t vecs_per_head = p.head_bytes / int(sizeof(Vec));
  const Strides s =
      strides_of(p.table.nnz, vecs_per_head * p.num_heads, vecs_per_head, unroll_of(kAppendUnroll, kFrom));
  const unsigned grid = blocks_for(p.table.nnz, s.rows);
  if (p.layout == PoolLayout::kStrided) {
    append_kernel<Vec, kFrom, PoolLayout::kStrided><<<grid, kThreads, 0, stream>>>(p, s);
  } else if constexpr (sizeof(Vec) < 16) {  // page_shuffled.h has those
    append_kernel<Vec, kFrom, PoolLayout::kShuffled><<<grid, kThreads, 0, stream>>>(p, s);
  }
  return gpu_last_error();
}

template <typename Vec, RowKind kFrom>
int launch_append_mla(const MlaAppendParams& p, gpuStream_t stream) {
  const int64_t vecs_per_row = (int64_t(p.ckv.width_bytes) + p.kpe.width_bytes) / int(sizeof(Vec));
  const Strides s = strides_of(p.table.nnz, vecs_per_row, vecs_per_row, unroll_of(kMlaUnroll, kFrom));
  append_mla_kernel<Vec, kFrom><<<blocks_for(p.table.nnz, s.rows), kThreads, 0, stream>>>(p, s);
  return gpu_last_error();
}

// Widest vector of the cache that addresses and strides allow. A vector of the cache is `ratio` vectors of the row.
int width_of(const AppendParams& p) {
  const AppendSide &k = p.k, &v = p.v;
  int width = common_width(p.head_bytes, address(k.rows), address(v.rows), k.row_stride, v.row_stride,
                           k.row_head_stride, v.row_head_stride, address(k.pool), address(v.pool), k.page_stride,
                           v.page_stride, k.head_stride, v.head_stride);
  if (p.layout == PoolLayout::kStrided) width = common_width(width, k.token_stride, v.token_stride);
  return width;
}

int width_of(const MlaAppendParams& p) {
  return common_width(p.ckv.width_bytes, p.kpe.width_bytes, address(p.ckv.rows), address(p.kpe.rows), p.ckv.row_stride,
                      p.kpe.row_stride, address(p.ckv.pool), address(p.kpe.pool), p.ckv.page_stride, p.kpe.page_stride,
                      p.ckv.token_stride, p.kpe.token_stride);
}

// Calls `launch` with a vector type and a row kind as the types of its arguments.
template <typename Launch>
int by_width(int width, Launch launch) {
  switch (width) {
    case 16:
      return launch(Vec16{});
    case 8:
      return launch(Vec8{});
    case 4:
      return launch(0u);
    case 2:
      return launch(static_cast<unsigned short>(0));
    default:
      return launch(static_cast<unsigned char>(0));
  }
}

template <RowKind kFrom>
int append_quantized(const AppendParams& p, gpuStream_t stream) {
  if (width_of(p) != 16) return launch_append<unsigned char, kFrom>(p, stream);
  return p.layout == PoolLayout::kShuffled ? launch_shuffled<1, kFrom>(p, stream)
                                           : launch_append<Vec16, kFrom>(p, stream);
}

template <RowKind kFrom>
int append_mla_quantized(const MlaAppendParams& p, gpuStream_t stream) {
  return width_of(p) == 16 ? launch_append_mla<Vec16, kFrom>(p, stream)
                           : launch_append_mla<unsigned char, kFrom>(p, stream);
}

int append_as_is(const AppendParams& p, gpuStream_t stream) {
  const int width = width_of(p);
  if (p.layout == PoolLayout::kShuffled && width == 16) {
    switch (p.element_bytes) {
      case 1:
        return launch_shuffled<1, RowKind::kAsIs>(p, stream);
      case 2:
        return launch_shuffled<2, RowKind::kAsIs>(p, stream);
      default:
        return launch_shuffled<4, RowKind::kAsIs>(p, stream);
    }
  }
  return by_width(width, [&](auto vec) { return launch_append<decltype(vec), RowKind::kAsIs>(p, stream); });
}

}  // namespace

int append_paged_kv_cache(const AppendParams& p, void* stream_) {
  if (p.table.nnz == 0 || p.num_heads == 0) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  switch (p.from) {
    case RowKind::kHalf:
      return append_quantized<RowKind::kHalf>(p, stream);
    case RowKind::kBfloat16:
      return append_quantized<RowKind::kBfloat16>(p, stream);
    case RowKind::kFloat:
      return append_quantized<RowKind::kFloat>(p, stream);
    default:
      return append_as_is(p, stream);
  }
}

int append_paged_mla_kv_cache(const MlaAppendParams& p, void* stream_) {
  if (p.table.nnz == 0) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  switch (p.from) {
    case RowKind::kHalf:
      return append_mla_quantized<RowKind::kHalf>(p, stream);
    case RowKind::kBfloat16:
      return append_mla_quantized<RowKind::kBfloat16>(p, stream);
    case RowKind::kFloat:
      return append_mla_quantized<RowKind::kFloat>(p, stream);
    default:
      return by_width(width_of(p),
                      [&](auto vec) { return launch_append_mla<decltype(vec), RowKind::kAsIs>(p, stream); });
  }
}

int get_batch_indices_positions(const BatchPositionsParams& p, void* stream) {
  const int64_t threads = p.nnz > p.batch_size ? p.nnz : p.batch_size;
  if (threads == 0) return 0;
  batch_positions_kernel<<<blocks_for(threads, kThreads), kThreads, 0, static_cast<gpuStream_t>(stream)>>>(p);
  return gpu_last_error();
}

int get_seq_lens(const SeqLensParams& p, void* stream) {
  if (p.batch_size == 0) return 0;
  seq_lens_kernel<<<blocks_for(p.batch_size, kThreads), kThreads, 0, static_cast<gpuStream_t>(stream)>>>(p);
  return gpu_last_error();
}

}  // namespace fi
