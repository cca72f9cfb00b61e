// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The status of the launch just made, for host code that is compiled for a GPU or for the CPU alike.
#pragma once

#if defined(__HIP__) || defined(__CUDACC__)
#include "kernels/common/gpu.h"

namespace fi {
inline int launch_status() { return gpu_last_error(); }
}  // namespace fi
#else
namespace fi {
inline int launch_status() { return 0; }
}  // namespace fi
#endif
