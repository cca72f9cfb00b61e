// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The slot mapping on the CPU. AITER has no CPU kernels; tests run the way to it with a stand-in for them.
#include "kernels/page_aiter.h"

namespace fi {

int map_slots(const SlotMappingParams& p, void* /*stream*/) {
  for (int64_t i = 0; i < p.table.nnz; ++i) p.slots[i] = slot_of_row(p, i);
  return 0;
}

}  // namespace fi
