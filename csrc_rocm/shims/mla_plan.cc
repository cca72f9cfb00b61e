// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Tensors to params for kernels/mla_plan.h. All tensors are on the host.
#include "kernels/mla_plan.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <tuple>
#include <vector>

#include "shims/plan_memory.h"

namespace fi {
namespace {

// Plans end on a multiple of so many words: most plans of a server then have one length, and one view of the buffer
// that they are copied into serves all.
constexpr int64_t kBlock = 256;

int64_t whole_blocks(int64_t words) { return (words + kBlock - 1) / kBlock * kBlock; }

// As `narrow`; returns false, and leaves a report, for a number that does not fit.
bool take(const at::Tensor& from, int32_t* to, MlaPlanReport* report) {
  const int64_t beyond = narrow(from, to);
  if (beyond < 0) return true;
  report->fault = kMlaRange;
  report->value = index_array(from)[beyond];
  return false;
}

std::vector<int64_t> numbers(const MlaPlanReport& r) {
  return {r.fault,    r.where,   r.value,       r.bound, r.words, r.max_q_len,
          r.total_kv, r.total_q, r.total_pages, r.shape, r.unseen};
}

// `shapes` are MlaPlanShapes. The plan is the metadata, the lengths of last pages, and from word `schedule_at` on the
// schedule; `room` words are what a schedule usually needs.
std::tuple<std::vector<int64_t>, at::Tensor> mla_plan_shim(const at::Tensor& qo_indptr, const at::Tensor& kv_indptr,
                                                           const at::Tensor& kv_len, int64_t heads, int64_t page_size,
                                                           bool causal, at::IntArrayRef shapes, int64_t schedule_at,
                                                           int64_t room, bool pinned) {
  for (const at::Tensor* t : {&qo_indptr, &kv_indptr, &kv_len}) require(is_host_index_vector(*t));
  MlaPlanParams p{};
  p.batch = kv_len.numel();
  require(qo_indptr.numel() == p.batch + 1 && kv_indptr.numel() == p.batch + 1 && heads > 0 && page_size > 0);
  require(!shapes.empty() && shapes.size() % 3 == 0);
  for (const int64_t n : shapes) require(n > 0);
  require(schedule_at >= 4 * p.batch + 2 && room >= 0);
  p.heads = heads;
  p.page_size = page_size;
  p.causal = causal;
  p.shapes = reinterpret_cast<const MlaPlanShape*>(shapes.data());
  p.num_shapes = int64_t(shapes.size() / 3);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  MlaPlanReport report{};
  p.report = &report;
  at::Tensor block;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const int64_t words = whole_blocks(schedule_at + room);
    block = host_block(qo_indptr, 4 * words, pinned);
    auto* begin = static_cast<int32_t*>(block.mutable_data_ptr());
    int32_t *kv = begin + p.batch + 1, *lens = kv + p.batch + 1;
    if (!take(qo_indptr, begin, &report) || !take(kv_indptr, kv, &report) || !take(kv_len, lens, &report)) break;
    p.qo_indptr = begin;
    p.kv_indptr = kv;
    p.kv_len = lens;
    p.last_page_len = lens + p.batch;
    p.schedule = begin + schedule_at;
    p.capacity = words - schedule_at;
    plan_mla(p);
    if (report.fault != kMlaPlanShort) break;
    room = report.bound;
  }
  const int64_t used = report.fault == kMlaPlanGood ? whole_blocks(schedule_at + report.words) : 0;
  return {numbers(report), view_of(block, caffe2::TypeMeta::Make<int32_t>(), 0, used)};
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "mla_plan(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_len, int heads, int page_size, bool causal, int[] "
      "shapes, "
      "int schedule_at, int room, bool pinned) -> (int[], Tensor)");
  m.impl("mla_plan", c10::DispatchKey::CompositeExplicitAutograd, &fi::mla_plan_shim);
}
