// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/mla_context_plan.h. All tensors are on the host.
#include "kernels/mla_context_plan.h"

#include "shims/tensor.h"

namespace fi {
namespace {

// `metadata` is qo_indptr and the context lengths, one after the other.
void mla_context_plan_shim(const at::Tensor& metadata, int64_t budget, int64_t alignment, const at::Tensor& words,
                           const at::Tensor& chunks, const at::Tensor& report) {
  for (const at::Tensor* t : {&metadata, &words}) {
    require(t->is_cpu() && t->scalar_type() == at::kInt && t->dim() == 1 && t->is_contiguous());
  }
  for (const at::Tensor* t : {&chunks, &report}) {
    require(t->is_cpu() && t->scalar_type() == at::kLong && t->is_contiguous());
  }
  require(report.numel() * 8 == int64_t{sizeof(MlaContextPlanReport)} && metadata.numel() % 2 == 1);
  require(alignment > 0);
  MlaContextPlanParams p{};
  p.batch = metadata.numel() / 2;
  p.qo_indptr = metadata.const_data_ptr<int32_t>();
  p.contexts = p.qo_indptr + p.batch + 1;
  p.budget = budget;
  p.alignment = alignment;
  p.words = words.mutable_data_ptr<int32_t>();
  p.word_capacity = words.numel();
  p.chunks = reinterpret_cast<MlaContextChunk*>(chunks.mutable_data_ptr<int64_t>());
  p.chunk_capacity = chunks.numel() * 8 / int64_t{sizeof(MlaContextChunk)};
  p.report = reinterpret_cast<MlaContextPlanReport*>(report.mutable_data_ptr<int64_t>());
  plan_mla_context(p);
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "mla_context_plan(Tensor metadata, int budget, int alignment, Tensor(a!) words, Tensor(b!) chunks, "
      "Tensor(c!) report) -> ()");
  m.impl("mla_context_plan", c10::DispatchKey::CompositeExplicitAutograd, &fi::mla_context_plan_shim);
}
