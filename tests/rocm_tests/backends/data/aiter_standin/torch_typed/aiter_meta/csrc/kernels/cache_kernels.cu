// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "cache.h"
#include "standin.h"

namespace aiter {

void reshape_and_cache_flash(torch::Tensor& key, torch::Tensor& value, torch::Tensor& key_cache,
                             torch::Tensor& value_cache, torch::Tensor& slot_mapping, const std::string& kv_cache_dtype,
                             torch::Tensor& k_scale, torch::Tensor&) {
  TORCH_CHECK(!standin_refuses(), "the stand-in was told to refuse");
  TORCH_CHECK(kv_cache_dtype == "auto" && key_cache.stride(0) == value_cache.stride(0));
  const int64_t size = key.element_size();
  StandinJob j{};
  j.k = {static_cast<const char*>(key.data_ptr()), static_cast<char*>(key_cache.data_ptr()), key.stride(0) * size,
         key_cache.stride(0) * size};
  j.v = {static_cast<const char*>(value.data_ptr()), static_cast<char*>(value_cache.data_ptr()),
         value.stride(0) * size, value_cache.stride(0) * size};
  j.slots = slot_mapping.data_ptr<int64_t>();
  j.rows = key.size(0);
  j.row_bytes = key.size(1) * key.size(2) * size;
  j.page_size = key_cache.size(1);
  j.scale = k_scale.data_ptr<float>();
  const auto device = key.device();
  void* stream = nullptr;
  if (!device.is_cpu()) stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  standin_run(j, device.is_cpu() ? -1 : device.index(), static_cast<hipStream_t>(stream), -1);
}

}  // namespace aiter
