// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
#include "aiter_hip_common.h"
#include "aiter_stream.h"
#include "cache.h"
#include "standin.h"

namespace aiter {

void reshape_and_cache_flash(aiter_tensor_t& key, aiter_tensor_t& value, aiter_tensor_t& key_cache,
                             aiter_tensor_t& value_cache, aiter_tensor_t& slot_mapping,
                             const std::string& kv_cache_dtype, aiter_tensor_t& k_scale, aiter_tensor_t&) {
  AITER_CHECK(!standin_refuses(), "the stand-in was told to refuse");
  AITER_CHECK(kv_cache_dtype == "auto" && key_cache.strides[0] == value_cache.strides[0], "unlike strides");
  AITER_CHECK(slot_mapping.dtype_ == AITER_DTYPE_i64 && slot_mapping.ndim == 1, "slots must be int64");
  AITER_CHECK(k_scale.dtype_ == AITER_DTYPE_fp32 && k_scale.numel_ == 1, "scale must be float32");
  AITER_CHECK(key.numel_ == size_t(key.shape[0] * key.shape[1] * key.shape[2]) && key.ndim == 3, "key");
  const int64_t size = key.dtype_ == AITER_DTYPE_fp32 ? 4 : 2;
  StandinJob j{};
  j.k = {static_cast<const char*>(key.ptr), static_cast<char*>(key_cache.ptr), key.strides[0] * size,
         key_cache.strides[0] * size};
  j.v = {static_cast<const char*>(value.ptr), static_cast<char*>(value_cache.ptr), value.strides[0] * size,
         value_cache.strides[0] * size};
  j.slots = static_cast<const int64_t*>(slot_mapping.ptr);
  j.rows = key.shape[0];
  j.row_bytes = key.shape[1] * key.shape[2] * size;
  j.page_size = key_cache.shape[1];
  j.scale = static_cast<const float*>(k_scale.ptr);
  standin_run(j, key.device_id, getCurrentHIPStream(), aiter_detail::g_aiter_can_throw);
}

}  // namespace aiter
