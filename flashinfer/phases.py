# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Which requests of a batch decode, extend and prefill, and a batch brought into that order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import torch

from flashinfer.core.checks import INT32_MAX, describe, fail, integer

# Order of the phases in a batch. Requests that decode and those that still read their prompt, but no more of it than
# decodes have tokens, run in one phase; they are told apart so that decodes of a kind stay together.
_DECODE, _SHORT_EXTEND, _LONG_EXTEND, _PREFILL = range(4)

Lengths = Sequence[int] | torch.Tensor


@dataclass(frozen=True)
class PhaseSplit:
    """A batch in the order [decode : extend : prefill], as numbers of requests and of tokens.

    Attributes
    ----------
    num_decodes, num_decode_tokens
        Requests of few new tokens on top of a context: attention reads the pages.
    num_extends, num_extend_tokens
        Requests of many new tokens on top of a context, which is fetched.
    num_prefills, num_prefill_tokens
        Requests without a context: attention reads their new keys and values alone.
    """

    num_decodes: int
    num_extends: int
    num_prefills: int
    num_decode_tokens: int
    num_extend_tokens: int
    num_prefill_tokens: int

    @property
    def decode_rows(self) -> slice:
        """Rows of the decodes among the batch's tokens."""
        return slice(0, self.num_decode_tokens)

    @property
    def extend_rows(self) -> slice:
        """Rows of the extends."""
        return slice(self.num_decode_tokens, self.num_decode_tokens + self.num_extend_tokens)

    @property
    def prefill_rows(self) -> slice:
        """Rows of the prefills."""
        first = self.num_decode_tokens + self.num_extend_tokens
        return slice(first, first + self.num_prefill_tokens)


def split_phases(
    query_lens: Lengths,
    seq_lens: Lengths,
    num_computed: Lengths | None = None,
    decode_threshold: int = 1,
) -> PhaseSplit:
    """Split a batch at its phase boundaries.

    Parameters
    ----------
    query_lens
        `[batch_size]` new tokens of each request, on the host. A request of none stays with the phase before it, which
        keeps padded rows of a captured batch where they are.
    seq_lens
        `[batch_size]` tokens of each request, its new ones included; may be an upper bound if `num_computed` is given.
    num_computed
        `[batch_size]` tokens whose keys and values were cached before this step; `seq_lens - query_lens` by default.
    decode_threshold
        New tokens that a decode may have: 1, and more with speculative tokens.

    Returns
    -------
    PhaseSplit
        Decodes are the leading requests of at most `decode_threshold` new tokens, prefills the trailing ones that have
        nothing computed (also if their prompt is one token), extends those between. That is right for every order,
        since extends may be anything; it is fastest for the order that `reorder_batch` makes.

    Raises
    ------
    InvalidArgumentError
        For lengths that are negative, unequal in number, or contradict each other.
    """
    op = "split_phases"
    integer(op, "decode_threshold", decode_threshold, 1, INT32_MAX)
    queries = _lengths(op, "query_lens", query_lens)
    totals = _lengths(op, "seq_lens", seq_lens, len(queries))
    if num_computed is None:
        computed: Sequence[int] = [total - new for total, new in zip(totals, queries, strict=True)]
    else:
        computed = _lengths(op, "num_computed", num_computed, len(queries))
    for b, (new, total, cached) in enumerate(zip(queries, totals, computed, strict=True)):
        if cached < 0 or cached + new > total:
            least = new + max(cached, 0)
            fail(op, f"seq_lens[{b}]", f"at least the request's {least} cached and new tokens", total)
    return split_checked(queries, computed, decode_threshold)


def split_checked(queries: Sequence[int], computed: Sequence[int], decode_threshold: int) -> PhaseSplit:
    """`split_phases` of lengths that are known to make sense."""
    batch = len(queries)
    decodes = next((b for b, new in enumerate(queries) if new > decode_threshold), batch)
    prefill = batch
    while prefill and not computed[prefill - 1]:
        prefill -= 1
    while prefill < batch and not queries[prefill]:
        prefill += 1
    decodes = min(decodes, prefill)
    # A long request without context among the extends is one of them, with nothing to fetch.
    tokens = sum(queries[:decodes]), sum(queries[decodes:prefill]), sum(queries[prefill:])
    return PhaseSplit(decodes, prefill - decodes, batch - prefill, *tokens)


