// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Paged append on a GPU. Every thread moves a few independent vectors of K and V; their loads are issued
// before the slot lookup, whose three dependent metadata loads would otherwise stand in front of them.
#include "kernels/page.h"

#include "kernels/common/gpu.h"
#include "kernels/common/vec.h"

namespace fi {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

inline unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

// Rows given to one workgroup: as many as give each thread `kUnroll` vectors, but no more than spreads `nnz` rows over
// the machine.
inline int rows_per_block(int64_t nnz, int64_t vecs_per_row) {
  int64_t rows = int64_t{kThreads} * kUnroll / vecs_per_row;
  int units = 0;
  if (gpu_multiprocessors(&units) == 0 && units > 0) {
    const int64_t fair = (nnz + 2 * units - 1) / (2 * units);
    rows = rows < fair ? rows : fair;
  }
  return static_cast<int>(rows < 1 ? 1 : rows > kThreads ? kThreads : rows);
}

// Slots of this workgroup's rows, shared through LDS. The first use must follow a barrier.
__device__ __forceinline__ void find_slots(const PageTable& table, int64_t row0, int rows, int64_t op, Fault* fault,
                                           Slot* slots) {
  const int i = int(threadIdx.x);
  if (i < rows && row0 + i < table.nnz) slots[i] = find_slot(table, row0 + i, op, fault);
}

template <typename Vec>
__device__ __forceinline__ void write_shuffled(const AppendParams& p, Slot slot, int head, int c, const Vec& k,
                                               const Vec& v) {
  store_vec(shuffled_k_at(p.k, slot, head, c, p.table.page_size), k);
  const int head_dim = p.head_bytes / p.element_bytes;
  const int d = c / p.element_bytes;
  if (p.element_bytes == 2) {
#pragma unroll
    for (int j = 0; j < int(sizeof(Vec) / 2); ++j) {
      const unsigned short half = reinterpret_cast<const unsigned short*>(&v)[j];
      *reinterpret_cast<unsigned short*>(shuffled_v_at(p.v, slot, head, d + j, head_dim, 2)) = half;
    }
  } else if (p.element_bytes == 1) {
#pragma unroll
    for (int j = 0; j < int(sizeof(Vec)); ++j) {
      const unsigned char byte = reinterpret_cast<const unsigned char*>(&v)[j];
      *reinterpret_cast<unsigned char*>(shuffled_v_at(p.v, slot, head, d + j, head_dim, 1)) = byte;
    }
  } else if constexpr (sizeof(Vec) >= 4) {
#pragma unroll
    for (int j = 0; j < int(sizeof(Vec) / 4); ++j) {
      const unsigned word = reinterpret_cast<const unsigned*>(&v)[j];
      *reinterpret_cast<unsigned*>(shuffled_v_at(p.v, slot, head, d + j, head_dim, 4)) = word;
    }
  }
}

template <typename Vec, PoolLayout kLayout>
__global__ __launch_bounds__(kThreads) void append_kernel(const AppendParams p, int rows) {
  const int vecs_per_head = p.head_bytes / int(sizeof(Vec));
  const int vecs_per_row = vecs_per_head * p.num_heads;
  const int64_t row0 = int64_t(blockIdx.x) * rows;
  const int64_t left = p.table.nnz - row0;
  const int count = int(left < rows ? left : rows) * vecs_per_row;
  __shared__ Slot slots[kThreads];
  for (int begin = 0; begin < count; begin += kThreads * kUnroll) {
    const int first = begin + int(threadIdx.x);
    Vec k[kUnroll], v[kUnroll];
    int row[kUnroll], head[kUnroll], c[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * kThreads;
      if (i < count) {
        row[u] = i / vecs_per_row;
        const int r = i - row[u] * vecs_per_row;
        head[u] = r / vecs_per_head;
        c[u] = (r - head[u] * vecs_per_head) * int(sizeof(Vec));
        k[u] = load_vec<Vec>(row_at(p.k, row0 + row[u], head[u]) + c[u]);
        v[u] = load_vec<Vec>(row_at(p.v, row0 + row[u], head[u]) + c[u]);
      }
    }
    if (begin == 0) {
      find_slots(p.table, row0, rows, kOpAppend, p.fault, slots);
      __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= count) break;
      const Slot slot = slots[row[u]];
      if (slot.token < 0) continue;
      if constexpr (kLayout == PoolLayout::kStrided) {
        store_vec(strided_at(p.k, slot, head[u]) + c[u], k[u]);
        store_vec(strided_at(p.v, slot, head[u]) + c[u], v[u]);
      } else {
        write_shuffled(p, slot, head[u], c[u], k[u], v[u]);
      }
    }
  }
}

