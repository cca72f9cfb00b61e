# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`make demo-vllm` whole: two vLLM servers, the proxy and a real model, held against transformers."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(1200)]

COUNT = 12


def test_two_servers_and_a_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flashinfer.cli import main
    from flashinfer.cli.handoff import gguf_path
    from flashinfer.cli.vllm_job.checkpoint import checkpoint
    from flashinfer.jit.cache import cache_root

    prompt = "What is a loaf?"
    assert main(["handoff-vllm", "--json", "--max-new-tokens", str(COUNT), "--prompt", prompt]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "identical"
    folder = checkpoint(gguf_path("test"), cache_root() / "checkpoints")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    assert report["prompt_tokens"] == ids.size(1)
    # 30 layers, 3 KV heads of 64, K and V, float32.
    assert report["bytes_moved"] == -(-ids.size(1) // 16) * 16 * 30 * 2 * 3 * 64 * 4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT)
    assert report["token_ids"] == out[0, ids.size(1) :].tolist()
    assert report["text"] == tokenizer.decode(report["token_ids"], skip_special_tokens=True)
