// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
// Decodes are the leading requests of few queries, prefills the trailing ones without a context, extends those between,
// as flashinfer/phases.py says it of batches in Python.
#include "kernels/phase_plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>

#include "kernels/context_chunks.h"

namespace fi {
namespace {

constexpr size_t kAlign = 4;  // words

bool refuse(PhasePlan& plan, int64_t fault, int64_t where, int64_t value, int64_t bound) {
  plan.fault = fault;
  plan.where = where;
  plan.value = value;
  plan.bound = bound;
  return false;
}

class Planner {
 public:
  explicit Planner(const PhasePlanParams& p) : p_(p) {}

  PhasePlan run() {
    if (!measure()) return std::move(plan_);
    split();
    if (!check_launches()) return std::move(plan_);
    write_batch();
    write_launches();
    return std::move(plan_);
  }

 private:
  int64_t queries(int64_t b) const { return p_.qo_indptr[b + 1] - p_.qo_indptr[b]; }

  bool measure() {
    if (p_.qo_indptr[0] != 0) return refuse(plan_, kPhaseQoStart, 0, p_.qo_indptr[0], 0);
    if (p_.kv_indptr[0] != 0) return refuse(plan_, kPhaseKvStart, 0, p_.kv_indptr[0], 0);
    computed_.reserve(static_cast<size_t>(p_.batch));
    for (int64_t b = 0; b < p_.batch; ++b) {
      const int64_t fresh = queries(b), pages = p_.kv_indptr[b + 1] - p_.kv_indptr[b], tail = p_.last_page_len[b];
      if (fresh < 0) return refuse(plan_, kPhaseQoFalls, b, fresh, 0);
      if (pages < 0) return refuse(plan_, kPhaseKvFalls, b, pages, 0);
      if (tail < 0 || tail > p_.page_size) return refuse(plan_, kPhaseTail, b, tail, p_.page_size);
      // Before the product, which entries of 64 bits could carry past its end.
      for (const int64_t end : {p_.qo_indptr[b + 1], p_.kv_indptr[b + 1]}) {
        if (end > INT32_MAX) return refuse(plan_, kPhaseRange, b, end, INT32_MAX);
      }
      const int64_t held = pages > 0 ? (pages - 1) * p_.page_size + tail : 0;
      if (held > INT32_MAX) return refuse(plan_, kPhaseRange, b, held, INT32_MAX);
      if (held < fresh) return refuse(plan_, kPhasePages, b, held, fresh);
      computed_.push_back(held - fresh);
    }
    plan_.total_q = p_.qo_indptr[p_.batch];
    plan_.total_pages = p_.kv_indptr[p_.batch];
    return true;
  }

  void split() {
    int64_t decodes = 0, prefill = p_.batch;
    while (decodes < p_.batch && queries(decodes) <= p_.threshold) ++decodes;
    while (prefill > 0 && computed_[static_cast<size_t>(prefill - 1)] == 0) --prefill;
    // Requests without queries stay with the phase before them: padded rows of a captured batch stay where they are.
    while (prefill < p_.batch && queries(prefill) == 0) ++prefill;
    first_ = std::min(decodes, prefill);
    last_ = prefill;
    const int64_t bounds[] = {0, first_, last_, p_.batch};
    for (int phase = 0; phase < 3; ++phase) {
      plan_.requests[phase] = bounds[phase + 1] - bounds[phase];
      plan_.tokens[phase] = p_.qo_indptr[bounds[phase + 1]] - p_.qo_indptr[bounds[phase]];
      for (int64_t b = bounds[phase]; b < bounds[phase + 1]; ++b) {
        plan_.max_q_len[phase] = std::max(plan_.max_q_len[phase], queries(b));
      }
    }
  }

  bool check_launches() {
    const int64_t* const contexts = computed_.data() + first_;
    const int64_t* const end = computed_.data() + last_;
    const bool any = std::any_of(contexts, end, [](int64_t context) { return context > 0; });
    if (p_.budget >= 0 && any) {
      if (p_.budget < p_.page_size) return refuse(plan_, kPhaseBudget, 0, p_.budget, p_.page_size);
      cuts_ = cut_contexts(contexts, last_ - first_, p_.budget, p_.page_size);
    }
    const auto chunks = static_cast<int64_t>(cuts_.chunks.size());
    return p_.launches < 0 || chunks <= p_.launches || refuse(plan_, kPhaseLaunches, 0, chunks, p_.launches);
  }

