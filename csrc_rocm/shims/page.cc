// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/page.h. The appends check their arguments here, as the op's check in
// flashinfer/ops/page.py does in words. `fault` is int64[4] on the same device.
#include "kernels/page.h"

#include "shims/fp8.h"
#include "shims/tensor.h"

namespace fi {
namespace {

void require_page_table(const at::Tensor& rows, const at::Tensor& batch_indices, const at::Tensor& positions,
                        const at::Tensor& kv_indices, const at::Tensor& kv_indptr) {
  const c10::Device device = rows.device();
  require(is_index_vector(batch_indices, device) && is_index_vector(positions, device));
  require(is_index_vector(kv_indices, device) && is_index_vector(kv_indptr, device));
  require(batch_indices.size(0) == rows.size(0) && positions.size(0) == rows.size(0) && kv_indptr.size(0) >= 1);
}

// How rows get into a cache; refuses pairs of dtypes that have no way.
RowKind row_kind(const at::Tensor& rows, const at::Tensor& cache) {
  const auto from = rows.scalar_type();
  if (from == cache.scalar_type()) return RowKind::kAsIs;
  require(is_fp8(cache));
  require(from == at::kHalf || from == at::kBFloat16 || from == at::kFloat);
  return from == at::kHalf ? RowKind::kHalf : from == at::kBFloat16 ? RowKind::kBfloat16 : RowKind::kFloat;
}

// Least and most are SCALE_LEAST and SCALE_MOST of flashinfer/ops/page.py.
Quantizer quantizer_of(RowKind from, double scale, const at::Tensor& cache) {
  require(from == RowKind::kAsIs ? scale == 1 : scale >= 0x1p-126 && scale <= 0x1p126);
  return Quantizer{1.0f / static_cast<float>(scale), is_fnuz(cache)};
}

// A cache of these sizes; -1 leaves a size free. No pages is a pool too, but kernels divide by the page size.
void require_cache(const at::Tensor& cache, const at::Tensor& rows, at::IntArrayRef shape) {
  require(cache.dim() == static_cast<int64_t>(shape.size()) && cache.device() == rows.device() &&
          is_dense_last(cache) && is_writable(cache));
  require(!cache.requires_grad() || !at::GradMode::is_enabled());
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const int64_t size = cache.size(static_cast<int64_t>(dim));
    require(shape[dim] < 0 ? dim == 0 || size > 0 : size == shape[dim]);
  }
}

void require_shuffled(const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& key) {
  const int64_t heads = key.size(1), dim = key.size(2), x = 16 / k_cache.element_size();
  require(dim % x == 0);
  require_cache(k_cache, key, {-1, heads, dim / x, -1, x});
  const int64_t page_size = k_cache.size(3);
  require(page_size % x == 0);
  require_cache(v_cache, key, {k_cache.size(0), heads, page_size / x, dim, x});
  for (const at::Tensor* cache : {&k_cache, &v_cache}) {
    require(cache->numel() == 0 || (cache->stride(2) == cache->size(3) * x && cache->stride(3) == x));
  }
}

void require_append(const at::Tensor& key, const at::Tensor& value, const at::Tensor& k_cache,
                    const at::Tensor& v_cache, c10::string_view layout) {
  require(key.dim() == 3 && value.dim() == 3 && is_movable(key) && is_alike(value, key));
  require(key.sizes() == value.sizes() && is_dense_last(key) && is_dense_last(value));
  require(key.numel() > 0 || key.size(0) == 0);
  require(is_movable(k_cache) && k_cache.scalar_type() == v_cache.scalar_type());
  const int64_t heads = key.size(1), dim = key.size(2);
  if (layout == "SHUFFLED") return require_shuffled(k_cache, v_cache, key);
  require(layout == "NHD" || layout == "HND");
  const bool nhd = layout == "NHD";
  require_cache(k_cache, key, {-1, nhd ? -1 : heads, nhd ? heads : -1, dim});
  require_cache(v_cache, key, k_cache.sizes());
}

void require_append_mla(const at::Tensor& ckv, const at::Tensor& kpe, const at::Tensor& ckv_cache,
                        const at::Tensor& kpe_cache) {
  for (const at::Tensor* rows : {&ckv, &kpe}) {
    require(rows->dim() == 2 && is_movable(*rows) && is_dense_last(*rows));
    require(rows->size(1) * rows->element_size() % 8 == 0 && (rows->numel() > 0 || rows->size(0) == 0));
  }
  require(is_alike(kpe, ckv) && kpe.size(0) == ckv.size(0) && kpe_cache.scalar_type() == ckv_cache.scalar_type());
  require_cache(ckv_cache, ckv, {-1, -1, ckv.size(1)});
  require_cache(kpe_cache, kpe, {ckv_cache.size(0), ckv_cache.size(1), kpe.size(1)});
}

PageTable page_table(const at::Tensor& batch_indices, const at::Tensor& positions, const at::Tensor& kv_indptr,
                     const at::Tensor& kv_indices, int64_t num_pages, int64_t page_size) {
  PageTable t{};
  t.batch_indices = index_array(batch_indices);
  t.positions = index_array(positions);
  t.kv_indptr = index_array(kv_indptr);
  t.kv_indices = index_array(kv_indices);
  t.nnz = batch_indices.numel();
  t.batch_size = kv_indptr.numel() - 1;
  t.num_indices = kv_indices.numel();
  t.num_pages = num_pages;
  t.page_size = to_int32(page_size);
  return t;
}

// Dimensions of a cache tensor: head and token axes (-1 for token where the layout fixes it).
AppendSide append_side(const at::Tensor& rows, const at::Tensor& cache, int64_t head_dim, int64_t token_dim,
                       const Quantizer& quantizer) {
  AppendSide s{};
  s.rows = rows.const_data_ptr();
  s.row_stride = byte_stride(rows, 0);
  s.row_head_stride = byte_stride(rows, 1);
  s.pool = memory_to_write(cache);
  s.page_stride = byte_stride(cache, 0);
  s.head_stride = byte_stride(cache, head_dim);
  s.token_stride = token_dim < 0 ? 0 : byte_stride(cache, token_dim);
  s.quantizer = quantizer;
  return s;
}

void append_paged_kv_cache_shim(const at::Tensor& key, const at::Tensor& value, const at::Tensor& batch_indices,
                                const at::Tensor& positions, const at::Tensor& k_cache, const at::Tensor& v_cache,
                                const at::Tensor& kv_indices, const at::Tensor& kv_indptr, c10::string_view layout,
                                double k_scale, double v_scale, const at::Tensor& fault) {
  require_append(key, value, k_cache, v_cache, layout);
  require(k_cache.numel() == 0 || k_cache.const_data_ptr() != v_cache.const_data_ptr());
  require_page_table(key, batch_indices, positions, kv_indices, kv_indptr);
  const c10::DeviceGuard guard(key.device());
  const bool shuffled = layout == "SHUFFLED", nhd = layout == "NHD";
  const int64_t head_dim = nhd ? 2 : 1, token_dim = shuffled ? -1 : nhd ? 1 : 2;
  const int64_t page_size = shuffled ? k_cache.size(3) : k_cache.size(token_dim);
  AppendParams p{};
  p.from = row_kind(key, k_cache);
  p.table = page_table(batch_indices, positions, kv_indptr, kv_indices, k_cache.size(0), page_size);
  p.k = append_side(key, k_cache, head_dim, token_dim, quantizer_of(p.from, k_scale, k_cache));
  p.v = append_side(value, v_cache, head_dim, token_dim, quantizer_of(p.from, v_scale, v_cache));
  p.layout = shuffled ? PoolLayout::kShuffled : PoolLayout::kStrided;
  p.num_heads = to_int32(key.size(1));
  p.element_bytes = to_int32(k_cache.element_size());
  p.head_bytes = to_int32(key.size(2) * k_cache.element_size());
  p.fault = fault_of(fault);
  check_launch(append_paged_kv_cache(p, current_stream(key)), "append_paged_kv_cache");
}

MlaSide mla_side(const at::Tensor& rows, const at::Tensor& cache) {
  MlaSide s{};
  s.rows = rows.const_data_ptr();
  s.row_stride = byte_stride(rows, 0);
  s.pool = memory_to_write(cache);
  s.page_stride = byte_stride(cache, 0);
  s.token_stride = byte_stride(cache, 1);
  s.width_bytes = to_int32(rows.size(1) * cache.element_size());
  return s;
}

void append_paged_mla_kv_cache_shim(const at::Tensor& ckv, const at::Tensor& kpe, const at::Tensor& batch_indices,
                                    const at::Tensor& positions, const at::Tensor& ckv_cache,
                                    const at::Tensor& kpe_cache, const at::Tensor& kv_indices,
                                    const at::Tensor& kv_indptr, double kv_scale, const at::Tensor& fault) {
  require_append_mla(ckv, kpe, ckv_cache, kpe_cache);
  require(ckv_cache.numel() == 0 || kpe_cache.numel() == 0 || ckv_cache.const_data_ptr() != kpe_cache.const_data_ptr());
  require_page_table(ckv, batch_indices, positions, kv_indices, kv_indptr);
  const c10::DeviceGuard guard(ckv.device());
  MlaAppendParams p{};
  p.from = row_kind(ckv, ckv_cache);
  p.quantizer = quantizer_of(p.from, kv_scale, ckv_cache);
  p.table = page_table(batch_indices, positions, kv_indptr, kv_indices, ckv_cache.size(0), ckv_cache.size(1));
  p.ckv = mla_side(ckv, ckv_cache);
  p.kpe = mla_side(kpe, kpe_cache);
  p.fault = fault_of(fault);
  check_launch(append_paged_mla_kv_cache(p, current_stream(ckv)), "append_paged_mla_kv_cache");
}

void get_batch_indices_positions_shim(const at::Tensor& append_indptr, const at::Tensor& seq_lens,
                                      const at::Tensor& batch_indices, const at::Tensor& positions,
                                      const at::Tensor& fault) {
  const c10::DeviceGuard guard(append_indptr.device());
  BatchPositionsParams p{};
  p.append_indptr = index_array(append_indptr);
  p.seq_lens = index_array(seq_lens);
  p.batch_size = append_indptr.numel() - 1;
  p.nnz = batch_indices.numel();
  p.batch_indices = static_cast<int32_t*>(memory_to_write(batch_indices));
  p.positions = static_cast<int32_t*>(memory_to_write(positions));
  p.fault = fault_of(fault);
  check_launch(get_batch_indices_positions(p, current_stream(append_indptr)), "get_batch_indices_positions");
}

void get_seq_lens_shim(const at::Tensor& kv_indptr, const at::Tensor& kv_last_page_len, int64_t page_size,
                       const at::Tensor& seq_lens, const at::Tensor& fault) {
  const c10::DeviceGuard guard(kv_indptr.device());
  SeqLensParams p{};
  p.kv_indptr = index_array(kv_indptr);
  p.kv_last_page_len = index_array(kv_last_page_len);
  p.batch_size = kv_indptr.numel() - 1;
  p.page_size = to_int32(page_size);
  p.seq_lens = static_cast<int32_t*>(memory_to_write(seq_lens));
  p.fault = fault_of(fault);
  check_launch(get_seq_lens(p, current_stream(kv_indptr)), "get_seq_lens");
}

}  // namespace
}  // namespace fi

