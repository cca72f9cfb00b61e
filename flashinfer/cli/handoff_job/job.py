# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What one run is asked to do, as the parent gives it to every child, and what both sides derive from it."""

from __future__ import annotations

import dataclasses

import torch

from flashinfer.cli.handoff_job.model import LlamaConfig
from flashinfer.kv import PageFormat

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run.

    Parameters
    ----------
    prompt
        Token ids; not empty.
    max_new_tokens
        Tokens to generate, the prefill's included; at least 1.
    page_size
        Tokens to a page.
    dtype
        Of weights, activations and pages; one of `DTYPES`.
    convert
        False leaves the received pages as they came: a deliberate misread.
    """

    prompt: list[int]
    max_new_tokens: int
    page_size: int
    dtype: str
    convert: bool

    @property
    def prompt_pages(self) -> int:
        """Pages of the prompt, the last one perhaps partly filled."""
        return -(-len(self.prompt) // self.page_size)

    @property
    def total_pages(self) -> int:
        """Pages of prompt and generated text."""
        return -(-(len(self.prompt) + self.max_new_tokens) // self.page_size)

    def page_format(self, kind: str, config: LlamaConfig) -> PageFormat:
        """The pages of this model and run, in one kind."""
        return PageFormat(kind, self.dtype, config.num_kv_heads, self.page_size, config.head_dim)