  // Opens a span of so many words, zeros at first.
  PhaseSpan span(int64_t size) {
    const size_t begin = (plan_.words.size() + kAlign - 1) / kAlign * kAlign;
    plan_.words.resize(begin + static_cast<size_t>(size));
    return {static_cast<int64_t>(begin), static_cast<int64_t>(begin) + size};
  }

  // `values[begin .. end)`, counted from `base`; what is before it counts as 0.
  PhaseSpan copy(const IndexArray& values, int64_t begin, int64_t end, int64_t base) {
    const PhaseSpan found = span(end - begin);
    int32_t* const to = plan_.words.data() + found.begin;
    for (int64_t i = begin; i < end; ++i) {
      to[i - begin] = static_cast<int32_t>(std::max<int64_t>(values[i] - base, 0));
    }
    return found;
  }

  void write_batch() {
    plan_.kv_indptr = copy(p_.kv_indptr, 0, p_.batch + 1, 0);
    plan_.last_page_len = copy(p_.last_page_len, 0, p_.batch, 0);
    plan_.decode_qo = copy(p_.qo_indptr, 0, first_ + 1, 0);
    if (last_ > first_) {
      plan_.extend_pages_qo = copy(p_.qo_indptr, 0, last_ + 1, p_.qo_indptr[first_]);
      plan_.extend_qo = copy(p_.qo_indptr, first_, last_ + 1, p_.qo_indptr[first_]);
    }
    if (p_.batch > last_) {
      plan_.prefill_pages_qo = copy(p_.qo_indptr, 0, p_.batch + 1, p_.qo_indptr[last_]);
      plan_.prefill_qo = copy(p_.qo_indptr, last_, p_.batch + 1, p_.qo_indptr[last_]);
    }
  }

  // Pieces of the extends [begin, end); those that have none in `pieces[0 .. count)` have no tokens.
  void write_launch(int64_t begin, int64_t end, const ContextPiece* pieces, int64_t count) {
    PhaseLaunch launch{};
    const int64_t requests = end - begin, base = p_.qo_indptr[first_];
    launch.requests = {first_ + begin, first_ + end};
    launch.rows = {p_.qo_indptr[first_ + begin] - base, p_.qo_indptr[first_ + end] - base};
    launch.starts = span(requests);
    launch.kv_indptr = span(requests + 1);
    launch.qo_indptr = copy(p_.qo_indptr, first_ + begin, first_ + end + 1, base + launch.rows.begin);
    int32_t* const starts = plan_.words.data() + launch.starts.begin;
    int32_t* const indptr = plan_.words.data() + launch.kv_indptr.begin;
    for (int64_t i = 0, piece = 0; i < requests; ++i) {
      indptr[i] = static_cast<int32_t>(launch.tokens);
      if (piece == count || pieces[piece].request != begin + i) continue;
      starts[i] = static_cast<int32_t>(pieces[piece].start);
      launch.tokens += pieces[piece++].length;
    }
    indptr[requests] = static_cast<int32_t>(launch.tokens);
    plan_.launches.push_back(launch);
  }

  void write_launches() {
    const int64_t extends = last_ - first_;
    for (const ContextChunk& chunk : cuts_.chunks) {
      const ContextPiece* const pieces = cuts_.pieces.data() + chunk.first_piece;
      write_launch(p_.widen ? 0 : chunk.first, p_.widen ? extends : chunk.first + chunk.pieces, pieces, chunk.pieces);
    }
    while (static_cast<int64_t>(plan_.launches.size()) < p_.launches) write_launch(0, extends, nullptr, 0);
  }

  const PhasePlanParams& p_;
  PhasePlan plan_{};
  std::vector<int64_t> computed_;  // tokens of each request before its queries
  int64_t first_ = 0;              // extends are [first_, last_)
  int64_t last_ = 0;
  ContextCuts cuts_;
};

}  // namespace

PhasePlan plan_phases(const PhasePlanParams& params) { return Planner(params).run(); }

}  // namespace fi
