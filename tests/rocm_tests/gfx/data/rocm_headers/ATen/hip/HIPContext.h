// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// For a torch that was not built for ROCm: AITER's sources ask it for nothing but the stream. Nothing runs on it here.
#pragma once
#include <hip/hip_runtime.h>

namespace at::hip {
inline hipStream_t getCurrentHIPStream() { return nullptr; }
}  // namespace at::hip
