// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The flavour of 8-bit floats that a tensor declares: kernels/common/fp8.h in torch's words.
#pragma once

#include <ATen/core/Tensor.h>

namespace fi {

inline bool is_fnuz(const at::Tensor& t) { return t.scalar_type() == at::kFloat8_e4m3fnuz; }
inline bool is_fp8(const at::Tensor& t) { return t.scalar_type() == at::kFloat8_e4m3fn || is_fnuz(t); }

}  // namespace fi
