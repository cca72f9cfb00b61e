# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong stays with the request that it happened to; nothing is reported before it is true."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REMOTE, LOCAL = (1, 5, 2), (4, 0, 6)


@pytest.fixture(params=[0, None], ids=["straight", "staged"])
def pair(engines: Any, fleet: Any, request: pytest.FixtureRequest) -> tuple[Any, Any, torch.Tensor]:
    """A prefill on standard pages, a shuffled decoder that converts, and what the prefill holds."""
    prefill = fleet.get(engines.Setup(role="kv_producer"))
    setup = engines.Setup(backend=engines.Shuffled, convert=True, layout=engines.PLANES, blocks=16)
    decoder = fleet.get(dataclasses.replace(setup, stage=request.param))
    values = engines.values_of(prefill)
    prefill.fill(values)
    decoder.poison()
    return prefill, decoder, values


class Gate:
    """Holds conversions of a decoder until opened; counts them."""

    def __init__(self, decoder: Any, monkeypatch: pytest.MonkeyPatch, fail_on: int | None = None) -> None:
        self.opened, self.entered, self.seen = threading.Event(), threading.Event(), []
        # The one that was made ready when the engine started, for the pages that most peers have.
        pool = usual_queue(decoder)._pool
        convert = pool.convert

        def gated(block_ids: torch.Tensor, *source_ids: torch.Tensor) -> None:
            self.entered.set()
            assert self.opened.wait(30)
            self.seen.append(block_ids.tolist())
            if fail_on in self.seen[-1]:
                raise RuntimeError("the converter broke")
            convert(block_ids, *source_ids)

        monkeypatch.setattr(pool, "convert", gated)


def usual_queue(decoder: Any) -> Any:
    converter = decoder.worker()._converter
    staged = decoder.worker()._staging is not None
    ((_, queue),) = (converter.from_staging if staged else converter.by_agreement).values()
    return queue


