// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Keys of MLA out of their two parts, on the CPU.
#include "kernels/concat_mla.h"

#include <cstring>

namespace fi {
namespace {

// Below this many bytes a second thread costs more than it saves, as in page.cc.
constexpr int64_t kParallelBytes = 1 << 16;

}  // namespace

int concat_mla_k(const ConcatMlaParams& p, void*) {
  const int64_t bytes = p.tokens * p.heads * (int64_t(p.nope_bytes) + p.rope_bytes);
#pragma omp parallel for schedule(static) if (bytes > kParallelBytes)
  for (int64_t token = 0; token < p.tokens; ++token) {
    const char* rope = static_cast<const char*>(p.rope) + token * p.rope_token;
    for (int64_t head = 0; head < p.heads; ++head) {
      char* k = static_cast<char*>(p.k) + token * p.k_token + head * p.k_head;
      const char* nope = static_cast<const char*>(p.nope) + token * p.nope_token + head * p.nope_head;
      // Keys may be given as the part of k where they belong already.
      std::memmove(k, nope, static_cast<size_t>(p.nope_bytes));
      std::memcpy(k + p.nope_bytes, rope, static_cast<size_t>(p.rope_bytes));
    }
  }
  return 0;
}

}  // namespace fi
