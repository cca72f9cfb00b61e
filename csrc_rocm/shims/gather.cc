// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/gather.h. Arguments were checked by the op. `fnuz` says which FP8 flavour the
// pool has, if it has one. `fault` is int64[4] on the same device.
#include "kernels/gather.h"

#include "shims/tensor.h"

namespace fi {
namespace {

GatherOut gather_out(const at::Tensor& cache, const at::Tensor& out) {
  if (out.scalar_type() == cache.scalar_type()) return GatherOut::kCopy;
  switch (out.scalar_type()) {
    case at::kBFloat16:
      return GatherOut::kBf16;
    case at::kHalf:
      return GatherOut::kHalf;
    case at::kFloat:
      return GatherOut::kFloat;
    default:
      TORCH_CHECK_VALUE(false, "refused");
  }
}

GatherSide gather_side(const at::Tensor& cache, const at::Tensor& out, int64_t head_dim, int64_t token_dim,
                       double scale) {
  GatherSide s{};
  s.pool = cache.const_data_ptr();
  s.page_stride = byte_stride(cache, 0);
  s.head_stride = byte_stride(cache, head_dim);
  s.token_stride = token_dim < 0 ? 0 : byte_stride(cache, token_dim);
  s.out = memory_to_write(out);
  s.row_stride = byte_stride(out, 0);
  s.row_head_stride = byte_stride(out, 1);
  s.scale = static_cast<float>(scale);
  return s;
}

void gather_paged_kv_shim(const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& kv_indices,
                          const at::Tensor& kv_indptr, const at::Tensor& starts, const at::Tensor& out_indptr,
                          c10::string_view layout, bool fnuz, double k_scale, double v_scale, const at::Tensor& k_out,
                          const at::Tensor& v_out, const at::Tensor& fault) {
  const c10::DeviceGuard guard(k_cache.device());
  const bool shuffled = layout == "SHUFFLED", nhd = layout == "NHD";
  const int64_t head_axis = nhd ? 2 : 1, token_axis = shuffled ? -1 : nhd ? 1 : 2;
  GatherParams p{};
  p.table.kv_indices = index_array(kv_indices);
  p.table.kv_indptr = index_array(kv_indptr);
  p.table.starts = index_array(starts);
  p.table.out_indptr = index_array(out_indptr);
  p.table.batch_size = starts.numel();
  p.table.rows = k_out.size(0);
  p.table.num_indices = kv_indices.numel();
  p.table.num_pages = k_cache.size(0);
  p.table.page_size = to_int32(shuffled ? k_cache.size(3) : k_cache.size(token_axis));
  p.k = gather_side(k_cache, k_out, head_axis, token_axis, k_scale);
  p.v = gather_side(v_cache, v_out, head_axis, token_axis, v_scale);
  p.layout = shuffled ? PoolLayout::kShuffled : PoolLayout::kStrided;
  p.out = gather_out(k_cache, k_out);
  p.num_heads = to_int32(k_out.size(1));
  p.head_dim = to_int32(k_out.size(2));
  p.element_bytes = to_int32(k_cache.element_size());
  p.fnuz = fnuz;
  p.fault = fault_of(fault);
  check_launch(gather_paged_kv(p, current_stream(k_cache)), "gather_paged_kv");
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "gather_paged_kv(Tensor k_cache, Tensor v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor starts, "
      "Tensor out_indptr, str layout, bool fnuz, float k_scale, float v_scale, Tensor(a!) k_out, Tensor(b!) v_out, "
      "Tensor(c!) fault) -> ()");
  m.impl("gather_paged_kv", c10::DispatchKey::CompositeExplicitAutograd, &fi::gather_paged_kv_shim);
}
