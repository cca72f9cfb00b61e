# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The runs that the hand-off is compared with, each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashinfer.cli.handoff_job.channel import Channel
from flashinfer.cli.handoff_job.job import Job
from flashinfer.cli.handoff_job.model import LlamaRunner, continue_greedily, greedy
from flashinfer.cli.handoff_job.pages import Sequence, standard_pool


def run_one_process(runner: LlamaRunner, job: Job, channel: Channel) -> None:
    """The same runner, prefill and decode on `standard` pages."""
    pool = standard_pool(job.page_format("standard", runner.config), runner.config.num_layers, job.total_pages)
    sequence = Sequence(pool, torch.arange(job.total_pages, dtype=torch.int32))
    first_token = greedy(runner.forward(job.prompt, sequence))
    rest = continue_greedily(runner, sequence, first_token, job.max_new_tokens - 1)
    channel.send("tokens", ids=[first_token, *rest])


def load_transformers(path: Path) -> Any:
    """The Hugging Face model with the file's weights, dequantised to float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def run_transformers(model: Any, job: Job, channel: Channel) -> None:
    """Greedy generation with the Hugging Face model and its own, unpaged cache."""
    prompt = torch.tensor([job.prompt])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=job.max_new_tokens,
    )
    channel.send("tokens", ids=output[0, len(job.prompt) :].tolist())
