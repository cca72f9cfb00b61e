// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Cuts the keys of all requests into one stretch for each worker. Metadata are checked first: nothing is written if
// they are bad.
#include "kernels/mla_plan.h"

#include <algorithm>
#include <cstring>

namespace fi {
namespace {

constexpr int64_t kUnit = 64;     // keys: cuts fall on multiples of it, so that no tile is cut
constexpr int64_t kItemCost = 1;  // units that starting and ending an item costs
constexpr int64_t kItemWords = 8;
constexpr int64_t kMergeWords = 5;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool refuse(MlaPlanReport* report, int64_t fault, int64_t where, int64_t value, int64_t bound) {
  *report = MlaPlanReport{};
  report->fault = fault;
  report->where = where;
  report->value = value;
  report->bound = bound;
  return false;
}

bool check(const MlaPlanParams& p) {
  if (p.qo_indptr[0] != 0) return refuse(p.report, kMlaQoStart, 0, p.qo_indptr[0], 0);
  if (p.kv_indptr[0] != 0) return refuse(p.report, kMlaKvStart, 0, p.kv_indptr[0], 0);
  // No request has more tokens than fit into one page of this size; products with it stay below 2^63.
  const int64_t page_size = std::min<int64_t>(p.page_size, int64_t{1} << 31);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t pages = int64_t{p.kv_indptr[b + 1]} - p.kv_indptr[b], length = p.kv_len[b];
    if (p.qo_indptr[b + 1] < p.qo_indptr[b]) {
      return refuse(p.report, kMlaQoFalls, b, p.qo_indptr[b + 1], p.qo_indptr[b]);
    }
    if (pages < 0) return refuse(p.report, kMlaKvFalls, b, p.kv_indptr[b + 1], p.kv_indptr[b]);
    if (length < 0) return refuse(p.report, kMlaKvLength, b, length, 0);
    // pages == ceil_div(length, page_size), without a division for each request.
    if (pages * page_size < length || (pages > 0 && (pages - 1) * page_size >= length)) {
      return refuse(p.report, kMlaPages, b, length, pages);
    }
  }
  return true;
}

// Keys that the rows [first, first + rows_per_item) of request b need.
int64_t keys_of(const MlaPlanParams& p, const MlaPlanShape& shape, int64_t b, int64_t first) {
  const int64_t length = p.kv_len[b], q_len = p.qo_indptr[b + 1] - p.qo_indptr[b];
  if (!p.causal) return length;
  const int64_t last_token = std::min(q_len, ceil_div(first + shape.rows_per_item, p.heads)) - 1;
  return std::clamp<int64_t>(length - q_len + last_token + 1, 0, length);
}

template <typename Visit>
void for_each_block(const MlaPlanParams& p, const MlaPlanShape& shape, Visit visit) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = int64_t{p.qo_indptr[b + 1] - p.qo_indptr[b]} * p.heads;
    for (int64_t first = 0; first < rows; first += shape.rows_per_item) {
      visit(b, first, keys_of(p, shape, b, first));
    }
  }
}

class Cutter {
 public:
  Cutter(const MlaPlanParams& p, int64_t workers, int64_t budget)
      : p_(p),
        workers_(workers),
        budget_(budget),
        left_(budget),
        merges_(p.schedule + workers + 1),
        items_(merges_ + kMergeWords * workers) {
    std::memset(p.schedule, 0, sizeof(int32_t) * static_cast<size_t>(workers + 1 + kMergeWords * workers));
  }