def test_a_request_is_received_when_it_is_converted_and_once(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """known fault 43: until then its blocks stay reserved, after an abort too, of which a worker knows nothing."""
    prefill, decoder, values = pair
    gate = Gate(decoder, monkeypatch)
    engines.announce(prefill, "slow")
    results = [decoder.step(0, engines.wanted(prefill, "slow", REMOTE, LOCAL))]
    assert engines.until(lambda: results.append(decoder.step(0)) or gate.entered.is_set())
    for _ in range(20):
        results.append(decoder.step(0))
    assert not any(result.finished_recving for result in results)
    worker = decoder.worker()
    assert "slow" in worker._recving_metadata
    assert worker._engines_with_inflight_transfers() == {prefill.id}, "the peer's state must outlive the conversion"
    gate.opened.set()
    assert engines.until(lambda: results.append(decoder.step(0)) or "slow" in results[-1].finished_recving)
    for _ in range(5):
        results.append(decoder.step(0))
    assert sum("slow" in result.finished_recving for result in results) == 1
    assert not any(result.failed_recving for result in results)
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    stats = decoder.workers[0].get_kv_connector_stats()
    assert stats.data["pages_converted"] == [3]
    assert stats.data["bytes_converted"] == [3 * decoder.page.page_bytes * engines.LAYERS]
    assert stats.reduce()["Pages converted"] == 3


def test_another_request_goes_on_while_one_is_converted_or_fails(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """known fault 42"""
    prefill, decoder, values = pair
    gate = Gate(decoder, monkeypatch, fail_on=9)
    gate.opened.set()
    outcome = engines.pull(prefill, decoder, "broken", remote=(3, 4), local=(9, 10))
    assert outcome.refused
    assert outcome.bad_blocks == [{9, 10}]
    good = engines.pull(prefill, decoder, "good")
    assert good.arrived
    assert gate.seen == [[9, 10], list(LOCAL)]
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    stats = decoder.workers[0].get_kv_connector_stats()
    assert stats.data["num_failed_conversions"] == [1]
    assert stats.data["pages_converted"] == [3]
    assert not decoder.worker()._conversions
    assert not decoder.worker()._recving_metadata


def test_a_refused_peer_converts_nothing_and_may_come_back(
    engines: Any, fleet: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decoder, values = pair
    gate = Gate(decoder, monkeypatch)
    gate.opened.set()
    stock = fleet.get(engines.Setup(role="kv_producer", module=engines.STOCK))
    for attempt in range(2):
        assert engines.pull(stock, decoder, f"refused-{attempt}").refused
    assert gate.seen == []
    assert decoder.worker().xfer_stats.data["peers_refused"] == ["no_tag", "no_tag"]
    assert stock.id not in decoder.worker()._agreements
    assert engines.pull(prefill, decoder, "good").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_a_failed_transfer_is_not_converted(engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decoder, _ = pair
    gate = Gate(decoder, monkeypatch)
    gate.opened.set()
    nixl = decoder.worker().nixl_wrapper
    monkeypatch.setattr(nixl, "check_xfer_state", lambda handle: "ERR")
    outcome = engines.pull(prefill, decoder, "lost")
    assert outcome.refused
    assert outcome.bad_blocks == [set(LOCAL)]
    assert gate.seen == []


def test_shutdown_waits_for_the_converter(engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decoder, values = pair
    gate = Gate(decoder, monkeypatch)
    engines.announce(prefill, "slow")
    decoder.step(0, engines.wanted(prefill, "slow", REMOTE, LOCAL))
    assert engines.until(lambda: bool(decoder.step(0)) and gate.entered.is_set())
    threading.Timer(0.2, gate.opened.set).start()
    decoder.workers[0].shutdown()
    assert gate.seen == [list(LOCAL)]
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


@pytest.mark.parametrize("what", ["abort", "preemption"])
def test_what_the_scheduler_does_to_a_request_does_not_disturb_its_conversion(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """known fault 43: its blocks are handed out again only after the report, so that comes late, once, and true."""
    prefill, decoder, values = pair
    gate = Gate(decoder, monkeypatch)
    engines.announce(prefill, "gone")
    decoder.step(0, engines.wanted(prefill, "gone", REMOTE, LOCAL))
    assert engines.until(lambda: bool(decoder.step(0)) and gate.entered.is_set())
    told = engines.wanted(prefill, "next", (3,), (9,))
    if what == "abort":
        told.reqs_not_processed = {"gone"}
    else:
        decoder.workers[0].handle_preemptions(told)
    engines.announce(prefill, "next")
    results = [decoder.step(0, told)] + [decoder.step(0) for _ in range(20)]
    assert not any(result.finished_recving for result in results)
    assert "gone" in decoder.worker()._recving_transfers
    gate.opened.set()
    done: list[str] = []
    assert engines.until(lambda: len(done.extend(decoder.step(0).finished_recving) or done) == 2)
    assert sorted(done) == ["gone", "next"]
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])
    assert torch.equal(decoder.read((9,)), values[:, [3]])
    assert not decoder.worker()._conversions


def test_caches_that_are_put_away_are_converted_first(engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep mode takes the memory, which a conversion must not write to any more."""
    prefill, decoder, values = pair
    gate = Gate(decoder, monkeypatch)
    engines.announce(prefill, "slow")
    decoder.step(0, engines.wanted(prefill, "slow", REMOTE, LOCAL))
    assert engines.until(lambda: bool(decoder.step(0)) and gate.entered.is_set())
    threading.Timer(0.2, gate.opened.set).start()
    worker = decoder.worker()
    monkeypatch.setattr(worker, "_recving_transfers", {})
    worker.unregister_kv_caches()
    assert gate.seen == [list(LOCAL)]
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_a_pool_that_is_gone_fails_its_request(engines: Any, pair: Any) -> None:
    """The queue looks at its memory before each request; a kernel would follow a pointer to nowhere."""
    from flashinfer.core.errors import PoolLostError

    prefill, decoder, _ = pair
    pool, said = usual_queue(decoder)._pool, []
    decoder.worker()._log_failure = lambda **fields: said.append(fields)
    pool._addresses[0] += 16
    assert engines.pull(prefill, decoder, "lost").refused
    pool._addresses[0] -= 16
    (fields,) = said
    assert fields["failure_type"] == "page_conversion_failed"
    assert isinstance(fields["error"], PoolLostError)
    assert engines.pull(prefill, decoder, "found").arrived


@pytest.mark.parametrize("local", [(4, 0, 99), (4, 0, 4)], ids=str)
def test_ids_that_no_page_has_fail_their_request(engines: Any, pair: Any, local: tuple[int, ...]) -> None:
    prefill, decoder, values = pair
    worker = decoder.worker()
    converter = worker._converter
    start = converter.start
    converter.start = lambda agreement, pages, slots: start(agreement, [(page, 1) for page in local], slots)
    outcome = engines.pull(prefill, decoder, "broken")
    assert outcome.refused
    assert outcome.bad_blocks == [set(LOCAL)]
    converter.start = start
    assert engines.pull(prefill, decoder, "good").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_a_converter_that_breaks_in_the_step_fails_its_request(engines: Any, fleet: Any, pair: Any) -> None:
    """known fault 42, on the path that has no thread and no handle."""
    prefill, _, values = pair
    decoder = fleet.get(engines.Setup(backend=engines.Shuffled, convert="sync", layout=engines.WHOLE, blocks=16))
    decoder.poison()
    by_agreement = decoder.worker()._converter.by_agreement
    ((agreement, (planes, converter)),) = by_agreement.items()

    def breaks(block_ids: torch.Tensor) -> None:
        raise RuntimeError("the converter broke")

    by_agreement[agreement] = planes, breaks
    outcome = engines.pull(prefill, decoder, "broken", remote=(3, 4), local=(9, 10))
    assert outcome.refused
    assert outcome.bad_blocks == [{9, 10}]
    by_agreement[agreement] = planes, converter
    assert engines.pull(prefill, decoder, "good").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_caches_that_cannot_be_converted_refuse_the_peer(
    engines: Any, fleet: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a peer needs is made ready in the handshake, and there it fails: before anything is built for the peer."""
    from flashinfer.core.errors import InvalidArgumentError
    from flashinfer.integrations.vllm.nixl import conversion

    _, decoder, _ = pair
    wide = fleet.get(engines.Setup(role="kv_producer", tp=2))

    def unfit(*args: Any, **kwargs: Any) -> None:
        raise InvalidArgumentError("planes must fit")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "ConversionQueue", unfit)
        assert engines.pull(wide, decoder, "early").refused
    assert wide.id not in decoder.worker().dst_num_blocks
    assert engines.pull(wide, decoder, "late").arrived


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"page_format_version": 2}, "speaks version 2"),
        ({"page_formats": ["fi-kv/2;standard;bfloat16;h4;n16;d16"] * 2}, "fi-kv/2;standard"),
        ({"page_formats": ["fi-kv/1;standard;bfloat16;h8;n16;d16"] * 2}, "fi-kv/1;standard;bfloat16;h8"),
        ({"page_formats": ["fi-kv/1;standard;bfloat16;h4;n16;d16 "] * 2}, "d16 '"),
        ({"page_formats": ["\u2603"] * 2}, "u2603"),
        ({"page_formats": []}, "one page format for each"),
        ({"page_formats": ["fi-kv/1;standard;bfloat16;h4;n16;d16"]}, "one page format for each"),
        ({"region_names": ["model.layers.0.attn"] * 2}, "no pages of layer model.layers.1"),
    ],
    ids=str,
)
def test_what_a_peer_may_say_instead(engines: Any, pair: Any, change: dict[str, Any], reason: str) -> None:
    """known fault 47"""
    from flashinfer.integrations.vllm.nixl.metadata import decode, encode

    prefill, decoder, _ = pair
    payload = prefill.worker().xfer_handshake_metadata
    payload.agent_metadata_bytes = encode(dataclasses.replace(decode(payload.agent_metadata_bytes), **change))
    prefill.scheduler.shutdown()
    prefill.scheduler.connector_scheduler._stop_event.clear()
    prefill.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): payload})
    assert engines.pull(prefill, decoder, "r").refused
    assert reason in decoder.worker().last_refusal
    assert decoder.worker()._remote_agents == {}