// Schemas are spelled out: an inferred one drops the mutation marks and torch.compile then loses the writes.
TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "append_paged_kv_cache(Tensor key, Tensor value, Tensor batch_indices, Tensor positions, Tensor(a!) "
      "k_cache, Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, str layout, float k_scale, float v_scale, "
      "Tensor(c!) fault) -> ()");
  m.impl("append_paged_kv_cache", c10::DispatchKey::CompositeExplicitAutograd, &fi::append_paged_kv_cache_shim);
  m.def(
      "append_paged_mla_kv_cache(Tensor ckv, Tensor kpe, Tensor batch_indices, Tensor positions, "
      "Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor kv_indices, Tensor kv_indptr, float kv_scale, "
      "Tensor(c!) fault) -> ()");
  m.impl("append_paged_mla_kv_cache", c10::DispatchKey::CompositeExplicitAutograd, &fi::append_paged_mla_kv_cache_shim);
  m.def(
      "get_batch_indices_positions(Tensor append_indptr, Tensor seq_lens, Tensor(a!) batch_indices, "
      "Tensor(b!) positions, Tensor(c!) fault) -> ()");
  m.impl("get_batch_indices_positions", c10::DispatchKey::CompositeExplicitAutograd,
         &fi::get_batch_indices_positions_shim);
  m.def(
      "get_seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, int page_size, Tensor(a!) seq_lens, Tensor(b!) fault) "
      "-> ()");
  m.impl("get_seq_lens", c10::DispatchKey::CompositeExplicitAutograd, &fi::get_seq_lens_shim);
}
