# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The weights of a GGUF file, dequantised once into a folder that vLLM loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from flashinfer.cli.handoff_job.gguf_file import GGUFFile
from flashinfer.cli.handoff_job.model import LlamaConfig, half_split_rows

# A layer's tensors by their names in the file.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def checkpoint(gguf: Path, root: Path) -> Path:
    """The folder of a file's float32 weights, configuration and tokenizer below `root`, made if it is not there.

    A folder that is there is whole: it is made under another name and then renamed. The file's size is in its name.
    """
    folder = root / f"{gguf.stem}-{gguf.stat().st_size}-float32"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
    try:
        write_checkpoint(gguf, made)
        os.replace(made, folder)
    except OSError:
        # Another process was faster; what it made is the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer of a GGUF file of architecture `llama`."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    file = GGUFFile(gguf)
    config = LlamaConfig.of(file)
    tensors = weights(file, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].size(0),
        "hidden_size": config.hidden_size,
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].size(0),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_qo_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.context_length,
        "bos_token_id": file.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": config.eos_token_id,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def weights(file: GGUFFile, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The model's tensors, dequantised to float32, under the names that Hugging Face gives them."""
    tensors = {
        "model.embed_tokens.weight": file.tensor("token_embd.weight"),
        "model.norm.weight": file.tensor("output_norm.weight"),
    }
    heads = {"attn_q": config.num_qo_heads, "attn_k": config.num_kv_heads}
    for layer in range(config.num_layers):
        for theirs, ours in _LAYER.items():
            tensor = file.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in heads:
                tensor = half_split_rows(tensor, heads[theirs])
            tensors[f"model.layers.{layer}.{ours}.weight"] = tensor.contiguous()
    return tensors
