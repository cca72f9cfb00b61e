# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The model runner of the hand-off against `transformers`, on a small random Llama in a GGUF file written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.cli.handoff_job.gguf_file import GGUFFile
from flashinfer.cli.handoff_job.model import LlamaConfig, LlamaRunner, continue_greedily, greedy
from flashinfer.cli.handoff_job.pages import Sequence, shuffled_pool, standard_pool
from flashinfer.cli.vllm_job.checkpoint import weights
from flashinfer.kv import PageFormat

pytestmark = pytest.mark.nixl

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY, CONTEXT = 3, 96, 6, 2, 16, 128, 320, 256
EOS = 319
EPSILON, ROPE_BASE = 1e-5, 10000.0
POOLS = {"standard": standard_pool, "shuffled": shuffled_pool}

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def reference() -> Any:
    """A random Hugging Face model."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=FEED_FORWARD,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=EPSILON,
            rope_theta=ROPE_BASE,
            tie_word_embeddings=True,
            eos_token_id=EOS,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the default, so that attention is not close to uniform and a wrong rotation shows.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model.eval()


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as GGUF has them: row `2i + j` of a head is row `i + j * head_dim / 2` of the Hugging Face weight."""
    result = torch.empty_like(weight)
    for head in range(heads):
        for i in range(HEAD_DIM // 2):
            for j in range(2):
                result[head * HEAD_DIM + 2 * i + j] = weight[head * HEAD_DIM + i + j * (HEAD_DIM // 2)]
    return result


@pytest.fixture(scope="module")
def model_file(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a GGUF file."""
    import gguf

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_context_length(CONTEXT)
    writer.add_token_list([f"token {i} é" for i in range(VOCABULARY)])
    writer.add_token_scores([0.5] * VOCABULARY)
    writer.add_eos_token_id(EOS)
    state = reference.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    heads_of = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for layer in range(LAYERS):
        for name, gguf_name in GGUF_NAMES.items():
            weight = state[f"model.layers.{layer}.{name}.weight"]
            if gguf_name in heads_of:
                weight = neighbours(weight, heads_of[gguf_name])
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def poisoned_sequence(kind: str, page_size: int, tokens: int) -> Sequence:
    """Room for `tokens` tokens in scattered blocks of a pool full of NaN."""
    pool = POOLS[kind](PageFormat(kind, torch.float32, KV_HEADS, page_size, HEAD_DIM), LAYERS, 24)
    for layer in pool.memory:
        for plane in layer:
            plane.fill_(float("nan"))
    pages = -(-tokens // page_size)
    return Sequence(pool, torch.arange(23, -1, -3, dtype=torch.int32)[:pages])


@pytest.mark.parametrize("kind", sorted(POOLS))
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("prompt_length", [1, 16, 23])
def test_logits_equal_those_of_transformers(
    reference: Any, model_file: Path, kind: str, page_size: int, prompt_length: int
) -> None:
    tokens = torch.randint(EOS, (30,), generator=torch.Generator().manual_seed(prompt_length)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    runner = LlamaRunner(model_file, torch.float32)
    sequence = poisoned_sequence(kind, page_size, len(tokens))
    actual = [runner.forward(tokens[:prompt_length], sequence)]
    actual += [runner.forward([token], sequence) for token in tokens[prompt_length:]]
    torch.testing.assert_close(torch.stack(actual), expected[prompt_length - 1 :], rtol=1e-4, atol=1e-4)


def test_greedy_continuation_equals_that_of_transformers(reference: Any, model_file: Path) -> None:
    prompt = list(range(5, 16))
    output = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=9)
    runner = LlamaRunner(model_file, torch.float32)
    sequence = poisoned_sequence("shuffled", 4, len(prompt) + 9)
    first = greedy(runner.forward(prompt, sequence))
    assert [first, *continue_greedily(runner, sequence, first, 8)] == output[0, len(prompt) :].tolist()


def test_a_checkpoint_holds_the_weights_of_transformers(reference: Any, model_file: Path) -> None:
    file = GGUFFile(model_file)
    tensors = weights(file, LlamaConfig.of(file))
    state = reference.state_dict()
    assert set(tensors) == set(state) - {"lm_head.weight"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, state[name]), name


def test_continuation_stops_at_the_end_of_text(model_file: Path) -> None:
    runner = LlamaRunner(model_file, torch.float32)
    assert list(continue_greedily(runner, poisoned_sequence("standard", 4, 8), EOS, 5)) == []


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0", "Q4_1"])
def test_tensors_are_what_the_gguf_package_reads(tmp_path: Path, quantization: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[quantization]
    values = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).numpy()
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("an.array", ["a", "bc", ""])
    writer.add_uint32("a.number", 7)
    writer.add_tensor("before", values[0, 0])
    writer.add_tensor("quantised", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (expected,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "quantised")
    file = GGUFFile(path)
    actual = file.tensor("quantised")
    assert file.integer("a.number") == 7
    assert actual.shape == values.shape
    assert actual.dtype == torch.float32
    assert torch.equal(actual, torch.from_numpy(gguf.dequantize(expected.data, kind).copy()).view(2, 3, 64))
    assert (actual - torch.from_numpy(values)).abs().max() < 0.5


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"GGML" + bytes(60))
    with pytest.raises(ValueError, match="must be a GGUF file"):
        GGUFFile(path)
