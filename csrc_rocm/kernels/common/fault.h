// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// How a kernel reports metadata it could not use. The bad row or page is skipped, never written; the first
// report is kept in four int64 words: on the CPU the caller reads them at once, on a GPU
// `check_device_errors()` does. Codes are mirrored by flashinfer/core/faults.py.
#pragma once

#include <cstdint>

#if defined(__HIPCC__) || defined(__CUDACC__)
#include "kernels/common/gpu.h"

#define FI_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FI_HOST_DEVICE inline
#endif

namespace fi {

enum FaultCode : int64_t {
  kNoFault = 0,
  kBatchIndexRange = 1,    // batch index >= number of requests
  kPositionRange = 2,      // position beyond the request's pages, or negative
  kPageTableShort = 3,     // kv_indptr points past the end of kv_indices
  kPageIdRange = 4,        // page id outside the pool
  kBlockIdRange = 5,       // block id outside the pool (conversion)
  kBlockIdTwice = 6,       // the same block listed twice (conversion, CPU only)
  kSourceIdRange = 7,      // source id outside the pool that is read (conversion between pools)
  kIndptrOrder = 8,        // kv_indptr negative or decreasing
  kAppendIndptrOrder = 9,  // append_indptr negative or decreasing
  kSeqLenShort = 10,       // sequence shorter than what is appended to it
  kSeqLenRange = 11,       // sequence length beyond int32
  kQoIndptrRange = 12,     // qo_indptr decreasing, or past q's rows
  kLastPageRange = 13,     // last page with more tokens than a page has, or fewer than none
  kKvIndptrRange = 14,     // kv_indptr past the rows of k
  kPiecesShort = 15,       // more pieces of work than there is memory for
  kOutIndptrOrder = 20,    // out_indptr negative or decreasing
  kOutShort = 21,          // out_indptr points past the end of the output
  kTokenRange = 22,        // token beyond its request's pages, or negative
  kBlockTableRange = 24,   // block table entry outside the pool
  kBlockTableShort = 25,   // block table without a column for a token
  kContextPages = 26,      // context token without a page
  kPieceRequest = 27,      // piece of a request that has no block table
  kContextRows = 28,       // more context tokens than rows of the results
};

// Ops whose kernels are in flashinfer/backends/triton; those of compiled kernels stand in the kernels' headers.
constexpr int64_t kOpPagedAttention = 16;
constexpr int64_t kOpRaggedAttention = 17;

struct Fault {
  int64_t code;   // (op << 8) | FaultCode
  int64_t where;  // index of the offending element
  int64_t value;  // its value
  int64_t bound;  // what it was held against
};

FI_HOST_DEVICE void report(Fault* fault, int64_t code, int64_t where, int64_t value, int64_t bound) {
#if defined(__HIP_DEVICE_COMPILE__) || defined(__CUDA_ARCH__)
  const auto old =
      atomicCAS(reinterpret_cast<unsigned long long*>(&fault->code), 0ull, static_cast<unsigned long long>(code));
  if (old != 0) return;
#else
  if (fault->code != 0) return;
  fault->code = code;
#endif
  fault->where = where;
  fault->value = value;
  fault->bound = bound;
}

// An index tensor of int32 or int64, told apart by one uniform branch.
struct IndexArray {
  const void* data;
  bool wide;

  FI_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace fi
