// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// A caller of the entry who has AITER's thread-local variables in hand, as only code in the same shared object has.
#include <aiter_hip_common.h>
#include <aiter_stream.h>

#include "aiter/entry.h"

extern "C" __attribute__((visibility("default"))) int call_with_state(const fi::AiterAppend* call, char* message,
                                                                      size_t size, uintptr_t* stream,
                                                                      int* can_throw) {
  aiter::setCurrentHIPStream(reinterpret_cast<hipStream_t>(*stream));
  aiter_detail::g_aiter_can_throw = *can_throw != 0;
  const int code = fi_aiter_reshape_and_cache_flash(call, message, size);
  *stream = reinterpret_cast<uintptr_t>(aiter::getCurrentHIPStream());
  *can_throw = aiter_detail::g_aiter_can_throw;
  return code;
}
