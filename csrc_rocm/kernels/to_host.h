// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Small vectors of a device into host memory, all of them in one launch. Parameters of the GPU kernel (to_host.cu), the
// CPU kernel (kernels_cpu/to_host.cc) and the shim.
#pragma once

#include <cstdint>

namespace fi {

constexpr int kMostToHost = 8;

struct ToHostVector {
  const void* from;
  int64_t begin;   // where it is to be in the block, in bytes
  int64_t size;    // elements, of 8 bytes if `wide`, else of 4
  int64_t stride;  // of `from`, in elements
  bool wide;
};

struct ToHostParams {
  void* block;  // host memory, pinned if the vectors are on a GPU
  ToHostVector vectors[kMostToHost];
  int32_t count;
};

// Returns 0 or the runtime's error code. The host may read once the stream has come this far.
int to_host(const ToHostParams& params, void* stream);

}  // namespace fi