def test_an_engine_whose_pages_nobody_knows_does_not_start(engines: Any, fleet: Any) -> None:
    with pytest.raises(ValueError, match=r'"page_format" must be one of standard.*Undeclared with num_head_slots 2'):
        fleet.get(engines.Setup(backend=engines.Undeclared))
    with pytest.raises(ValueError, match=r'"page_format" must fit the pages of .*Shuffled.*got .standard'):
        fleet.get(engines.Setup(backend=engines.Shuffled, page_format="standard"))
    with pytest.raises(ValueError, match=r'"convert_kv_pages" must be true, false or "sync", got .yes'):
        fleet.get(engines.Setup(backend=engines.Shuffled, convert="yes"))
    with pytest.raises(ValueError, match="keeps the pages of all layers together"):
        fleet.get(engines.Setup(layout="BLHNC"))


def test_a_stated_format_is_used(engines: Any, fleet: Any) -> None:
    stated = fleet.get(engines.Setup(backend=engines.Undeclared, page_format="shuffled"))
    assert stated.layout == engines.PLANES, "two-slot pages get the layout that their backend likes best"
    assert stated.worker()._pages.formats["model.layers.0.attn"].kind == "shuffled"


def test_a_peer_that_comes_back_with_other_pages_is_agreed_with_anew(engines: Any, fleet: Any, pair: Any) -> None:
    """known fault 47: nothing that was known of the engine before may be used for its successor of the same name."""
    prefill, decoder, values = pair
    assert engines.pull(prefill, decoder, "before").arrived
    assert decoder.worker()._agreements[prefill.id].src is not None
    # What vLLM does with an engine that was replaced or not used for long.
    decoder.worker()._cleanup_remote_engine(prefill.id)
    assert prefill.id not in decoder.worker()._agreements
    successor = engines.Engine(dataclasses.replace(prefill.setup, backend=engines.Shuffled, blocks=12), prefill.id)
    try:
        values = engines.values_of(successor, seed=7)
        successor.fill(values)
        decoder.poison()
        assert engines.pull(successor, decoder, "after", remote=(11, 3, 0)).arrived
        assert decoder.worker()._agreements[prefill.id].src is None
        assert torch.equal(decoder.read(LOCAL), values[:, [11, 3, 0]])
    finally:
        successor.close()


