# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Whole pages land in staging memory and go to their planes from there; every byte compared, no slot lost or shared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rocm_tests.vllm import test_pairs, test_ratios
from rocm_tests.vllm.formats import joined
from rocm_tests.vllm.test_failures import Gate

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REMOTE, LOCAL = (1, 5, 2), (4, 0, 6)
BLOCKS = 16


@pytest.fixture
def pair(engines: Any, fleet: Any) -> tuple[Any, Any, torch.Tensor]:
    """A prefill on standard pages, a decoder that converts into planes, and what the prefill holds."""
    prefill = fleet.get(engines.Setup(role="kv_producer"))
    setup = engines.Setup(backend=engines.Shuffled, convert=True, layout=engines.PLANES, blocks=BLOCKS)
    decoder = fleet.get(setup)
    values = engines.values_of(prefill)
    prefill.fill(values)
    decoder.poison()
    return prefill, decoder, values


def staged(decoder: Any) -> list[int]:
    return [sum(decoder.worker(rank).xfer_stats.data["pages_staged"]) for rank in range(decoder.setup.tp)]


def not_staged(decoder: Any) -> int:
    return sum(decoder.worker().xfer_stats.data["pages_not_staged"])


def free(decoder: Any) -> int:
    return int(decoder.worker()._staging.slots.free)


PAIRS = [case for case in test_pairs.CONVERTED if case[1] == "PLANES"]


@pytest.mark.parametrize("stage", [0, None], ids=["straight", "staged"])
@pytest.mark.parametrize(("left", "right", "p_tp", "d_tp", "heads"), PAIRS, ids=str)
def test_standard_pages_arrive_either_way(
    engines: Any, fleet: Any, left: Any, right: Any, p_tp: int, d_tp: int, heads: int, stage: int | None
) -> None:
    prefill, decode = test_pairs.pair(engines, "Standard", "Shuffled", (left, right), (p_tp, d_tp), heads)
    p, d = fleet.get(prefill), fleet.get(dataclasses.replace(decode, convert=True, stage=stage))
    test_pairs.check_arrived(engines, fleet, p, d)
    assert staged(d) == [0 if stage == 0 else 3] * d_tp
    assert all(worker.connector_worker._staging is None for worker in d.workers) == (stage == 0)


RATIOS = [case for case in test_ratios.CONVERTED if case[:2] == ("Standard", "Shuffled") and case[3] == "PLANES"]


