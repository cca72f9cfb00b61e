// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The interface of AITER to 0.1.13: torch's tensors on torch's current stream.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace torch {
using at::Tensor;
}

namespace aiter {

void reshape_and_cache_flash(torch::Tensor& key, torch::Tensor& value, torch::Tensor& key_cache,
                             torch::Tensor& value_cache, torch::Tensor& slot_mapping, const std::string& kv_cache_dtype,
                             torch::Tensor& k_scale, torch::Tensor& v_scale);

}  // namespace aiter
