# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A Llama forward pass whose only memory of earlier tokens is a paged KV cache.

The arithmetic follows the `transformers` model step by step (normalisation in float32, rotary angles in float32
then cast, tied embedding), so that in float32 the two may be compared token by token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from flashinfer.attention import paged_attention
from flashinfer.cli.handoff_job.gguf_file import GGUFFile
from flashinfer.cli.handoff_job.pages import PagePool, Sequence, Step
from flashinfer.page import append_paged_kv_cache


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of the model."""

    num_layers: int
    hidden_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    norm_epsilon: float
    context_length: int
    eos_token_id: int

    @staticmethod
    def of(file: GGUFFile) -> LlamaConfig:
        """The configuration in a GGUF header of architecture `llama`."""
        return LlamaConfig(
            num_layers=file.integer("llama.block_count"),
            hidden_size=file.integer("llama.embedding_length"),
            num_qo_heads=file.integer("llama.attention.head_count"),
            num_kv_heads=file.integer("llama.attention.head_count_kv"),
            head_dim=file.integer("llama.rope.dimension_count"),
            rope_base=file.number("llama.rope.freq_base"),
            norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
            context_length=file.integer("llama.context_length"),
            eos_token_id=file.integer("tokenizer.ggml.eos_token_id"),
        )


@dataclasses.dataclass(frozen=True)
class _Layer:
    attn_norm: torch.Tensor
    attn_q: torch.Tensor
    attn_k: torch.Tensor
    attn_v: torch.Tensor
    attn_output: torch.Tensor
    ffn_norm: torch.Tensor
    ffn_gate: torch.Tensor
    ffn_up: torch.Tensor
    ffn_down: torch.Tensor


class LlamaRunner:
    """The model, with weights of one dtype.

    Parameters
    ----------
    path
        A GGUF file of architecture `llama` whose output matrix is the embedding.
    dtype
        Of weights, activations and KV pages.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        file = GGUFFile(path)
        self.config = config = LlamaConfig.of(file)
        self.dtype = dtype

        def load(name: str) -> torch.Tensor:
            return file.tensor(f"{name}.weight").to(dtype)

        self._embedding = load("token_embd")
        self._output_norm = load("output_norm")
        self._layers = []
        for index in range(config.num_layers):
            weights = {f.name: load(f"blk.{index}.{f.name}") for f in dataclasses.fields(_Layer)}
            weights["attn_q"] = half_split_rows(weights["attn_q"], config.num_qo_heads)
            weights["attn_k"] = half_split_rows(weights["attn_k"], config.num_kv_heads)
            self._layers.append(_Layer(**weights))
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse_frequencies = 1.0 / config.rope_base**exponents

    @torch.inference_mode()
    def forward(self, token_ids: list[int], sequence: Sequence) -> torch.Tensor:
        """Append `token_ids` to the sequence; float32 logits `[vocabulary]` of what follows the last of them."""
        step = sequence.extend(len(token_ids))
        cos, sin = self._rotation(step.positions)
        hidden = F.embedding(torch.tensor(token_ids), self._embedding)
        for layer, cache in zip(self._layers, sequence.pool.caches, strict=True):
            normed = self._rms_norm(hidden, layer.attn_norm)
            hidden = hidden + self._attention(normed, layer, cache, sequence.pool.kv_layout, step, cos, sin)
            normed = self._rms_norm(hidden, layer.ffn_norm)
            gated = F.silu(F.linear(normed, layer.ffn_gate)) * F.linear(normed, layer.ffn_up)
            hidden = hidden + F.linear(gated, layer.ffn_down)
        return F.linear(self._rms_norm(hidden[-1], self._output_norm), self._embedding).float()

    def _attention(
        self,
        hidden: torch.Tensor,
        layer: _Layer,
        cache: tuple[torch.Tensor, torch.Tensor],
        kv_layout: str,
        step: Step,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        q = F.linear(hidden, layer.attn_q).view(-1, config.num_qo_heads, config.head_dim)
        k = F.linear(hidden, layer.attn_k).view(-1, config.num_kv_heads, config.head_dim)
        v = F.linear(hidden, layer.attn_v).view(-1, config.num_kv_heads, config.head_dim)
        append_paged_kv_cache(
            _rotate(k, cos, sin),
            v,
            step.batch_indices,
            step.positions,
            cache,
            step.kv_indices,
            step.kv_indptr,
            step.kv_last_page_len,
            kv_layout=kv_layout,
        )
        attended = torch.empty_like(q)
        paged_attention(
            _rotate(q, cos, sin),
            cache,
            step.qo_indptr,
            step.kv_indptr,
            step.kv_indices,
            step.kv_last_page_len,
            kv_layout=kv_layout,
            out=attended,
        )
        return F.linear(attended.flatten(1), layer.attn_output)

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_epsilon)
        return weight * (wide * scale).to(self.dtype)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[tokens, 1, head_dim]`."""
        angles = torch.outer(positions.float(), self._inverse_frequencies)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def half_split_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """GGUF keeps the two elements that rotate together as neighbours; `_rotate` wants them half a head apart."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def greedy(logits: torch.Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def continue_greedily(runner: LlamaRunner, sequence: Sequence, token: int, count: int) -> Iterator[int]:
    """At most `count` tokens after `token`, which is not yet in the sequence; the end-of-text token is the last."""
    for _ in range(count):
        if token == runner.config.eos_token_id:
            return
        token = greedy(runner.forward([token], sequence))
        yield token


def warm_up(runner: LlamaRunner, pool: PagePool) -> None:
    """Run one token through block 0 of a fresh pool and clear it, so that no measured time holds a kernel's build."""
    runner.forward([runner.config.eos_token_id], Sequence(pool, torch.zeros(1, dtype=torch.int32)))
    for layer in pool.memory:
        for plane in layer:
            plane[0].zero_()
