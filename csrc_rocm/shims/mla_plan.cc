// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/mla_plan.h. All tensors are on the host.
#include "kernels/mla_plan.h"

#include <cstring>

#include "shims/tensor.h"

namespace fi {
namespace {

bool is_host_int32(const at::Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kInt && t.dim() == 1 && t.is_contiguous();
}

// `metadata` is qo_indptr, kv_indptr and kv_len one after the other.
MlaPlanParams params_of(const at::Tensor& metadata, const at::Tensor& report) {
  require(is_host_int32(metadata) && report.is_cpu() && report.is_contiguous());
  require(report.scalar_type() == at::kLong && report.numel() * 8 == int64_t{sizeof(MlaPlanReport)});
  MlaPlanParams p{};
  p.batch = (metadata.numel() - 2) / 3;
  require(metadata.numel() == 3 * p.batch + 2);
  p.qo_indptr = metadata.const_data_ptr<int32_t>();
  p.kv_indptr = p.qo_indptr + p.batch + 1;
  p.kv_len = p.kv_indptr + p.batch + 1;
  p.report = reinterpret_cast<MlaPlanReport*>(report.mutable_data_ptr<int64_t>());
  return p;
}

// `shapes` are MlaPlanShapes; `plan` gets the metadata, the lengths of last pages, and from word `schedule_at` on the
// schedule.
void mla_plan_shim(const at::Tensor& metadata, int64_t heads, int64_t page_size, bool causal, at::IntArrayRef shapes,
                   int64_t schedule_at, const at::Tensor& plan, const at::Tensor& report) {
  MlaPlanParams p = params_of(metadata, report);
  require(is_host_int32(plan) && heads > 0 && page_size > 0);
  require(!shapes.empty() && shapes.size() % 3 == 0);
  for (const int64_t n : shapes) require(n > 0);
  require(schedule_at >= metadata.numel() + p.batch && plan.numel() >= schedule_at);
  p.heads = heads;
  p.page_size = page_size;
  p.causal = causal;
  p.shapes = reinterpret_cast<const MlaPlanShape*>(shapes.data());
  p.num_shapes = int64_t(shapes.size() / 3);
  auto* words = plan.mutable_data_ptr<int32_t>();
  std::memcpy(words, p.qo_indptr, static_cast<size_t>(metadata.numel()) * sizeof(int32_t));
  p.last_page_len = words + metadata.numel();
  p.schedule = words + schedule_at;
  p.capacity = plan.numel() - schedule_at;
  plan_mla(p);
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "mla_plan(Tensor metadata, int heads, int page_size, bool causal, int[] shapes, int schedule_at, "
      "Tensor(a!) plan, Tensor(b!) report) -> ()");
  m.impl("mla_plan", c10::DispatchKey::CompositeExplicitAutograd, &fi::mla_plan_shim);
}
