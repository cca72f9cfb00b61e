// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The interface of AITER from 0.1.14 on: tensors and a stream of its own.
#pragma once
#include <string>

#include "aiter_tensor.h"

namespace aiter {

void reshape_and_cache_flash(aiter_tensor_t& key, aiter_tensor_t& value, aiter_tensor_t& key_cache,
                             aiter_tensor_t& value_cache, aiter_tensor_t& slot_mapping,
                             const std::string& kv_cache_dtype, aiter_tensor_t& k_scale, aiter_tensor_t& v_scale);

}  // namespace aiter
