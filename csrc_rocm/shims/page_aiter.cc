// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// The paged append through AITER: all arguments are held against what the op asks for and against what AITER's kernel
// takes for granted, since a check of AITER's own may end the process. Then one kernel maps slots, and AITER writes.
#include <ATen/ops/empty.h>

#include "aiter/entry.h"
#include "kernels/page_aiter.h"
#include "shims/tensor.h"

namespace fi {
namespace {

void require_page_table(const at::Tensor& rows, const at::Tensor& batch_indices, const at::Tensor& positions,
                        const at::Tensor& kv_indices, const at::Tensor& kv_indptr) {
  for (const at::Tensor* t : {&batch_indices, &positions, &kv_indices, &kv_indptr}) {
    require(is_index_vector(*t, rows.device()));
  }
  require(batch_indices.size(0) == rows.size(0) && positions.size(0) == rows.size(0) && kv_indptr.size(0) >= 1);
}

// Token after token, each with its heads side by side: AITER multiplies sizes where it could have used strides.
bool is_dense_nhd(const at::Tensor& cache) {
  const int64_t dim = cache.size(3), token = dim * cache.size(2);
  return (dim == 1 || cache.stride(3) == 1) && (cache.size(2) == 1 || cache.stride(2) == dim) &&
         (cache.size(1) == 1 || cache.stride(1) == token);
}

bool is_packed(const at::Tensor& rows) {
  return (rows.size(2) == 1 || rows.stride(2) == 1) && (rows.size(1) == 1 || rows.stride(1) == rows.size(2));
}

// AITER keeps these in `int`.
bool fits_int32(int64_t value) { return value >= 0 && value <= INT32_MAX; }

void require_rows(const at::Tensor& key, const at::Tensor& value) {
  require(key.dim() == 3 && value.dim() == 3 && is_alike(value, key) && key.sizes() == value.sizes());
  require((key.numel() > 0 || key.size(0) == 0) && is_packed(key) && is_packed(value));
  require(fits_int32(key.stride(0)) && fits_int32(value.stride(0)) && fits_int32(key.size(1) * key.size(2)));
  require(fits_int32(key.size(0)));
}

void require_caches(const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& key) {
  for (const at::Tensor* cache : {&k_cache, &v_cache}) {
    require(cache->dim() == 4 && is_alike(*cache, key) && is_writable(*cache));
    require(cache->size(2) == key.size(1) && cache->size(3) == key.size(2) && cache->size(1) > 0);
    require(!cache->requires_grad() || !at::GradMode::is_enabled());
    require(is_dense_nhd(*cache) && fits_int32(cache->stride(0)));
  }
  require(k_cache.sizes() == v_cache.sizes() && k_cache.stride(0) == v_cache.stride(0));
  require(k_cache.numel() == 0 || k_cache.const_data_ptr() != v_cache.const_data_ptr());
}

AiterRowType row_type(const at::Tensor& rows) {
  switch (rows.scalar_type()) {
    case at::kFloat:
      return AiterRowType::kFloat32;
    case at::kHalf:
      return AiterRowType::kFloat16;
    default:
      require(rows.scalar_type() == at::kBFloat16);
      return AiterRowType::kBFloat16;
  }
}

AiterTensorArg argument(const at::Tensor& t, void* data) {
  AiterTensorArg a{};
  a.tensor = &t;
  a.data = data;
  a.numel = t.numel();
  a.rank = static_cast<int32_t>(t.dim());
  for (int32_t i = 0; i < a.rank; ++i) {
    a.sizes[i] = t.size(i);
    a.strides[i] = t.stride(i);
  }
  return a;
}

AiterTensorArg read(const at::Tensor& t) { return argument(t, const_cast<void*>(t.const_data_ptr())); }

AiterTensorArg written(const at::Tensor& t) { return argument(t, memory_to_write(t)); }

void check_entry(int code, const char* message) {
  TORCH_CHECK(code != kRefused, "append_paged_kv_cache: AITER refused the call: ", message);
  check_launch(code, "append_paged_kv_cache");
}

void append_shim(const at::Tensor& key, const at::Tensor& value, const at::Tensor& batch_indices,
                 const at::Tensor& positions, const at::Tensor& k_cache, const at::Tensor& v_cache,
                 const at::Tensor& kv_indices, const at::Tensor& kv_indptr, double k_scale, double v_scale,
                 const at::Tensor& unit_scale, const at::Tensor& fault) {
  require(k_scale == 1 && v_scale == 1);
  const AiterRowType type = row_type(key);
  require_rows(key, value);
  require_caches(k_cache, v_cache, key);
  require_page_table(key, batch_indices, positions, kv_indices, kv_indptr);
  if (key.size(0) == 0) return;  // AITER would launch an empty grid
  const c10::DeviceGuard guard(key.device());
  const at::Tensor slots = at::empty({key.size(0)}, key.options().dtype(at::kLong));
  void* const stream = current_stream(key);

  SlotMappingParams p{};
  p.table.batch_indices = index_array(batch_indices);
  p.table.positions = index_array(positions);
  p.table.kv_indptr = index_array(kv_indptr);
  p.table.kv_indices = index_array(kv_indices);
  p.table.nnz = key.size(0);
  p.table.batch_size = kv_indptr.numel() - 1;
  p.table.num_indices = kv_indices.numel();
  p.table.num_pages = k_cache.size(0);
  p.table.page_size = to_int32(k_cache.size(1));
  p.slots = slots.mutable_data_ptr<int64_t>();
  p.fault = fault_of(fault);
  check_launch(map_slots(p, stream), "append_paged_kv_cache");
  // As on the CPU everywhere: a call with a bad row writes nothing.
  if (key.is_cpu() && p.fault->code != kNoFault) return;

  AiterAppend c{};
  c.key = read(key);
  c.value = read(value);
  c.k_cache = written(k_cache);
  c.v_cache = written(v_cache);
  c.slots = read(slots);
  c.scale = read(unit_scale);
  c.type = type;
  c.device = key.is_cpu() ? -1 : key.get_device();
  c.stream = stream;
  char message[512] = "";
  check_entry(fi_aiter_reshape_and_cache_flash(&c, message, sizeof(message)), message);
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "append_paged_kv_cache(Tensor key, Tensor value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, Tensor kv_indices, Tensor kv_indptr, float k_scale, float v_scale, "
      "Tensor unit_scale, Tensor(c!) fault) -> ()");
  m.impl("append_paged_kv_cache", c10::DispatchKey::CompositeExplicitAutograd, &fi::append_shim);
}
