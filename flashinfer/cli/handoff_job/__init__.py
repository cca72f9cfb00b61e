# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of `python -m flashinfer handoff`: a prefill and a decode process that keep unlike KV pages.

| module       | holds                                                              |
|--------------|--------------------------------------------------------------------|
| `job`        | what one run is asked to do, as parent and children exchange it    |
| `gguf_file`  | weights out of a GGUF file                                         |
| `model`      | a Llama forward pass over paged attention                          |
| `pages`      | page pools and the page table of one sequence                      |
| `transfer`   | the NIXL agent, what it publishes, the descriptors of a read       |
| `prefill`    | the process that fills `standard` pages                            |
| `decode`     | the process that reads them, converts them and generates           |
| `reference`  | the two processes whose token ids the verdict compares with        |
| `child`      | entry of every child process, and its channel to the parent        |
| `processes`  | the parent's side of those channels                                |
| `report`     | table, verdict and JSON                                            |
"""
