// SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/mla_context_plan.h"

#include <algorithm>
#include <climits>
#include <cstddef>

#include "kernels/context_chunks.h"

namespace fi {
namespace {

bool refuse(MlaContextPlan& plan, int64_t fault, int64_t where, int64_t value, int64_t bound) {
  plan.fault = fault;
  plan.where = where;
  plan.value = value;
  plan.bound = bound;
  return false;
}

bool check(const MlaContextPlanParams& p, MlaContextPlan& plan, std::vector<int64_t>& contexts) {
  if (p.qo_indptr[0] != 0) return refuse(plan, kMlaContextQoStart, 0, p.qo_indptr[0], 0);
  contexts.reserve(static_cast<size_t>(p.batch));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.qo_indptr[b], end = p.qo_indptr[b + 1], context = p.contexts[b];
    if (end < begin) return refuse(plan, kMlaContextQoFalls, b, end, begin);
    if (end > INT32_MAX) return refuse(plan, kMlaContextQueries, b, end, INT32_MAX);
    if (context < 0) return refuse(plan, kMlaContextNegative, b, context, 0);
    // Before the sum, which lengths of 64 bits could carry past its end.
    if (context > INT32_MAX) return refuse(plan, kMlaContextTotal, b, context, INT32_MAX);
    contexts.push_back(context);
    plan.tokens += context;
    plan.longest = std::max(plan.longest, context);
    plan.max_q_len = std::max(plan.max_q_len, end - begin);
  }
  plan.total_q = p.qo_indptr[p.batch];
  if (plan.tokens > INT32_MAX) return refuse(plan, kMlaContextTotal, 0, plan.tokens, INT32_MAX);
  if (plan.tokens > 0 && p.budget < p.alignment) return refuse(plan, kMlaContextBudget, 0, p.budget, p.alignment);
  return true;
}

MlaContextChunk write_chunk(const MlaContextPlanParams& p, const ContextChunk& cut, const ContextPiece* pieces,
                            int32_t* words) {
  const int64_t last = cut.first + cut.pieces;
  MlaContextChunk chunk{cut.first, cut.pieces, 0, cut.continues, p.qo_indptr[cut.first], p.qo_indptr[last], 0, 0};
  int32_t* kv = words + mla_context_aligned(cut.pieces + 1);
  for (int64_t i = 0; i < cut.pieces; ++i) {
    const int64_t begin = p.qo_indptr[cut.first + i], end = p.qo_indptr[cut.first + i + 1];
    words[i] = static_cast<int32_t>(begin - chunk.q_begin);
    kv[i] = static_cast<int32_t>(chunk.tokens);
    chunk.tokens += pieces[i].length;
    chunk.max_q_len = std::max(chunk.max_q_len, end - begin);
    chunk.max_kv_len = std::max(chunk.max_kv_len, pieces[i].length);
  }
  words[cut.pieces] = static_cast<int32_t>(chunk.q_end - chunk.q_begin);
  kv[cut.pieces] = static_cast<int32_t>(chunk.tokens);
  return chunk;
}

}  // namespace

MlaContextPlan plan_mla_context(const MlaContextPlanParams& p) {
  MlaContextPlan plan{};
  std::vector<int64_t> contexts;
  if (!check(p, plan, contexts)) return plan;
  const ContextCuts cuts = cut_contexts(contexts.data(), p.batch, p.budget, p.alignment);
  const auto pieces = static_cast<int64_t>(cuts.pieces.size());
  plan.pieces = pieces;
  int64_t size = mla_context_aligned(p.batch + 1) + 2 * mla_context_aligned(pieces) + mla_context_aligned(pieces + 1);
  for (const ContextChunk& cut : cuts.chunks) size += 2 * mla_context_aligned(cut.pieces + 1);
  plan.words.resize(static_cast<size_t>(size));
  int32_t* words = plan.words.data();
  for (int64_t b = 0; b <= p.batch; ++b) words[b] = static_cast<int32_t>(p.qo_indptr[b]);
  int32_t* const requests = words + mla_context_aligned(p.batch + 1);
  int32_t* const starts = requests + mla_context_aligned(pieces);
  int32_t* const indptr = starts + mla_context_aligned(pieces);
  int64_t begin = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const ContextPiece& piece = cuts.pieces[static_cast<size_t>(i)];
    requests[i] = static_cast<int32_t>(piece.request);
    starts[i] = static_cast<int32_t>(piece.start);
    indptr[i] = static_cast<int32_t>(begin);
    begin += piece.length;
  }
  indptr[pieces] = static_cast<int32_t>(begin);
  words = indptr + mla_context_aligned(pieces + 1);
  plan.chunks.reserve(cuts.chunks.size());
  for (const ContextChunk& cut : cuts.chunks) {
    plan.chunks.push_back(write_chunk(p, cut, cuts.pieces.data() + cut.first_piece, words));
    words += 2 * mla_context_aligned(cut.pieces + 1);
  }
  return plan;
}

}  // namespace fi
