// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/mla_context.h; checks its arguments as flashinfer/ops/mla_context.py does in words.
// `fault` is int64[4] on the same device.
#include "kernels/mla_context.h"

#include "shims/tensor.h"

namespace fi {
namespace {

void mla_context_indices_shim(const at::Tensor& block_tables, const at::Tensor& piece_requests,
                              const at::Tensor& piece_starts, const at::Tensor& piece_indptr, int64_t num_pages,
                              int64_t page_size, const at::Tensor& kv_indices, const at::Tensor& fault) {
  const c10::Device device = block_tables.device();
  const auto type = block_tables.scalar_type();
  require(block_tables.dim() == 2 && (type == at::kInt || type == at::kLong) && is_dense_last(block_tables));
  for (const at::Tensor* t : {&piece_requests, &piece_starts, &piece_indptr, &kv_indices}) {
    require(is_index_vector(*t, device) && t->scalar_type() == at::kInt);
  }
  require(piece_starts.numel() == piece_requests.numel() && piece_indptr.numel() == piece_requests.numel() + 1);
  // Rows are int32.
  require(page_size > 0 && num_pages >= 0 && num_pages <= INT32_MAX / page_size);
  const c10::DeviceGuard guard(device);
  MlaContextIndicesParams p{};
  p.block_tables = index_array(block_tables);
  p.table_stride = block_tables.stride(0);
  p.requests = block_tables.size(0);
  p.columns = block_tables.size(1);
  p.piece_requests = piece_requests.const_data_ptr<int32_t>();
  p.piece_starts = piece_starts.const_data_ptr<int32_t>();
  p.piece_indptr = piece_indptr.const_data_ptr<int32_t>();
  p.pieces = piece_requests.numel();
  p.tokens = kv_indices.numel();
  p.num_pages = num_pages;
  p.page_size = to_int32(page_size);
  p.rows = static_cast<int32_t*>(memory_to_write(kv_indices));
  p.fault = fault_of(fault);
  check_launch(mla_context_indices(p, current_stream(block_tables)), "mla_context_indices");
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "mla_context_indices(Tensor block_tables, Tensor piece_requests, Tensor piece_starts, Tensor piece_indptr, "
      "int num_pages, int page_size, Tensor(a!) kv_indices, Tensor(b!) fault) -> ()");
  m.impl("mla_context_indices", c10::DispatchKey::CompositeExplicitAutograd, &fi::mla_context_indices_shim);
}
