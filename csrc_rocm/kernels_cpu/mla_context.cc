// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Rows of a paged cache that hold the contexts of a batch, on the CPU.
#include "kernels/mla_context.h"

namespace fi {

int mla_context_indices(const MlaContextIndicesParams& p, void*) {
  for (int64_t i = 0; i < p.tokens; ++i) p.rows[i] = context_row(p, i);
  return 0;
}

}  // namespace fi
