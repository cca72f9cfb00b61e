// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Keys of MLA out of their two parts: each head's own, and the rope part that all heads of a token share. Parameters of
// the GPU kernel (concat_mla.cu), the CPU kernel (kernels_cpu/concat_mla.cc) and the shim. Strides are in bytes.
#pragma once

#include <cstdint>

namespace fi {

struct ConcatMlaParams {
  void* k;           // [tokens, heads, nope + rope], dense last dimension as in all three
  const void* nope;  // [tokens, heads, nope]
  const void* rope;  // [tokens, rope]
  int64_t k_token;
  int64_t k_head;
  int64_t nope_token;
  int64_t nope_head;
  int64_t rope_token;
  int64_t tokens;
  int32_t heads;
  int32_t nope_bytes;
  int32_t rope_bytes;
};

// Returns 0 or the runtime's error code.
int concat_mla_k(const ConcatMlaParams& params, void* stream);

}  // namespace fi
