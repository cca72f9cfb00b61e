// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Metadata of an attention batch, checked, measured, and narrowed into memory of the plan's own: the caller may write
// its tensors again once the plan returns. Read by flashinfer/host_batch.py.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "shims/plan_memory.h"

namespace fi {
namespace {

enum Fault : int64_t {
  kGood = 0,
  kRange = 1,  // a number of more than 32 bits
  kStart = 2,  // the first is not 0
  kFalls = 3,  // a request of less than nothing
  kTail = 4,   // a last page of less than nothing, or of more than a page
};

// Parts begin on a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that is aligned to less.
int64_t aligned(int64_t words) { return (words + 3) / 4 * 4; }

struct Report {
  int64_t fault, part, where, value, bound;  // part: 0 qo_indptr, 1 kv_indptr, 2 last_page_len

  bool refuse(int64_t fault_, int64_t where_, int64_t value_, int64_t bound_ = 0) {
    fault = fault_;
    where = where_;
    value = value_;
    bound = bound_;
    return false;
  }
};

// The longest of the stretches between numbers that begin with 0 and do not fall.
bool longest(const int32_t* indptr, int64_t count, int64_t* most, Report& report) {
  if (indptr[0] != 0) return report.refuse(kStart, 0, indptr[0]);
  for (int64_t b = 0; b < count; ++b) {
    if (indptr[b + 1] < indptr[b]) return report.refuse(kFalls, b, indptr[b], indptr[b + 1]);
    *most = std::max(*most, int64_t{indptr[b + 1]} - indptr[b]);
  }
  return true;
}

bool are_tails(const int32_t* last, int64_t count, int64_t page_size, Report& report) {
  for (int64_t b = 0; b < count; ++b) {
    if (last[b] < 0 || last[b] > page_size) return report.refuse(kTail, b, last[b]);
  }
  return true;
}

std::vector<at::Tensor> parts_of(const at::Tensor& words, const std::vector<int64_t>& sizes) {
  Parts parts(words);
  std::vector<at::Tensor> found;
  for (const int64_t size : sizes) found.push_back(parts.next(size, aligned(size) - size));
  return found;
}

using Found = std::tuple<std::vector<int64_t>, std::vector<at::Tensor>, std::vector<at::Tensor>>;

// Without `qo_indptr` each request has `q_len` queries. Returns the report and what was measured, then the given
// vectors as int32 on the host, pinned if so, and copies of them on the device `there` if one is given.
Found attention_batch_shim(const std::optional<at::Tensor>& qo_indptr, int64_t q_len, const at::Tensor& kv_indptr,
                           const std::optional<at::Tensor>& last_page_len, int64_t page_size, bool pinned,
                           std::optional<c10::Device> there) {
  const int64_t batch = kv_indptr.numel() - 1;
  require(batch >= 0 && is_host_index_vector(kv_indptr));
  std::vector<const at::Tensor*> given;
  std::vector<int64_t> sizes, names;
  const auto take = [&](const at::Tensor& t, int64_t size, int64_t name) {
    require(is_host_index_vector(t) && t.numel() == size);
    given.push_back(&t);
    sizes.push_back(size);
    names.push_back(name);
  };
  if (qo_indptr) take(*qo_indptr, batch + 1, 0);
  take(kv_indptr, batch + 1, 1);
  if (last_page_len) take(*last_page_len, batch, 2);
  int64_t total = 0;
  for (const int64_t size : sizes) total += aligned(size);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor block = host_block(kv_indptr, 4 * total, pinned);
  const at::Tensor words = view_of(block, caffe2::TypeMeta::Make<int32_t>(), 0, total);
  std::vector<at::Tensor> parts = parts_of(words, sizes);
  Report report{};
  int64_t totals[2] = {batch * q_len, 0}, most[2] = {batch > 0 ? q_len : 0, 0};
  bool good = true;
  for (size_t i = 0; good && i < given.size(); ++i) {
    const int64_t name = report.part = names[i];
    auto* to = static_cast<int32_t*>(parts[i].mutable_data_ptr());
    const int64_t beyond = narrow(*given[i], to);
    if (beyond >= 0) {
      good = report.refuse(kRange, beyond, index_array(*given[i])[beyond]);
    } else if (name < 2) {
      most[name] = 0;
      good = longest(to, batch, &most[name], report);
      totals[name] = to[batch];
    } else {
      good = are_tails(to, batch, page_size, report);
    }
  }
  std::vector<at::Tensor> copies;
  if (good && there) {
    at::Tensor copy = kv_indptr.new_empty({total}, at::TensorOptions().dtype(at::kInt).device(*there));
    copy.copy_(words, true);
    copies = parts_of(copy, sizes);
  }
  return {{report.fault, report.part, report.where, report.value, report.bound, totals[0], totals[1], most[0], most[1]},
          std::move(parts),
          std::move(copies)};
}

}  // namespace
}  // namespace fi

TORCH_LIBRARY_FRAGMENT(FI_NAMESPACE, m) {
  m.def(
      "attention_batch(Tensor? qo_indptr, int q_len, Tensor kv_indptr, Tensor? last_page_len, int page_size, "
      "bool pinned, Device? there) -> (int[], Tensor[], Tensor[])");
  m.impl("attention_batch", c10::DispatchKey::CompositeExplicitAutograd, &fi::attention_batch_shim);
}