class Swappable(Protocol):
    """A batch whose requests can change places, all that belongs to a request included."""

    def swap(self, i: int, j: int, /) -> object:
        """Exchange requests `i` and `j`."""


def reorder_batch(
    batch: Swappable,
    query_lens: Lengths,
    num_computed: Lengths,
    num_prompt: Lengths | None = None,
    *,
    decode_threshold: int = 1,
) -> int:
    """Bring a batch into the order [decode : extend : prefill] with the fewest swaps.

    Parameters
    ----------
    batch
        Whatever has `swap(i, j)`, which must move everything that belongs to a request.
    query_lens, num_computed, decode_threshold
        As in `split_phases`, in the present order of the batch.
    num_prompt
        `[batch_size]` tokens of each prompt. Requests of few new tokens that still read their prompt then go behind
        those that decode: kernels for decodes of one shape get them without strangers in between.

    Returns
    -------
    int
        Swaps made. 0 means that the batch was in order and is untouched.

    Raises
    ------
    InvalidArgumentError
        For lengths that are negative or unequal in number.

    Notes
    -----
    A request that is where it belongs does not move, and of requests that change places in the same way the first
    stays the first. The sequence is found before the first swap, so `swap` may change the lengths given here.
    """
    op = "reorder_batch"
    if not callable(getattr(batch, "swap", None)):
        fail(op, "batch", "something with swap(i, j)", type(batch).__name__)
    integer(op, "decode_threshold", decode_threshold, 1, INT32_MAX)
    queries = _lengths(op, "query_lens", query_lens)
    computed = _lengths(op, "num_computed", num_computed, len(queries))
    prompts: Sequence[int] = [0] * len(queries)
    if num_prompt is not None:
        prompts = _lengths(op, "num_prompt", num_prompt, len(queries))
    ranks = [
        _PREFILL
        if not cached and new
        else _LONG_EXTEND
        if new > decode_threshold
        else _SHORT_EXTEND
        if cached < prompt
        else _DECODE
        for new, cached, prompt in zip(queries, computed, prompts, strict=True)
    ]
    swaps = _fewest_swaps(ranks)
    for i, j in swaps:
        batch.swap(i, j)
    return len(swaps)


def _fewest_swaps(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Swaps that sort `ranks`, as few as there can be for four ranks at most.

    A request out of place stands in the block of one rank and belongs into that of another: an edge between ranks. As
    many requests leave a block as enter it, so the edges fall into cycles, and a cycle of k edges takes k - 1 swaps:
    the more cycles, the fewer swaps. Taking the shortest cycles first gives the most. It is clear for cycles of two;
    with none of these left, four ranks have at most two cycles of three, each with an edge of its own, so that what
    each cycle carries is determined.
    """
    target = sorted(ranks)
    # Positions by (rank of the block that they are in, rank of who stands there), lowest first.
    out_of_place: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for position, (block, rank) in enumerate(zip(target, ranks, strict=True)):
        if block != rank:
            out_of_place[block, rank].append(position)
    swaps: list[tuple[int, int]] = []
    for length in range(2, len(set(ranks)) + 1):
        for cycle in _cycles(set(out_of_place), length):
            queues = [out_of_place[edge] for edge in cycle]
            for _ in repeat(None, min(map(len, queues))):
                home, *others = (queue.popleft() for queue in queues)
                # Who stands at `home` goes where the next one of the cycle stands, who comes back and goes on in turn.
                swaps += [(home, there) for there in others]
    return swaps


def _cycles(edges: set[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Cycles of so many edges, each from its lowest rank on."""
    paths = [[edge] for edge in sorted(edges)]
    for _ in range(length - 1):
        paths = [
            [*path, edge]
            for path in paths
            for edge in sorted(edges)
            if edge[0] == path[-1][1] and edge[0] > path[0][0] and edge[0] not in {start for start, _ in path}
        ]
    return [path for path in paths if path[-1][1] == path[0][0]]


def _lengths(op: str, name: str, values: Lengths, count: int | None = None) -> Sequence[int]:
    """Lengths as integers on the host."""
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.is_floating_point() or values.device.type != "cpu":
            fail(op, name, "a 1-D tensor of integers on the host", describe(values), f"pass {name}.cpu()")
        values = values.tolist()
    if count is not None and len(values) != count:
        fail(op, name, f"of length {count}, that of query_lens", len(values))
    if values and min(values) < 0:
        fail(op, name, "of lengths that are not negative", min(values))
    return values
