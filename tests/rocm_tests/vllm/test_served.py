# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Real engines in processes of their own: a prefill on standard pages, a decoder on shuffled ones, real UCX.

The engines are shared, and the tests are in the order of what they do to them: first those that use them, then those
that kill them. The oracle is Hugging Face's model in float32. Every prompt is used in one test only, since the decoder
keeps what it has read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# A limit for what went wrong: all of this file takes less than two minutes on an idle machine.
pytestmark = [pytest.mark.vllm, pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(1200)]

COUNT = 24
LONG_S = 150
# Shorter than a page, one page, one token more, and more than one step's batch.
LENGTHS = (5, 16, 17, 70, 200)
_SEEDS = itertools.count()


def prompt_of(length: int) -> list[int]:
    """A prompt that no other test has."""
    import torch

    generator = torch.Generator().manual_seed(1000 + next(_SEEDS))
    return torch.randint(3, 512, (length,), generator=generator).tolist()


@dataclasses.dataclass
class World:
    """The engines and the oracle."""

    served: Any
    nursery: Any
    folder: Path
    model: Any
    decoder: Any
    prefills: list[Any]

    def want(self, prompt: list[int], count: int = COUNT) -> list[int]:
        return self.served.greedy(self.model, prompt, count)

    def prefill(self, index: int) -> Any:
        return self.prefills[index].ready()

    def start_prefill(self, port: int | None = None) -> Any:
        self.prefills.append(self.served.EngineProcess(self.nursery, self.folder, "standard", "kv_producer", port))
        return self.prefills[-1]


@pytest.fixture(scope="module")
def world(nursery: Any) -> Iterator[World]:
    from rocm_tests.vllm import served

    folder = nursery.folder / "model"
    # Made while the nursery imports vLLM.
    model = served.make_model(folder, num_kv_heads=3)
    ports = served.free_ports(4)
    decoder = served.EngineProcess(nursery, folder, "shuffled", "kv_consumer", ports.pop(), enable_prefix_caching=True)
    world = World(served, nursery, folder, model, decoder, [])
    try:
        for port in ports:
            world.start_prefill(port)
        decoder.ready()
        yield world
    finally:
        for engine in (decoder, *world.prefills):
            engine.kill()


@pytest.fixture
def all_blocks_come_back(world: World) -> Iterator[None]:
    """Whatever happens to a request, the decoder gets its blocks back."""
    before = world.decoder.ask("state")["free"]
    yield
    world.decoder.step_until(lambda: world.decoder.ask("state")["free"] == before)


