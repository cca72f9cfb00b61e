// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// AITER's own current stream, from 0.1.12 on.
#pragma once
#include "standin.h"

namespace aiter {

inline hipStream_t& standin_stream() {
  thread_local hipStream_t stream = nullptr;
  return stream;
}
inline hipStream_t getCurrentHIPStream() { return standin_stream(); }
inline void setCurrentHIPStream(hipStream_t stream) { standin_stream() = stream; }

}  // namespace aiter