template <typename Vec>
__global__ __launch_bounds__(kThreads) void append_mla_kernel(const MlaAppendParams p, int rows) {
  const int ckv_vecs = p.ckv.width_bytes / int(sizeof(Vec));
  const int vecs_per_row = ckv_vecs + p.kpe.width_bytes / int(sizeof(Vec));
  const int64_t row0 = int64_t(blockIdx.x) * rows;
  const int64_t left = p.table.nnz - row0;
  const int count = int(left < rows ? left : rows) * vecs_per_row;
  __shared__ Slot slots[kThreads];
  for (int begin = 0; begin < count; begin += kThreads * kUnroll) {
    const int first = begin + int(threadIdx.x);
    Vec data[kUnroll];
    int row[kUnroll], c[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * kThreads;
      if (i < count) {
        row[u] = i / vecs_per_row;
        c[u] = i - row[u] * vecs_per_row;
        // Integer selects, not a choice between two structs: a pointer picked at run time loses its address
        // space.
        const bool is_ckv = c[u] < ckv_vecs;
        const int64_t at = (row0 + row[u]) * (is_ckv ? p.ckv.row_stride : p.kpe.row_stride) +
                           int64_t(is_ckv ? c[u] : c[u] - ckv_vecs) * int(sizeof(Vec));
        if (is_ckv) {
          data[u] = load_vec<Vec>(static_cast<const char*>(p.ckv.rows) + at);
        } else {
          data[u] = load_vec<Vec>(static_cast<const char*>(p.kpe.rows) + at);
        }
      }
    }
    if (begin == 0) {
      find_slots(p.table, row0, rows, kOpAppendMla, p.fault, slots);
      __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= count) break;
      const Slot slot = slots[row[u]];
      if (slot.token < 0) continue;
      if (c[u] < ckv_vecs) {
        store_vec(static_cast<char*>(p.ckv.pool) + slot.page * p.ckv.page_stride + slot.token * p.ckv.token_stride +
                      int64_t(c[u]) * int(sizeof(Vec)),
                  data[u]);
      } else {
        store_vec(static_cast<char*>(p.kpe.pool) + slot.page * p.kpe.page_stride + slot.token * p.kpe.token_stride +
                      int64_t(c[u] - ckv_vecs) * int(sizeof(Vec)),
                  data[u]);
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

template <typename Vec>
int launch_append(const AppendParams& p, gpuStream_t stream) {
  const int64_t vecs_per_row = int64_t(p.head_bytes) / int(sizeof(Vec)) * p.num_heads;
  const int rows = rows_per_block(p.table.nnz, vecs_per_row);
  const unsigned grid = blocks_for(p.table.nnz, rows);
  if (p.layout == PoolLayout::kStrided) {
    append_kernel<Vec, PoolLayout::kStrided><<<grid, kThreads, 0, stream>>>(p, rows);
  } else {
    append_kernel<Vec, PoolLayout::kShuffled><<<grid, kThreads, 0, stream>>>(p, rows);
  }
  return gpu_last_error();
}

template <typename Vec>
int launch_append_mla(const MlaAppendParams& p, gpuStream_t stream) {
  const int64_t vecs_per_row = (int64_t(p.ckv.width_bytes) + p.kpe.width_bytes) / int(sizeof(Vec));
  const int rows = rows_per_block(p.table.nnz, vecs_per_row);
  append_mla_kernel<Vec><<<blocks_for(p.table.nnz, rows), kThreads, 0, stream>>>(p, rows);
  return gpu_last_error();
}

int width_of(const AppendParams& p) {
  const AppendSide &k = p.k, &v = p.v;
  int width = common_width(p.head_bytes, address(k.rows), address(v.rows), k.row_stride, v.row_stride,
                           k.row_head_stride, v.row_head_stride, address(k.pool), address(v.pool), k.page_stride,
                           v.page_stride, k.head_stride, v.head_stride);
  if (p.layout == PoolLayout::kStrided) width = common_width(width, k.token_stride, v.token_stride);
  return width;
}

}  // namespace

int append_paged_kv_cache(const AppendParams& p, void* stream_) {
  if (p.table.nnz == 0 || p.num_heads == 0) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  switch (width_of(p)) {
    case 16:
      return launch_append<Vec16>(p, stream);
    case 8:
      return launch_append<Vec8>(p, stream);
    case 4:
      return launch_append<unsigned>(p, stream);
    case 2:
      return launch_append<unsigned short>(p, stream);
    default:
      return launch_append<unsigned char>(p, stream);
  }
}

int append_paged_mla_kv_cache(const MlaAppendParams& p, void* stream_) {
  if (p.table.nnz == 0) return 0;
  auto* stream = static_cast<gpuStream_t>(stream_);
  const int width = common_width(p.ckv.width_bytes, p.kpe.width_bytes, address(p.ckv.rows), address(p.kpe.rows),
                                 p.ckv.row_stride, p.kpe.row_stride, address(p.ckv.pool), address(p.kpe.pool),
                                 p.ckv.page_stride, p.kpe.page_stride, p.ckv.token_stride, p.kpe.token_stride);
  switch (width) {
    case 16:
      return launch_append_mla<Vec16>(p, stream);
    case 8:
      return launch_append_mla<Vec8>(p, stream);
    case 4:
      return launch_append_mla<unsigned>(p, stream);
    case 2:
      return launch_append_mla<unsigned short>(p, stream);
    default:
      return launch_append_mla<unsigned char>(p, stream);
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
