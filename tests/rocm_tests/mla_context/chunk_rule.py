# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""How contexts are cut into chunks, as the rules are told; what planners in C++ are held against."""

from __future__ import annotations

Piece = tuple[int, int, int]


def cut(lens: list[int], budget: int, page_size: int) -> list[list[Piece]]:
    """The rules, as they are told: chunks of (request, first token, tokens)."""
    chunks: list[list[Piece]] = []
    open_chunk: list[Piece] = []

    def close() -> None:
        while open_chunk and not open_chunk[-1][2]:
            open_chunk.pop()
        if open_chunk:
            chunks.append(open_chunk.copy())
        open_chunk.clear()

    for request, length in enumerate(lens):
        if not length and open_chunk:
            open_chunk.append((request, 0, 0))
        done = 0
        while done < length:
            room = budget - sum(tokens for _, _, tokens in open_chunk)
            # All that is left if it fits, else whole pages, else nothing more in this chunk.
            take = length - done if length - done <= room else room - room % page_size
            if take:
                open_chunk.append((request, done, take))
            done += take
            if done < length:
                close()
    close()
    return chunks
