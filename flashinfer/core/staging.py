# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Host memory for what plans send to a device, written again and again without waiting for the device."""

from __future__ import annotations

from collections import deque

import torch

# Copies are of whole blocks of this many words: slicing two tensors costs as much as the copy, and most plans of a
# server are then of one size.
_BLOCK = 256


class _Piece:
    """int32 words, and on a GPU the event behind the latest copy from them."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.empty(0, dtype=torch.int32)
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        # The two sides of the latest copy, and what they are made of.
        self._sides = self.words, self.words
        self._made_of: tuple[torch.Tensor, torch.Tensor, int] = self.words, self.words, 0

    def sides(self, size: int, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and destination of a copy."""
        words, into, old_size = self._made_of
        if old_size != size or into is not buffer or words is not self.words:
            self._sides = self.words.narrow(0, 0, size), buffer.view(torch.int32).narrow(0, 0, size)
            self._made_of = self.words, buffer, size
        return self._sides

    def is_over(self) -> bool:
        """Whether no copy reads the words any more."""
        return self.copied is None or self.copied.query()


class Staging:
    """As many pieces of host memory as copies to the device are under way at a time: one, in the usual case.

    Pinned if the device is a GPU. Where copies are queued on several streams, a piece may be found to be over later
    than it is, which costs another piece.

    Parameters
    ----------
    device
        Where copies go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: deque[_Piece] = deque()
        self._taken: _Piece | None = None

    def take(self, size: int) -> torch.Tensor:
        """At least `size` int32 words that nobody reads, of any content.

        What was taken before and not sent is what is taken again.
        """
        piece = self._taken
        if piece is None:
            # In the order of sending: if the first is still read, so are probably all.
            piece = self._sent.popleft() if self._sent and self._sent[0].is_over() else _Piece(self._device)
            self._taken = piece
        if piece.words.numel() < size:
            size = _BLOCK * -(-max(size, 2 * piece.words.numel()) // _BLOCK)
            piece.words = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return piece.words

    def send(self, size: int, buffer: torch.Tensor) -> None:
        """Queue the copy of the first `size` words of what was taken, to the beginning of a buffer on the device.

        Parameters
        ----------
        size
            Words. More may be copied, to fill a block of 256, as far as there is room for them.
        buffer
            uint8, a multiple of 4 bytes.
        """
        piece = self._taken
        if piece is None:
            raise RuntimeError("Staging: take() must come before send()")
        source, into = piece.sides(min(_BLOCK * -(-size // _BLOCK), buffer.numel() // 4), buffer)
        into.copy_(source, non_blocking=True)
        if piece.copied is not None:
            piece.copied.record(torch.cuda.current_stream(self._device))
        self._sent.append(piece)
        self._taken = None
