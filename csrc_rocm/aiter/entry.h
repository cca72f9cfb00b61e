// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The one function that a module with AITER's cache kernels shows. It is compiled into the same shared object as they
// are: AITER hides its symbols, and keeps its stream in a thread-local variable of which every shared object has a
// copy of its own, so that from outside a call would run on the null stream.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fi {

constexpr int kRefused = -1;

// A tensor as either of AITER's interfaces wants it.
struct AiterTensorArg {
  const void* tensor;  // at::Tensor*, for an AITER that takes torch's tensors; else unused
  void* data;
  int64_t numel;
  int64_t sizes[4];
  int64_t strides[4];  // in elements
  int32_t rank;
};

enum class AiterRowType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// NHD: row i of key and value goes to token slots[i] % page_size of page slots[i] / page_size; negative slots are
// skipped.
struct AiterAppend {
  AiterTensorArg key, value;        // [nnz, heads, dim], dense but for the stride of rows
  AiterTensorArg k_cache, v_cache;  // [pages, page_size, heads, dim], dense but for one stride of pages
  AiterTensorArg slots;             // [nnz] int64
  AiterTensorArg scale;             // [1] float32; AITER reads it whether or not it quantises
  AiterRowType type;                // of rows and caches
  int32_t device;                   // index of the GPU; -1 for the CPU
  void* stream;
};

}  // namespace fi

extern "C" {
// 0, the runtime's error code of a launch, or kRefused with what AITER said in `message`, ended by a zero.
__attribute__((visibility("default"))) int fi_aiter_reshape_and_cache_flash(const fi::AiterAppend* call, char* message,
                                                                            size_t message_size) noexcept;
}
