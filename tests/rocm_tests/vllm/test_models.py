# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A model with what Llama has not, in a real engine: windows in every other layer, and soft caps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(1200)]

COUNT, WINDOW, CAP = 24, 40, 3.0
# Within the window, beyond it while it decodes, and beyond it in more than one step's batch.
LENGTHS = (5, 30, 70, 200)


def gemma(window: int, cap: float) -> Any:
    """The same random weights, whatever the options are."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config

    config = Gemma2Config(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=window,
        attn_logit_softcapping=cap,
        max_position_embeddings=512,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in model.model.layers:
        # Scores of several units, so that it matters who is seen and what is capped.
        layer.self_attn.q_proj.weight.data *= 12
    return model


def test_windows_and_soft_caps(nursery: Any, tmp_path: Path) -> None:
    import torch

    from rocm_tests.vllm import served

    model = gemma(WINDOW, CAP)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    want = [served.greedy(model, prompt, COUNT) for prompt in prompts]
    for other in (gemma(512, CAP), gemma(WINDOW, 1e9)):
        assert served.greedy(other, prompts[-1], COUNT) != want[-1], "both options show in the tokens"
    engines = [served.EngineProcess(nursery, tmp_path, pages, None) for pages in ("standard", "shuffled")]
    with served.killing(*engines):
        for engine in engines:
            engine.ready()
            for i, prompt in enumerate(prompts):
                engine.ask("add", name=f"r{i}", prompt=prompt, count=COUNT)
            names = [f"r{i}" for i in range(len(prompts))]
            finished = engine.ask("steps", seconds=served.ANSWER_S / 2, names=names)
            assert [finished[name]["tokens"] for name in names] == want