@pytest.mark.parametrize("pages", ["standard", "shuffled"])
def test_one_engine_alone(world: World, pages: str) -> None:
    engine = world.decoder if pages == "shuffled" else world.prefill(0)
    prompts = [prompt_of(length) for length in LENGTHS]
    engine.ask("state")
    for i, prompt in enumerate(prompts):
        engine.ask("add", name=f"alone-{pages}-{i}", prompt=prompt, count=COUNT)
    finished = engine.ask("steps", seconds=LONG_S, names=[f"alone-{pages}-{i}" for i in range(len(prompts))])
    for i, prompt in enumerate(prompts):
        assert finished[f"alone-{pages}-{i}"]["tokens"] == world.want(prompt), len(prompt)
    # Each token once, the last of each request never: nothing was computed twice or left out.
    assert engine.ask("state")["query_tokens"] == sum(map(len, prompts)) + len(prompts) * (COUNT - 1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("all_blocks_come_back")
def test_handed_over(world: World, length: int) -> None:
    prefill, decoder, prompt = world.prefill(0), world.decoder, prompt_of(length)
    transfer = prefill.prefill(f"p-{length}", prompt)
    decoder.ask("state")
    done = decoder.run(f"d-{length}", prompt, COUNT, transfer)
    assert done["tokens"] == world.want(prompt)
    assert decoder.ask("state")["query_tokens"] == COUNT, "the prompt was read, only its last token is computed again"
    # The same in one engine, so that a slip of the oracle cannot hide one of ours.
    assert prefill.run(f"colocated-{length}", prompt, COUNT)["tokens"] == done["tokens"]


def test_the_decoder_keeps_shuffled_pages_whole_and_says_so(world: World) -> None:
    state = world.decoder.ask("connector")
    assert state["layout"] == "LBHNC", "the layout that the backend likes best"
    assert set(state["kinds"]) == {"shuffled"}
    assert set(world.prefill(0).ask("connector")["kinds"]) == {"standard"}
    pages = sum(-(-length // world.served.PAGE_SIZE) for length in LENGTHS)
    assert state["converted"]["pages"] == pages
    assert state["converted"]["bytes"] == pages * 3 * (2 * 3 * world.served.PAGE_SIZE * 64 * 4)
    assert state["refusal"] == ""


@pytest.mark.usefixtures("all_blocks_come_back")
def test_a_batch_is_handed_over_and_the_prefill_gets_its_blocks_back(world: World) -> None:
    prefill, decoder = world.prefill(0), world.decoder
    free = prefill.ask("state")["free"]
    prompts = [prompt_of(length) for length in LENGTHS]
    for i, prompt in enumerate(prompts):
        decoder.ask("add", name=f"batch-{i}", prompt=prompt, count=COUNT, transfer=prefill.prefill(f"pb-{i}", prompt))
    assert prefill.ask("state")["free"] < free, "its pages are held until they are read"
    finished = decoder.ask("steps", seconds=LONG_S, names=[f"batch-{i}" for i in range(len(prompts))])
    for i, prompt in enumerate(prompts):
        assert finished[f"batch-{i}"]["tokens"] == world.want(prompt)
    # An engine hears that its pages were read when it steps.
    prefill.run("another", prompt_of(5), 4)
    prefill.step_until(lambda: prefill.ask("state")["free"] >= free)


def reuse(world: World, *, reverse: bool) -> tuple[list[int], list[int], int]:
    """Tokens of a request that finds half of an earlier one's pages in the decoder, and what they should be.

    Attention does not see the order of past keys, whose positions are inside of them: within one request, pages that
    were swapped change nothing. A request that shares only some of them sees it.
    """
    prefill, decoder = world.prefill(0), world.decoder
    prompt, name = prompt_of(96), f"reuse-{reverse}"
    transfer = prefill.prefill("p-" + name, prompt)
    if reverse:
        transfer["remote_block_ids"] = [blocks[::-1] for blocks in transfer["remote_block_ids"]]
    decoder.run(name, prompt, 4, transfer)
    follower = prompt[:48] + prompt_of(40)
    decoder.ask("state")
    tokens = decoder.run(name + "-follower", follower, COUNT)["tokens"]
    return tokens, world.want(follower), decoder.ask("state")["query_tokens"]


def test_a_later_request_reuses_pages_that_were_read(world: World) -> None:
    tokens, want, computed = reuse(world, reverse=False)
    assert computed == 40 + COUNT - 1, "three pages come from what was read before"
    assert tokens == want


def test_that_would_see_pages_in_the_wrong_order(world: World) -> None:
    tokens, want, computed = reuse(world, reverse=True)
    assert computed == 40 + COUNT - 1
    assert tokens != want


def test_only_what_is_missing_is_read(world: World) -> None:
    prefill, decoder = world.prefill(0), world.decoder
    prompt = prompt_of(64)
    decoder.run("first", prompt[:40], 2)
    before = decoder.ask("connector")["converted"]["pages"]
    decoder.ask("state")
    done = decoder.run("second", prompt, COUNT, prefill.prefill("p-second", prompt))
    assert done["tokens"] == world.want(prompt)
    assert decoder.ask("connector")["converted"]["pages"] - before == 2, "two of four pages were here already"
    assert decoder.ask("state")["query_tokens"] == COUNT


@pytest.mark.usefixtures("all_blocks_come_back")
def test_aborts(world: World) -> None:
    """Before the first step, and while pages are on their way: the process that they come from stands still."""
    prefill, decoder = world.prefill(0), world.decoder
    prompts = [prompt_of(70) for _ in range(3)]
    transfers = [prefill.prefill(f"pa-{i}", prompt) for i, prompt in enumerate(prompts)]
    decoder.ask("add", name="early", prompt=prompts[0], count=COUNT, transfer=transfers[0])
    decoder.ask("abort", name="early")
    assert transfers[0]["remote_engine_id"] in decoder.ask("connector")["peers"], "so that only the read is left to do"
    prefill.stop()
    try:
        decoder.ask("add", name="flying", prompt=prompts[1], count=COUNT, transfer=transfers[1])
        decoder.step_until(lambda: bool(decoder.ask("connector")["reading"]))
        decoder.ask("abort", name="flying")
        assert decoder.ask("steps", seconds=0.2, names=["never"]) == {}
        assert decoder.ask("connector")["reading"], "it goes on, into blocks that are still its own"
    finally:
        prefill.resume()
    done = decoder.run("after", prompts[2], COUNT, transfers[2])
    assert done["tokens"] == world.want(prompts[2])


@pytest.mark.usefixtures("all_blocks_come_back")
def test_a_late_answer_to_the_handshake_is_waited_for(world: World) -> None:
    prefill, decoder, prompt = world.prefill(1), world.decoder, prompt_of(70)
    transfer = prefill.prefill("p-late", prompt)
    assert transfer["remote_engine_id"] not in decoder.ask("connector")["peers"]
    prefill.stop()
    try:
        decoder.ask("add", name="late", prompt=prompt, count=COUNT, transfer=transfer)
        decoder.step_until(lambda: bool(decoder.ask("connector")["asking"]))
        assert decoder.ask("steps", seconds=0.2, names=["late"]) == {}
    finally:
        prefill.resume()
    assert decoder.ask("steps", seconds=LONG_S, names=["late"])["late"]["tokens"] == world.want(prompt)


@pytest.mark.usefixtures("all_blocks_come_back")
def test_a_handshake_that_is_lost_fails_one_request_and_the_next_one_tries_again(world: World) -> None:
    prefill, decoder, prompt = world.prefill(2), world.decoder, prompt_of(70)
    transfers = [prefill.prefill(f"p-lost-{i}", prompt) for i in range(2)]
    prefill.stop()
    try:
        assert decoder.run("lost", prompt, COUNT, transfers[0])["reason"] == "error"
    finally:
        prefill.resume()
    nobody = {**transfers[0], "remote_engine_id": "nobody", "remote_port": world.served.free_ports(1)[0]}
    assert decoder.run("nobody", prompt, COUNT, nobody)["reason"] == "error"
    assert decoder.run("found", prompt, COUNT, transfers[1])["tokens"] == world.want(prompt)


@pytest.mark.usefixtures("all_blocks_come_back")
def test_the_prefill_dies_after_the_read(world: World) -> None:
    prefill, decoder, prompt = world.prefill(1), world.decoder, prompt_of(70)
    decoder.ask("add", name="after", prompt=prompt, count=COUNT, transfer=prefill.prefill("p-after", prompt))
    decoder.ask("state")
    decoder.step_until(lambda: decoder.ask("state")["query_tokens"] > 0)
    prefill.kill()
    assert decoder.ask("steps", seconds=LONG_S, names=["after"])["after"]["tokens"] == world.want(prompt)
    # Needed by the last test, and here is time for its start.
    world.start_prefill(prefill.port)


@pytest.mark.usefixtures("all_blocks_come_back")
def test_the_prefill_dies_during_the_read(world: World) -> None:
    prefill, decoder, lost, good = world.prefill(2), world.decoder, prompt_of(70), prompt_of(33)
    transfer = prefill.prefill("p-during", lost)
    assert transfer["remote_engine_id"] in decoder.ask("connector")["peers"], "so that only the read is left to do"
    decoder.ask("state")
    prefill.stop()
    decoder.ask("add", name="during", prompt=lost, count=COUNT, transfer=transfer)
    decoder.step_until(lambda: bool(decoder.ask("connector")["reading"]))
    assert decoder.ask("steps", seconds=0.2, names=["during"]) == {}
    assert decoder.ask("state")["query_tokens"] == 0
    decoder.ask("add", name="good", prompt=good, count=COUNT, transfer=world.prefill(0).prefill("p-good", good))
    prefill.kill()
    finished = decoder.ask("steps", seconds=LONG_S, names=["during", "good"])
    assert finished["good"]["tokens"] == world.want(good)
    assert finished["during"]["reason"] == "error"
    assert finished["during"]["tokens"] == []


@pytest.mark.usefixtures("all_blocks_come_back")
def test_the_prefill_dies_before_the_read_and_is_started_again(world: World) -> None:
    prefill, decoder, prompt = world.prefill(0), world.decoder, prompt_of(70)
    transfer = prefill.prefill("p-before", prompt)
    prefill.kill()
    assert decoder.run("before", prompt, COUNT, transfer)["reason"] == "error"
    assert decoder.run("alone", prompt_of(17), 4)["reason"] == "length", "the decoder goes on"
    # Another process at the address of one that is known and dead.
    successor = world.prefills[3].ready()
    assert successor.port == world.prefills[1].port
    done = decoder.run("again", prompt, COUNT, successor.prefill("p-again", prompt))
    assert done["tokens"] == world.want(prompt)
    assert decoder.ask("connector")["refusal"] == ""


def test_more_ranks_than_heads(nursery: Any, tmp_path: Path) -> None:
    """One KV head, two decoder ranks that both need it; the one who sends has it once."""
    from rocm_tests.vllm import served

    model = served.make_model(tmp_path, num_kv_heads=1, queries=4)
    ports = served.free_ports(2, apart=4)
    prefill = served.EngineProcess(nursery, tmp_path, "standard", "kv_producer", ports[0])
    decoder = served.EngineProcess(nursery, tmp_path, "shuffled", "kv_consumer", ports[1], tensor_parallel_size=2)
    with served.killing(prefill, decoder):
        prefill.ready()
        decoder.ready()
        for length in (17, 70):
            prompt = prompt_of(length)
            done = decoder.run(f"d-{length}", prompt, COUNT, prefill.prefill(f"p-{length}", prompt))
            assert done["tokens"] == served.greedy(model, prompt, COUNT)


def test_pushed(nursery: Any, tmp_path: Path) -> None:
    """The prefill writes its half pages into the decoder, which converts them."""
    from rocm_tests.vllm import served

    model = served.make_model(tmp_path, num_kv_heads=3)
    knob: dict[str, Any] = {"connector": "NixlPushConnector", "extra": {"convert_kv_pages": True}}
    ports = served.free_ports(2)
    prefill = served.EngineProcess(nursery, tmp_path, "standard", "kv_producer", ports[0], **knob)
    decoder = served.EngineProcess(nursery, tmp_path, "shuffled", "kv_consumer", ports[1], **knob)
    with served.killing(prefill, decoder):
        prefill.ready()
        decoder.ready()
        pages = 0
        for length in LENGTHS:
            # Of one name in both: that is how the prefill knows where the pages go.
            prompt, name = prompt_of(length), f"pushed-{length}"
            decoder.ask("state")
            decoder.ask("add", name=name, prompt=prompt, count=COUNT, transfer=prefill.prefill(name, prompt))
            decoder.step_until(lambda: decoder.ask("state")["query_tokens"] > 0, prefill)
            done = decoder.ask("steps", seconds=LONG_S, names=[name])[name]
            assert done["tokens"] == served.greedy(model, prompt, COUNT), length
            pages += -(-length // served.PAGE_SIZE)
            assert decoder.ask("connector")["converted"]["pages"] == pages


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
def test_larger_pages(nursery: Any, tmp_path: Path, layout: str) -> None:
    """Two pages of the prefill become one of the decoder: in its place, or by way of staging memory into planes."""
    from rocm_tests.vllm import served

    model = served.make_model(tmp_path, num_kv_heads=3)
    ports = served.free_ports(2)
    prefill = served.EngineProcess(nursery, tmp_path, "standard", "kv_producer", ports[0], block_size=16)
    larger: dict[str, Any] = {"block_size": 32, "layout": layout, "enable_prefix_caching": True}
    decoder = served.EngineProcess(nursery, tmp_path, "shuffled", "kv_consumer", ports[1], **larger)
    with served.killing(prefill, decoder):
        prefill.ready()
        decoder.ready()
        pages = 0
        for length in LENGTHS:
            prompt = prompt_of(length)
            decoder.ask("state")
            done = decoder.run(f"d-{length}", prompt, COUNT, prefill.prefill(f"p-{length}", prompt))
            assert done["tokens"] == served.greedy(model, prompt, COUNT), length
            assert decoder.ask("state")["query_tokens"] == COUNT
            pages += -(-length // 32)
        # The last prompt goes on: six of its pages are here, and two are read.
        prompt = prompt[:192] + prompt_of(41)
        done = decoder.run("longer", prompt, COUNT, prefill.prefill("p-longer", prompt))
        assert done["tokens"] == served.greedy(model, prompt, COUNT)
        found = decoder.ask("connector")
        assert found["refusal"] == ""
        assert found["layout"] == layout
        assert found["converted"]["pages"] == pages + 2
        assert found["converted"]["staged"] == (pages + 2 if layout == "LHBNC" else 0)
        assert found["slots taken"] == 0
