// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// FlashInfer's page table as vLLM's slot mapping, which AITER's writers take: slot = page * page_size + token.
#pragma once

#include "kernels/page.h"

namespace fi {

struct SlotMappingParams {
  PageTable table;
  int64_t* slots;  // [nnz]; -1: skip the row, which is padding or was reported
  Fault* fault;
};

FI_HOST_DEVICE int64_t slot_of_row(const SlotMappingParams& p, int64_t i) {
  const Slot slot = find_slot(p.table, i, kOpAppend, p.fault);
  return slot.token < 0 ? -1 : slot.page * p.table.page_size + slot.token;
}

// Returns 0 or the runtime's error code.
int map_slots(const SlotMappingParams& params, void* stream);

}  // namespace fi
