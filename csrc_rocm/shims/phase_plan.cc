// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/phase_plan.h. All tensors are on the host.
#include "kernels/phase_plan.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <tuple>

#include "shims/plan_memory.h"

namespace fi {
namespace {

// The numbers of the plan in the order of PhasePlan, then each launch's in the order of PhaseLaunch; spans as two.
std::vector<int64_t> numbers(const PhasePlan& plan) {
  std::vector<int64_t> found{plan.fault, plan.where, plan.value, plan.bound};
  const auto put = [&found](const PhaseSpan& span) { found.insert(found.end(), {span.begin, span.end}); };
  found.reserve(64 + 11 * plan.launches.size());
  for (const auto* three : {plan.requests, plan.tokens, plan.max_q_len}) found.insert(found.end(), three, three + 3);
  found.insert(found.end(), {plan.total_q, plan.total_pages});
  for (const PhaseSpan& span : {plan.kv_indptr, plan.last_page_len, plan.decode_qo, plan.extend_qo, plan.prefill_qo,
                                plan.extend_pages_qo, plan.prefill_pages_qo}) {
    put(span);
  }
  for (const PhaseLaunch& launch : plan.launches) {
    put(launch.requests);
    put(launch.rows);
    found.push_back(launch.tokens);
    for (const PhaseSpan& span : {launch.starts, launch.kv_indptr, launch.qo_indptr}) put(span);
  }
  return found;
}

std::tuple<std::vector<int64_t>, at::Tensor> phase_plan_shim(const at::Tensor& qo_indptr, const at::Tensor& kv_indptr,
                                                             const at::Tensor& last_page_len, int64_t page_size,
                                                             int64_t threshold, int64_t budget, int64_t launches,
                                                             bool widen, bool pinned) {
  for (const at::Tensor* t : {&qo_indptr, &kv_indptr, &last_page_len}) require(is_host_index_vector(*t));
  require(qo_indptr.numel() == last_page_len.numel() + 1 && kv_indptr.numel() == qo_indptr.numel() && page_size > 0);
  const at::AutoDispatchBelowADInplaceOrView guard;
  PhasePlanParams p{};
  p.qo_indptr = index_array(qo_indptr);
  p.kv_indptr = index_array(kv_indptr);
  p.last_page_len = index_array(last_page_len);
  p.batch = last_page_len.numel();
  p.page_size = page_size;
  p.threshold = threshold;
  p.budget = budget;
  p.launches = launches;
  p.widen = widen;
  const PhasePlan plan = plan_phases(p);
  return {numbers(plan), host_words(qo_indptr, plan.words, pinned && plan.fault == kPhaseGood)};
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "phase_plan(Tensor qo_indptr, Tensor kv_indptr, Tensor last_page_len, int page_size, int threshold, int budget, "
      "int launches, bool widen, bool pinned) -> (int[], Tensor)");
  m.impl("phase_plan", c10::DispatchKey::CompositeExplicitAutograd, &fi::phase_plan_shim);
}
