// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/mla_context_plan.h, and the plan to the device: one copy into one piece of memory,
// which has room for the rows of the cache behind the plan's words.
#include "kernels/mla_context_plan.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <tuple>

#include "shims/plan_memory.h"

namespace fi {
namespace {

// The numbers of the plan in the order of MlaContextPlan, then the chunks' by columns: all `first`, all `pieces`, and
// so on.
std::vector<int64_t> numbers(const MlaContextPlan& plan) {
  std::vector<int64_t> found{plan.fault,  plan.where,   plan.value,     plan.bound,  plan.pieces,
                             plan.tokens, plan.longest, plan.max_q_len, plan.total_q};
  const std::vector<MlaContextChunk>& chunks = plan.chunks;
  found.reserve(found.size() + 8 * chunks.size());
  for (const auto field : {&MlaContextChunk::first, &MlaContextChunk::pieces, &MlaContextChunk::tokens,
                           &MlaContextChunk::continues, &MlaContextChunk::q_begin, &MlaContextChunk::q_end,
                           &MlaContextChunk::max_q_len, &MlaContextChunk::max_kv_len}) {
    for (const MlaContextChunk& chunk : chunks) found.push_back(chunk.*field);
  }
  return found;
}

at::Tensor on_device(const at::Tensor& like, const MlaContextPlan& plan, c10::Device device) {
  const auto size = static_cast<int64_t>(plan.words.size());
  if (device.is_cpu()) return host_words(like, plan.words, false, plan.tokens);
  const at::Tensor words = host_words(like, plan.words, true);
  at::Tensor there = like.new_empty({size + plan.tokens}, at::TensorOptions().dtype(at::kInt).device(device));
  there.narrow(0, 0, size).copy_(words, true);
  return there;
}

// The words of the plan on the device as `qo_indptr`, pieces' requests, starts and indptr; then room for a row of the
// cache to each token; then for each chunk its `qo_indptr`, its `kv_indptr` and its part of the rows.
std::vector<at::Tensor> parts_of(const at::Tensor& there, const MlaContextPlan& plan, int64_t batch) {
  Parts words(there);
  const auto aligned = [&words](int64_t size) { return words.next(size, mla_context_aligned(size) - size); };
  std::vector<at::Tensor> found, indptrs;
  found.reserve(5 + 3 * plan.chunks.size());
  indptrs.reserve(2 * plan.chunks.size());
  for (const int64_t size : {batch + 1, plan.pieces, plan.pieces, plan.pieces + 1}) found.push_back(aligned(size));
  for (const MlaContextChunk& chunk : plan.chunks) {
    for (int side = 0; side < 2; ++side) indptrs.push_back(aligned(chunk.pieces + 1));
  }
  Parts rows(words);
  found.push_back(words.next(plan.tokens));
  size_t next = 0;
  for (const MlaContextChunk& chunk : plan.chunks) {
    for (int side = 0; side < 2; ++side) found.push_back(std::move(indptrs[next++]));
    found.push_back(rows.next(chunk.tokens));
  }
  return found;
}

std::tuple<std::vector<int64_t>, std::vector<at::Tensor>> mla_context_plan_shim(const at::Tensor& qo_indptr,
                                                                                const at::Tensor& contexts,
                                                                                int64_t budget, int64_t alignment,
                                                                                c10::Device device) {
  require(is_host_index_vector(qo_indptr) && is_host_index_vector(contexts));
  require(qo_indptr.numel() == contexts.numel() + 1 && alignment > 0);
  const at::AutoDispatchBelowADInplaceOrView guard;
  MlaContextPlanParams p{};
  p.qo_indptr = index_array(qo_indptr);
  p.contexts = index_array(contexts);
  p.batch = contexts.numel();
  p.budget = budget;
  p.alignment = alignment;
  const MlaContextPlan plan = plan_mla_context(p);
  if (plan.fault != kMlaContextGood) return {numbers(plan), {}};
  return {numbers(plan), parts_of(on_device(qo_indptr, plan, device), plan, p.batch)};
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "mla_context_plan(Tensor qo_indptr, Tensor contexts, int budget, int alignment, Device device) -> "
      "(int[], Tensor[])");
  m.impl("mla_context_plan", c10::DispatchKey::CompositeExplicitAutograd, &fi::mla_context_plan_shim);
}