@pytest.mark.parametrize("stage", [0, None], ids=["straight", "staged"])
@pytest.mark.parametrize(
    ("prefill", "decode", "left", "right", "p_tp", "d_tp", "heads", "p_size", "d_size", "count"), RATIOS, ids=str
)
def test_smaller_pages_arrive_either_way(
    engines: Any,
    fleet: Any,
    prefill: str,
    decode: str,
    left: Any,
    right: Any,
    p_tp: int,
    d_tp: int,
    heads: int,
    p_size: int,
    d_size: int,
    count: int,
    stage: int | None,
) -> None:
    pair = test_ratios.setups(engines, prefill, decode, (left, right), (p_tp, d_tp), heads, (p_size, d_size))
    p, d = fleet.get(pair[0]), fleet.get(dataclasses.replace(pair[1], stage=stage))
    values = engines.values_of(p)
    p.fill(values)
    d.poison()
    remote = test_ratios.small_pages(count)
    # Twice: what the first one left in the slots must not be seen in what the second one does not fill.
    for _ in range(2):
        outcome = engines.pull(p, d, fleet.request(), remote, LOCAL)
        assert outcome.arrived, (outcome, d.worker().last_refusal)
        assert outcome.sent == p_tp
        assert torch.equal(d.read(LOCAL), joined(values[:, list(remote)], d_size // p_size, len(LOCAL)))
    assert (d.read((1, 2, 3, 5, 7, 8)) == engines.POISON).all(), "pages of other requests were written"
    assert staged(d) == [0 if stage == 0 else 2 * len(LOCAL)] * d_tp


# The prefill's layout, TP sizes, and whether a rank's share of a page is one run of bytes there.
LIKE = [("WHOLE", 1, 1, True), ("WHOLE", 4, 2, True), ("WHOLE", 1, 2, False), ("PLANES", 1, 1, False)]


@pytest.mark.parametrize("convert", [False, True, "sync"])
@pytest.mark.parametrize(("left", "p_tp", "d_tp", "one_run"), LIKE, ids=str)
def test_like_pages_are_moved_to_their_planes(
    engines: Any, fleet: Any, left: str, p_tp: int, d_tp: int, one_run: bool, convert: bool | str
) -> None:
    prefill, decode = test_pairs.pair(engines, "Shuffled", "Shuffled", (left, "PLANES"), (p_tp, d_tp), 4)
    p, d = fleet.get(prefill), fleet.get(dataclasses.replace(decode, stage=1, convert=convert))
    test_pairs.check_arrived(engines, fleet, p, d)
    assert staged(d) == [3 if one_run else 0] * d_tp
    stats = d.worker().xfer_stats
    assert not stats.data["pages_converted"], "to move is not to convert"
    assert not_staged(d) == 0


def test_conversion_in_the_step(engines: Any, fleet: Any, pair: Any) -> None:
    prefill, decoder, _ = pair
    in_step = fleet.get(dataclasses.replace(decoder.setup, convert="sync"))
    test_pairs.check_arrived(engines, fleet, prefill, in_step)
    assert staged(in_step) == [3]
    assert free(in_step) == BLOCKS


def test_runs_are_joined_on_both_sides(engines: Any, fleet: Any, pair: Any) -> None:
    """Which is what all this is for: one piece a layer, as between two engines with standard pages."""
    prefill, decoder, values = pair
    straight = fleet.get(dataclasses.replace(decoder.setup, stage=0))
    for engine, remote, pieces in (
        (decoder, (2, 3, 4, 5), 1),
        (decoder, (5, 3, 2, 4), 4),
        (decoder, (2, 3, 6, 7), 2),
        (straight, (2, 3, 4, 5), 8),
    ):
        engine.poison()
        engine.worker().xfer_stats.reset()
        assert engines.pull(prefill, engine, fleet.request(), remote, (9, 4, 11, 0)).arrived
        assert torch.equal(engine.read((9, 4, 11, 0)), values[:, list(remote)])
        assert sum(engine.worker().xfer_stats.data["num_descriptors"]) == pieces * engines.LAYERS


def test_a_local_prefix_is_not_read_again(engines: Any, pair: Any) -> None:
    prefill, decoder, values = pair
    assert engines.pull(prefill, decoder, "suffix", remote=(1, 5, 2, 7, 3), local=(8, 2), held=3).arrived
    assert torch.equal(decoder.read((8, 2)), values[:, [7, 3]])
    assert (decoder.read([b for b in range(BLOCKS) if b not in (8, 2)]) == engines.POISON).all()
    assert engines.pull(prefill, decoder, "nothing", remote=(1, 5), local=(), held=2).sent == 1
    assert staged(decoder) == [2]
    assert free(decoder) == BLOCKS


def test_layers_are_told_apart_by_name(engines: Any, fleet: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache group lists its layers as the model was made, and vLLM its regions by name."""
    prefill, decoder, values = pair
    caches_of = engines.Engine._kv_caches

    def listed_backwards(engine: Any) -> Any:
        config, views = caches_of(engine)
        group = config.kv_cache_groups[0]
        group.layer_names = group.layer_names[::-1]
        return config, views

    monkeypatch.setattr(engines.Engine, "_kv_caches", listed_backwards)
    backwards = fleet.get(dataclasses.replace(decoder.setup, blocks=12))
    worker = backwards.worker()
    assert list(worker._pages.formats) == worker.region_names[::-2]
    assert engines.pull(prefill, backwards, "layers").arrived
    assert staged(backwards) == [3]
    assert torch.equal(backwards.read(LOCAL), values[:, list(REMOTE)])


def test_without_enough_slots_a_request_is_read_straight_and_counted(
    engines: Any, fleet: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer.integrations.vllm.nixl import staging_mixin

    prefill, decoder, values = pair
    said: list[Any] = []
    monkeypatch.setattr(staging_mixin.logger, "warning", lambda text, *fields: said.append(text % fields))
    slots = decoder.worker()._staging.slots
    held = slots.take(BLOCKS - 2)
    for _ in range(2):
        decoder.poison()
        assert engines.pull(prefill, decoder, fleet.request()).arrived
        assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    assert not_staged(decoder) == 6
    (text,) = said
    assert "A request of 3 pages found 2 of 16 slots" in text
    assert '"stage_kv_pages"' in text
    assert engines.pull(prefill, decoder, fleet.request(), (6, 7), (9, 10)).arrived
    assert staged(decoder) == [2]
    slots.give_back(held)
    assert engines.pull(prefill, decoder, fleet.request()).arrived
    assert staged(decoder) == [5]
    assert free(decoder) == BLOCKS
    assert torch.equal(decoder.read((*LOCAL, 9, 10)), values[:, [*REMOTE, 6, 7]])
    reduced = decoder.workers[0].get_kv_connector_stats().reduce()
    assert (reduced["Pages staged"], reduced["Pages not staged"]) == (5, 6)


def test_slots_are_a_requests_until_its_pages_are_converted(
    engines: Any, fleet: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of peers whose pages are cut in other ways: they share the slots, and no byte of them."""
    prefill, decoder, values = pair
    wide = fleet.get(engines.Setup(role="kv_producer", tp=2))
    others = engines.values_of(wide, seed=5)
    wide.fill(others)
    assert engines.pull(wide, decoder, "first").arrived
    decoder.poison()
    worker = decoder.worker()
    gates = []
    for agreement, (_, queue) in worker._converter.from_staging.items():
        with monkeypatch.context() as patch:
            patch.setattr(worker._converter, "from_staging", {agreement: (None, queue)})
            gates.append(Gate(decoder, monkeypatch))
    reads = {"a": (prefill, (1, 5, 2), (4, 0, 6)), "b": (wide, (3, 4), (9, 10)), "c": (prefill, (7, 0, 6), (1, 2, 3))}
    for name, (peer, remote, local) in reads.items():
        engines.announce(peer, name)
        decoder.step(0, engines.wanted(peer, name, remote, local))
    assert engines.until(lambda: bool(decoder.step(0)) and len(worker._conversions) == 3)
    taken = [slot for read in worker._reads.values() for slot in read.slots]
    assert len(set(taken)) == len(taken) == 8
    assert free(decoder) == BLOCKS - 8
    # An abort or a preemption of the scheduler changes nothing.
    told = engines.NixlConnectorMetadata()
    told.reqs_not_processed = {"a"}
    decoder.step(0, told)
    decoder.workers[0].handle_preemptions(told)
    assert free(decoder) == BLOCKS - 8
    for gate in gates:
        gate.opened.set()
    done: set[str] = set()
    assert engines.until(lambda: done.update(decoder.step(0).finished_recving) or done == set(reads))
    assert free(decoder) == BLOCKS
    assert not worker._reads
    assert torch.equal(decoder.read((4, 0, 6, 1, 2, 3)), values[:, [1, 5, 2, 7, 0, 6]])
    assert torch.equal(decoder.read((9, 10)), others[:, [3, 4]])


def test_slots_of_a_transfer_that_may_still_write_are_kept(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error as well: only a handle that was released writes no more."""
    prefill, decoder, values = pair
    assert engines.pull(prefill, decoder, "before").arrived
    nixl, said = decoder.worker().nixl_wrapper, ["PROC"]
    release = nixl.release_xfer_handle

    def refuses(handle: Any) -> None:
        raise RuntimeError("still writing")

    monkeypatch.setattr(nixl, "check_xfer_state", lambda handle: said[-1])
    monkeypatch.setattr(nixl, "release_xfer_handle", refuses)
    engines.announce(prefill, "lost")
    results = [decoder.step(0, engines.wanted(prefill, "lost", REMOTE, LOCAL))]
    for state in ("PROC", "ERR"):
        said.append(state)
        results += [decoder.step(0) for _ in range(3)]
        assert free(decoder) == BLOCKS - 3
    assert not any(result.finished_recving for result in results)
    monkeypatch.setattr(nixl, "release_xfer_handle", release)
    last = decoder.step(0)
    assert last.failed_recving == {"lost"}
    assert decoder.workers[0].get_block_ids_with_load_errors() == set(LOCAL)
    assert free(decoder) == BLOCKS
    monkeypatch.undo()
    assert engines.pull(prefill, decoder, "after").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_slots_of_a_read_that_never_began_are_free(engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decoder, values = pair
    assert engines.pull(prefill, decoder, "before").arrived
    nixl = decoder.worker().nixl_wrapper

    def fails(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no handle")

    with monkeypatch.context() as patch:
        patch.setattr(nixl, "make_prepped_xfer", fails)
        outcome = engines.pull(prefill, decoder, "unread")
    assert outcome.refused
    assert outcome.bad_blocks == [set(LOCAL)]
    assert free(decoder) == BLOCKS
    assert decoder.worker()._reading is None
    assert engines.pull(prefill, decoder, "after").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_an_engine_that_slept_reads_through_its_staging_again(engines: Any, pair: Any) -> None:
    prefill, decoder, values = pair
    assert engines.pull(prefill, decoder, "before").arrived
    worker = decoder.worker()
    worker.unregister_kv_caches()
    assert not worker._through
    assert not worker.src_xfer_handles_by_tp_ratio
    worker.restore_kv_caches()
    decoder.poison()
    assert engines.pull(prefill, decoder, "after").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    assert staged(decoder) == [6]
    worker.shutdown()
    assert not worker._registered_descs


def test_a_handshake_that_fails_between_two_pieces_keeps_no_handle(
    engines: Any, fleet: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder, _ = pair
    wide = fleet.get(engines.Setup(role="kv_producer", tp=2))
    values = engines.values_of(wide, seed=5)
    wide.fill(values)
    worker = decoder.worker()
    nixl, made, released = worker.nixl_wrapper, [], []
    prepare, release = nixl.prep_xfer_dlist, nixl.release_dlist_handle
    memory, fails = worker._staging.memory, [True]

    def prepared(agent: str, rows: Any, **named: Any) -> Any:
        address = int(rows[0, 0]) if agent == "NIXL_INIT_AGENT" else 0
        second = memory.data_ptr() < address < memory.data_ptr() + memory.nbytes
        if second and fails.pop():
            raise RuntimeError("no handle")
        handle = prepare(agent, rows, **named)
        if address:
            made.append(handle)
        return handle

    monkeypatch.setattr(nixl, "prep_xfer_dlist", prepared)
    monkeypatch.setattr(nixl, "release_dlist_handle", lambda handle: released.append(handle) or release(handle))
    assert engines.pull(wide, decoder, "failed").refused
    fails.append(False)
    assert engines.pull(wide, decoder, "arrived").arrived
    assert staged(decoder) == [3]
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    worker.shutdown()
    assert made
    assert {id(handle) for handle in made} <= {id(handle) for handle in released}


def test_who_has_staging(engines: Any, fleet: Any) -> None:
    """Nobody without a use for it: then nothing is listed, prepared or asked for."""
    planes = engines.Setup(backend=engines.Shuffled, layout=engines.PLANES)
    for setup in (
        engines.Setup(convert=True, stage=1),
        planes,
        dataclasses.replace(planes, layout=engines.WHOLE, convert=True, stage=1),
        dataclasses.replace(planes, role="kv_producer", convert=True, stage=1),
        dataclasses.replace(planes, connector="NixlPushConnector", convert=True),
    ):
        worker = fleet.get(setup).worker()
        assert worker._staging is None
        assert len(worker._registered_descs) == 1
    assert fleet.get(dataclasses.replace(planes, stage=1)).worker()._staging.slots.count == 8
    with pytest.raises(ValueError, match='"stage_kv_pages" must be unset in push mode'):
        fleet.get(dataclasses.replace(planes, connector="NixlPushConnector", stage=1))
    large = dataclasses.replace(planes, kv_heads=8, head_dim=128, layers=20, blocks=2, stage=1)
    with pytest.raises(ValueError, match='"stage_kv_pages" must hold a page of all layers, 1310720 bytes, got 1 MiB'):
        fleet.get(large)


def test_memory_that_is_not_there_is_refused_by_name(engines: Any, fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.integrations.vllm.nixl import staging_mixin

    def no_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(staging_mixin, "Staging", no_memory)
    with pytest.raises(ValueError, match='"stage_kv_pages" must fit into the memory beside the KV cache, got 0 MiB'):
        fleet.get(engines.Setup(backend=engines.Shuffled, layout=engines.PLANES, stage=1))
