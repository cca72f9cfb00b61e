# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Cached context cut into chunks that fit a workspace.

Attention over a context that was fetched piecewise is merged from the pieces. The fewer launches the better, so
whole contexts are packed into a chunk while they fit; what does not fit is cut at a multiple of the page size, so that
later pieces begin on a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flashinfer.core.checks import fail


@dataclass(frozen=True)
class Chunk:
    """Pieces of the contexts of consecutive requests, `first` to `first + len(lengths) - 1`.

    Attributes
    ----------
    first
        The first request, the one whose piece may continue an earlier chunk's.
    starts
        Where each request's piece begins in its context, in tokens.
    lengths
        Tokens of each piece; 0 for a request between others that has no context.
    continues
        Whether the first request's piece continues that of the chunk before: its result is merged into what is there.
        All other pieces are the first of their requests.
    """

    first: int
    starts: list[int]
    lengths: list[int]
    continues: bool

    @property
    def tokens(self) -> int:
        """Tokens of all pieces, at most the budget."""
        return sum(self.lengths)

    @property
    def indptr(self) -> list[int]:
        """Where each piece begins among the chunk's tokens, `[requests + 1]`."""
        return [0, *accumulate(self.lengths)]


def plan_chunks(op: str, contexts: Sequence[int], budget: int, alignment: int) -> list[Chunk]:
    """Cut contexts into chunks of at most `budget` tokens.

    Parameters
    ----------
    op
        Who is speaking in an error.
    contexts
        Tokens of each request's context, 0 for none.
    budget
        Tokens that a chunk may hold.
    alignment
        Every piece begins at a multiple of this in its context; the page size.

    Returns
    -------
    list of Chunk
        In the order in which they are to be merged; empty if no request has a context. Joined, the pieces of a request
        are its context in order.

    Raises
    ------
    InvalidArgumentError
        If there is a context and the budget does not hold one page.
    """
    chunks: list[Chunk] = []
    first, continues, room = 0, False, budget
    starts: list[int] = []
    lengths: list[int] = []
    trailing = 0  # requests without context at the end of the open chunk
    for request, context in enumerate(contexts):
        if context <= 0:
            if lengths:
                starts.append(0)
                lengths.append(0)
                trailing += 1
            continue
        if budget < alignment:
            fail(op, "the chunk budget", f"at least a page, {alignment} tokens", budget, "pass a larger workspace")
        done = 0
        while done < context:
            if not lengths:
                first, continues = request, done > 0
            left = context - done
            take = left if left <= room else room // alignment * alignment
            if take:
                starts.append(done)
                lengths.append(take)
                done += take
                room -= take
                trailing = 0
            if done < context:
                chunks.append(_closed(first, starts, lengths, continues, trailing))
                starts, lengths, trailing, room = [], [], 0, budget
    if lengths:
        chunks.append(_closed(first, starts, lengths, continues, trailing))
    return chunks


def _closed(first: int, starts: list[int], lengths: list[int], continues: bool, trailing: int) -> Chunk:
    """A chunk that ends with its last context."""
    if trailing:
        del starts[-trailing:], lengths[-trailing:]
    return Chunk(first, starts, lengths, continues)
