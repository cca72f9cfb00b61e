// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// As HIPContext.h: the device guard.
#pragma once
#include <c10/core/Device.h>

#include <optional>

namespace at::hip {
struct OptionalHIPGuardMasqueradingAsCUDA {
  explicit OptionalHIPGuardMasqueradingAsCUDA(std::optional<c10::Device>) {}
};
}  // namespace at::hip