  // Returns false if the schedule is full.
  bool add(int64_t b, int64_t first, int64_t keys) {
    int64_t begin = 0, pieces = 0;
    const int64_t first_slot = slots_;
    for (bool done = false; !done;) {
      // The last worker takes all that is left, and nobody begins an item for less than it costs.
      const bool last = worker_ + 1 == workers_;
      if (!last && left_ <= kItemCost) {
        next_worker();
        continue;
      }
      const int64_t room = last ? keys : (left_ - kItemCost) * kUnit;
      const int64_t end = keys - begin <= room ? keys : begin + room;
      const bool whole = begin == 0 && end == keys;
      if (!put(b, first, begin, end, whole ? -1 : slots_)) return false;
      slots_ += whole ? 0 : 1;
      left_ -= kItemCost + ceil_div(end - begin, kUnit);
      begin = end;
      ++pieces;
      done = begin >= keys;
    }
    if (pieces > 1) {
      int32_t* m = merges_ + kMergeWords * num_merges_++;
      const int32_t words[] = {p_.qo_indptr[b], int32_t(first), p_.qo_indptr[b + 1] - p_.qo_indptr[b],
                               int32_t(first_slot), int32_t(pieces)};
      std::memcpy(m, words, sizeof(words));
    }
    return true;
  }

  void finish() {
    while (worker_ < workers_) next_worker();
    p_.report->words = items_ - p_.schedule + kItemWords * num_items_;
    p_.report->slots = slots_;
  }

 private:
  void next_worker() {
    p_.schedule[++worker_] = int32_t(num_items_);
    left_ = budget_;
  }

  bool put(int64_t b, int64_t first, int64_t begin, int64_t end, int64_t slot) {
    int32_t* item = items_ + kItemWords * num_items_;
    if (item + kItemWords > p_.schedule + p_.capacity) return false;
    const int32_t words[] = {p_.qo_indptr[b], int32_t(first), p_.qo_indptr[b + 1] - p_.qo_indptr[b],
                             p_.kv_indptr[b], p_.kv_len[b],   int32_t(begin),
                             int32_t(end),    int32_t(slot)};
    std::memcpy(item, words, sizeof(words));
    ++num_items_;
    return true;
  }

  const MlaPlanParams& p_;
  const int64_t workers_, budget_;
  int64_t left_, worker_ = 0, num_items_ = 0, num_merges_ = 0, slots_ = 0;
  int32_t* const merges_;
  int32_t* const items_;
};

}  // namespace

void plan_mla(const MlaPlanParams& p) {
  *p.report = MlaPlanReport{};
  if (!check(p)) return;
  int64_t max_q_len = 0, unseen = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t q_len = int64_t{p.qo_indptr[b + 1]} - p.qo_indptr[b];
    max_q_len = std::max(max_q_len, q_len);
    unseen += q_len > p.kv_len[b] ? 1 : 0;
  }
  int64_t index = 0;
  while (index + 1 < p.num_shapes && p.heads * max_q_len > p.shapes[index].most_rows) ++index;
  const MlaPlanShape& shape = p.shapes[index];
  const int64_t fixed = shape.workers + 1 + kMergeWords * shape.workers;
  if (p.capacity < fixed) {
    refuse(p.report, kMlaPlanShort, 0, p.capacity, fixed);
    return;
  }
  int64_t units = 0, blocks = 0;
  for_each_block(p, shape, [&](int64_t, int64_t, int64_t keys) {
    units += ceil_div(keys, kUnit);
    ++blocks;
  });
  // Each worker may begin with the rest of a cut item, which costs as much as an item.
  const int64_t budget = ceil_div(units + kItemCost * (blocks + shape.workers), shape.workers);
  Cutter cutter(p, shape.workers, std::max(budget, kItemCost + 1));
  bool fits = true;
  for_each_block(p, shape, [&](int64_t b, int64_t first, int64_t keys) { fits = fits && cutter.add(b, first, keys); });
  if (!fits) {
    refuse(p.report, kMlaPlanShort, 0, p.capacity, fixed + kItemWords * (blocks + 2 * shape.workers));
    return;
  }
  cutter.finish();
  p.report->shape = index;
  p.report->unseen = unseen;
  p.report->max_q_len = max_q_len;
  p.report->total_q = p.qo_indptr[p.batch];
  p.report->total_pages = p.kv_indptr[p.batch];
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t pages = p.kv_indptr[b + 1] - p.kv_indptr[b];
    p.last_page_len[b] = pages > 0 ? int32_t(p.kv_len[b] - (pages - 1) * p.page_size) : 0;
    p.report->total_kv += p.kv_len[b];
  }
}

}  // namespace fi
