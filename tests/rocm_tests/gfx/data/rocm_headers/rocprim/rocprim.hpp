// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// What AITER's headers name of ROCm's header-only library rocPRIM. Only its quantising kernels use it.
#pragma once
#include <hip/hip_runtime.h>

namespace rocprim {
namespace detail {
template <typename T, int kControl, int kRows = 0xF, int kBanks = 0xF, bool kBound = false>
__device__ inline T warp_move_dpp(T value) {
  static_assert(sizeof(T) == 4, "moves of other sizes are not needed here");
  const int moved = __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, value), kControl, kRows, kBanks,
                                                 kBound);
  return __builtin_bit_cast(T, moved);
}
}  // namespace detail
template <typename T>
__device__ inline T warp_shuffle(T value, int lane, int width) {
  return __shfl(value, lane, width);
}
}  // namespace rocprim