def stalled(decoder: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> tuple[Any, Any]:
    """Holds reads or conversions of a decoder: whether one has come there, and what lets them go on."""
    if what == "conversion":
        gate = Gate(decoder, monkeypatch)
        return gate.entered.is_set, gate.opened.set
    nixl, opened = decoder.worker().nixl_wrapper, threading.Event()
    check = nixl.check_xfer_state
    monkeypatch.setattr(nixl, "check_xfer_state", lambda handle: check(handle) if opened.is_set() else "PROC")
    return lambda: "slow" in decoder.worker()._recving_transfers, opened.set


@pytest.mark.parametrize("what", ["read", "conversion"])
def test_a_peer_that_registers_again_fails_what_is_read_of_it(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """vLLM forgets the peer at once; until it is known again nothing says what the pages of the read are."""
    prefill, decoder, values = pair
    assert engines.pull(prefill, decoder, "before").arrived
    worker, known = decoder.worker(), threading.Event()
    under_way, go_on = stalled(decoder, monkeypatch, what)
    handshake = worker._nixl_handshake
    monkeypatch.setattr(worker, "_nixl_handshake", lambda *a, **k: known.wait(30) and handshake(*a, **k))
    engines.announce(prefill, "slow")
    decoder.step(0, engines.wanted(prefill, "slow", REMOTE, LOCAL))
    assert engines.until(lambda: bool(decoder.step(0)) and under_way())
    engines.announce(prefill, "next")
    told = engines.wanted(prefill, "next", (3,), (9,))
    told.reqs_to_recv["next"].remote.registration_generation = 1
    results = [decoder.step(0, told)] + [decoder.step(0) for _ in range(5)]
    assert prefill.id not in worker._remote_agents
    assert not any(result.finished_recving for result in results), "its pages and slots are still written to"
    go_on()
    assert engines.until(lambda: results.append(decoder.step(0)) or results[-1].finished_recving)
    assert results[-1].finished_recving == results[-1].failed_recving == {"slow"}
    assert decoder.workers[0].get_block_ids_with_load_errors() == set(LOCAL)
    assert not worker._reads
    known.set()
    assert engines.until(lambda: results.append(decoder.step(0)) or results[-1].finished_recving)
    assert results[-1].finished_recving == {"next"}
    assert not results[-1].failed_recving
    assert torch.equal(decoder.read((9,)), values[:, [3]])
    assert worker._staging is None or worker._staging.slots.free == worker._staging.slots.count


@pytest.mark.parametrize("what", ["read", "conversion"])
def test_an_engine_that_sleeps_in_mid_read_fails_that_read(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    prefill, decoder, values = pair
    under_way, go_on = stalled(decoder, monkeypatch, what)
    engines.announce(prefill, "slow")
    decoder.step(0, engines.wanted(prefill, "slow", REMOTE, LOCAL))
    assert engines.until(lambda: bool(decoder.step(0)) and under_way())
    go_on()
    decoder.worker().unregister_kv_caches()
    result = decoder.step(0)
    assert result.finished_recving == result.failed_recving == {"slow"}
    assert decoder.workers[0].get_block_ids_with_load_errors() == set(LOCAL)
    assert not decoder.worker()._reads
    decoder.worker().restore_kv_caches()
    assert engines.pull(prefill, decoder, "after").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_without_a_converter_a_peer_is_forgotten_as_safely(engines: Any, fleet: Any, pair: Any) -> None:
    prefill = pair[0]
    decoder = fleet.get(engines.Setup())
    engines.announce(prefill, "slow")
    worker = decoder.worker()
    assert engines.pull(prefill, decoder, "before").arrived
    decoder.workers[0].bind_connector_metadata(engines.wanted(prefill, "slow", REMOTE, LOCAL))
    decoder.workers[0].start_load_kv(None)
    worker._cleanup_remote_engine(prefill.id)
    failed: set[str] = set()
    assert engines.until(lambda: failed.update(decoder.step(0).failed_recving) or failed == {"slow"})
    assert decoder.workers[0].get_block_ids_with_load_errors() == set(LOCAL)


def test_a_request_without_an_agreement_is_no_request_without_a_conversion(engines: Any, pair: Any) -> None:
    prefill, decoder, _ = pair
    worker = decoder.worker()
    engines.announce(prefill, "odd")
    assert engines.pull(prefill, decoder, "before").arrived
    # As a peer leaves it that writes into this engine, and was forgotten.
    worker._recving_metadata["odd"] = engines.wanted(prefill, "odd", REMOTE, LOCAL).reqs_to_recv["odd"]
    worker._recving_transfers["odd"] = []
    worker._agreements.clear()
    assert decoder.step(0).failed_recving == {"odd"}


@pytest.mark.parametrize("what", ["read", "conversion"])
def test_a_request_that_is_read_twice_is_refused(
    engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The first read writes to its slots until it ends, and the second one's handles would end with its conversion."""
    prefill, decoder, values = pair
    under_way, go_on = stalled(decoder, monkeypatch, what)
    engines.announce(prefill, "slow")
    decoder.step(0, engines.wanted(prefill, "slow", REMOTE, LOCAL))
    assert engines.until(lambda: bool(decoder.step(0)) and under_way())
    results = [decoder.step(0, engines.wanted(prefill, "slow", (3, 4), (9, 10)))]
    results += [decoder.step(0) for _ in range(5)]
    assert not any(result.finished_recving for result in results)
    go_on()
    assert engines.until(lambda: results.append(decoder.step(0)) or results[-1].finished_recving)
    assert results[-1].failed_recving == {"slow"}
    assert decoder.workers[0].get_block_ids_with_load_errors() == {9, 10}
    assert (decoder.read((9, 10)) == engines.POISON).all()
    worker = decoder.worker()
    assert worker._staging is None or worker._staging.slots.free == worker._staging.slots.count
    assert engines.pull(prefill, decoder, "after").arrived
    assert torch.equal(decoder.read(LOCAL), values[:, list(REMOTE)])


def test_after_shutdown_nothing_holds_the_caches(engines: Any, pair: Any) -> None:
    prefill, decoder, _ = pair
    assert engines.pull(prefill, decoder, "before").arrived
    worker = decoder.worker()
    kept = [worker._converter, *(converter for _, converter in worker._converter.by_agreement.values())]
    kept += [] if worker._staging is None else [worker._staging, worker._staging.memory]
    dead = [weakref.ref(thing) for thing in kept]
    kept.clear()
    decoder.workers[0].shutdown()
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)
    decoder.workers[0].shutdown()


def test_every_handle_is_released(engines: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """known fault 48"""
    prefill, decoder, _ = pair
    gate = Gate(decoder, monkeypatch, fail_on=9)
    gate.opened.set()
    nixl, made, released = decoder.worker().nixl_wrapper, [], []
    make, release = nixl.make_prepped_xfer, nixl.release_xfer_handle
    monkeypatch.setattr(nixl, "make_prepped_xfer", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    monkeypatch.setattr(nixl, "release_xfer_handle", lambda handle: released.append(handle) or release(handle))
    for turn in range(9):
        local = (9, 10) if turn % 3 == 0 else (4, 6)
        assert engines.pull(prefill, decoder, f"turn-{turn}", remote=(1, 2), local=local).refused == (turn % 3 == 0)
    assert len(made) == 9
    assert sorted(map(id, released)) == sorted(map(id, made))
