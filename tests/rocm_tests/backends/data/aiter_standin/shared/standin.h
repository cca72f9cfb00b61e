// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// What AITER's `reshape_and_cache_flash` does, as bytes: rows of `row_bytes` to slot after slot of pages that lie
// `page_stride` bytes apart. Writes what it was called with to the file FLASHINFER_STANDIN_LOG, if there is one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__HIP__)
#include <hip/hip_runtime.h>
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
using hipStream_t = cudaStream_t;
#else
using hipStream_t = struct ihipStream_t*;
#endif

#if defined(__HIP__) || defined(__CUDACC__)
#define STANDIN_GPU 1
#define STANDIN_FUNCTION __host__ __device__ inline
#else
#define STANDIN_GPU 0
#define STANDIN_FUNCTION inline
#endif

struct StandinSide {
  const char* rows;
  char* cache;
  int64_t row_stride;
  int64_t page_stride;
};

struct StandinJob {
  StandinSide k, v;
  const int64_t* slots;
  int64_t rows, row_bytes, page_size;
  const float* scale;
};

STANDIN_FUNCTION void standin_row(const StandinJob& j, int64_t i, int64_t first, int64_t step) {
  const int64_t slot = j.slots[i];
  if (slot < 0 || *j.scale != 1.0f) return;
  for (const StandinSide* s : {&j.k, &j.v}) {
    char* to = s->cache + slot / j.page_size * s->page_stride + slot % j.page_size * j.row_bytes;
    for (int64_t c = first; c < j.row_bytes; c += step) to[c] = s->rows[i * s->row_stride + c];
  }
}

#if STANDIN_GPU
static __global__ void standin_kernel(StandinJob j) { standin_row(j, blockIdx.x, threadIdx.x, blockDim.x); }
#endif

inline void standin_run(const StandinJob& j, int device, [[maybe_unused]] hipStream_t stream, int can_throw) {
  if (const char* path = std::getenv("FLASHINFER_STANDIN_LOG")) {
    if (std::FILE* log = std::fopen(path, "a")) {
      std::fprintf(log, "rows=%lld device=%d stream=%llu can_throw=%d\n", static_cast<long long>(j.rows), device,
                   static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(stream)), can_throw);
      std::fclose(log);
    }
  }
  if (device < 0) {
    for (int64_t i = 0; i < j.rows; ++i) standin_row(j, i, 0, 1);
    return;
  }
#if STANDIN_GPU
  standin_kernel<<<static_cast<unsigned>(j.rows), 256, 0, stream>>>(j);
#endif
}

// A value of this variable that is not empty makes the next check fail.
inline bool standin_refuses() {
  const char* text = std::getenv("FLASHINFER_STANDIN_REFUSE");
  return text != nullptr && *text != 0;
}
