# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of `python -m flashinfer handoff-vllm`: two vLLM servers that keep unlike KV pages, and a proxy.

| module       | holds                                                              |
|--------------|--------------------------------------------------------------------|
| `checkpoint` | the weights of a GGUF file as a folder that vLLM loads             |
| `servers`    | the server processes: how they are started, and what they measured |
| `proxy`      | the process that clients talk to                                   |
| `client`     | one streamed completion                                            |
"""
