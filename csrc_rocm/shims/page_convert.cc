// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/page_convert.h. Arguments were validated by the op.
#include "kernels/page_convert.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "shims/tensor.h"

namespace fi {
namespace {

void convert_kv_pages_shim(at::TensorList planes, int64_t planes_per_layer, const at::Tensor& block_ids, int64_t src,
                           int64_t dst, int64_t num_heads, int64_t page_size, int64_t head_dim,
                           const at::Tensor& fault) {
  const at::Tensor& first = planes[0];
  const c10::DeviceGuard guard(first.device());
  ConvertParams p{};
  p.block_ids = index_array(block_ids);
  p.num_blocks = block_ids.numel();
  p.num_pages = first.size(0);
  p.fault = fault_of(fault);
  p.num_heads = static_cast<int32_t>(num_heads);
  p.page_size = static_cast<int32_t>(page_size);
  p.head_dim = static_cast<int32_t>(head_dim);
  p.element_bytes = static_cast<int32_t>(first.element_size());
  p.src = static_cast<int32_t>(src);
  p.dst = static_cast<int32_t>(dst);
  p.num_layers = static_cast<int32_t>(static_cast<int64_t>(planes.size()) / planes_per_layer);
  const int64_t half = PageGeometry{p.num_heads, p.page_size, p.head_dim, p.element_bytes}.half_bytes();
  const at::Tensor& second = planes[static_cast<size_t>(planes_per_layer - 1)];
  p.k_stride = byte_stride(first, 0);
  p.v_stride = byte_stride(second, 0);
  for (int32_t layer = 0; layer < p.num_layers; ++layer) {
    const auto at = static_cast<size_t>(layer * planes_per_layer);
    p.planes.k[layer] = static_cast<uint8_t*>(planes[at].mutable_data_ptr());
    p.planes.v[layer] = planes_per_layer == 2 ? static_cast<uint8_t*>(planes[at + 1].mutable_data_ptr())
                                              : p.planes.k[layer] + half;
  }
  // Stream-ordered and of a bounded size, whatever the request: a few scratch pages, or one counter a workgroup.
  at::Tensor workspace;
  const auto bytes = first.options().dtype(at::kByte);
  if (!first.is_cpu() && !convert_is_fast(p)) {
    p.scratch_pages = scratch_pages(half);
    workspace = at::empty({p.scratch_pages * 2 * half}, bytes);
    p.scratch = workspace.mutable_data_ptr<uint8_t>();
  } else if (!first.is_cpu() && convert_groups(p) > 1) {
    workspace = at::zeros({kTicketCounters}, bytes.dtype(at::kInt));
    p.tickets = static_cast<unsigned*>(workspace.mutable_data_ptr());
  }
  check_launch(convert_kv_pages(p, current_stream(first)), "convert_kv_pages");
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "convert_kv_pages(Tensor(a!)[] planes, int planes_per_layer, Tensor block_ids, int src, int dst, "
      "int num_heads, int page_size, int head_dim, Tensor(b!) fault) -> ()");
  m.impl("convert_kv_pages", c10::DispatchKey::CompositeExplicitAutograd, &fi::convert_kv_pages_shim);
}
