# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of many requests' pages in one pool or from one into another, whose layers are looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flashinfer.core.checks import describe, fail, index_vector
from flashinfer.kv.convert import call_arguments, into_arguments
from flashinfer.kv.format import PageFormat
from flashinfer.ops import page_convert as ops

OP = "PageConverter"


class PageConverter:
    """`convert_kv_pages` for one pool, bound to its layers: a call costs the host no more than a launch.

    With `sources` it is `convert_kv_pages_into`, of which arguments and backend are looked at here as well.

    Of a call of `convert_kv_pages` for 36 layers most of the host's time goes into the list of 72 planes
    (docs/measurements.md). Here they are checked and laid out as kernel arguments once.

    Parameters
    ----------
    caches, src, dst, allow_inexact, backend
        As `convert_kv_pages` takes them. The backend is chosen here and asked no more. The layers are kept alive, and
        must keep their memory: a storage that is resized is the caller's fault, unseen.
    sources
        The pool to read, as `convert_kv_pages_into` takes it; None to convert in place.

    Raises
    ------
    BackendUnavailableError, InvalidArgumentError
        As `convert_kv_pages`.

    Examples
    --------
    >>> to_shuffled = PageConverter(caches, standard, shuffled)
    >>> to_shuffled(received_block_ids)
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
        src: PageFormat,
        dst: PageFormat,
        *,
        allow_inexact: bool = False,
        backend: str = "auto",
        sources: Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        self._read: tuple[list[torch.Tensor], int] | None = None
        if sources is None:
            planes, per_layer, rest = call_arguments(caches, src, dst, allow_inexact)
        else:
            self._read, (planes, per_layer), rest = into_arguments(sources, caches, src, dst, allow_inexact)
        if not planes:
            fail(OP, "caches", "of one layer or more", "none")
        self.planes = planes
        self.sources = [] if self._read is None else self._read[0]
        self._backend = backend
        self._before, self._after = (planes, per_layer), rest
        self._device = planes[0].device
        no_ids = torch.empty(0, dtype=torch.int32, device=self._device)
        self._run: Callable[..., None] | None = None
        if self._read is None:
            self._run = ops.convert_kv_pages.bind((*self._before, no_ids, *self._after), backend)
        else:
            # Checks, and says which backends decline; the call is short enough to be looked at again each time.
            ops.convert_kv_pages_into.bind((*self._read, no_ids, *self._before, no_ids, *self._after), backend)

    def __call__(self, block_ids: torch.Tensor, source_ids: torch.Tensor | None = None) -> None:
        """Convert the listed pages of every layer.

        Parameters
        ----------
        block_ids
            As in `convert_kv_pages`, in place.
        source_ids
            As in `convert_kv_pages_into`; given if and only if there are `sources`.

        Raises
        ------
        InvalidArgumentError
            As `convert_kv_pages` does of ids.
        """
        if (source_ids is None) != (self._read is None):
            fail(OP, "source_ids", "given if and only if there are sources", describe(source_ids))
        if self._read is not None:
            ops.convert_kv_pages_into(
                *self._read, source_ids, *self._before, block_ids, *self._after, backend=self._backend
            )
            return
        if self._run is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            ops.convert_kv_pages(*self._before, block_ids, *self._after, backend=self._backend)
            return
        try:
            self._run(block_ids)
        except (RuntimeError, TypeError, ValueError):
            # The shim refuses in few words.
            index_vector(OP, "block_ids", block_ids, self._device)
            raise
