"""Ten failures that users of other systems met, as ten tests. Each is tried where the failure would live."""

import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_jax.core.outer import OuterConfig
from diloco_jax.protocol import messages
from diloco_jax.protocol.effects import Drop
from diloco_jax.protocol.learner.machine import RECOVERING, TRAINING
from diloco_jax.protocol.messages import SYNCER, Adopted, FragmentValue, GlobalFragment, Heartbeat, StepReport
from diloco_jax.protocol.pacing import ProtocolConfig
from diloco_jax.protocol.syncer.machine import Syncer
from diloco_jax.protocol.watch.health import conditions
from diloco_jax.runtime.syncer.snapshots import Snapshot, TapeExtent, read_snapshot, write_snapshot
from diloco_jax.tools.chaos.relay import Relay
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.endpoints.grpc_link import GrpcListener
from diloco_jax.transport.link import TransportConfig
from diloco_jax.transport.proto import diloco_pb2 as pb
from tests.limits import HANGS_S
from tests.protocol.pair import Pair
from tests.runtime.models import gradient, make_model, merge
from tests.sockets import listening


@pytest.mark.parametrize("recovers", [False, True])
def test_1_fresh_worker_alone_never_overwrites_global_state(recovers: bool) -> None:
    """Elsewhere: after everybody had died, a freshly initialised worker formed a quorum alone and its weights won."""
    pair = Pair(quorum=1, sync_every=4, num_fragments=4, recover_from_peers=recovers)
    pair.join("a", "b")
    pair.rounds(9, "a", "b")
    made = list(pair.driver.values)
    assert min(value.version for value in made) > 0
    pair.crash("a", "b")
    pair.held = {"fresh:GlobalFragment"}
    pair.join("fresh")
    pair.step("fresh")
    assert pair.learners["fresh"].local_step == 0, "it may not even make a step with its own parameters"
    pair.wait(60.0)
    assert pair.messages(StepReport, "fresh") == [] and pair.messages(FragmentValue, "fresh") == []
    assert pair.driver.values == made, "a quorum of one that holds nothing moves nothing"
    pair.held = set()
    pair.deliver()
    pair.rounds(4, "fresh")
    values = pair.messages(FragmentValue, "fresh")
    assert values and all(value.base_version > 0 for value in values), "what it sends is measured against global values"
    for value in values:
        assert value.base_version in {made[value.fragment_id].version, *(v.global_step for v in values)}


def test_1_a_forged_report_of_a_fresh_worker_does_not_count() -> None:
    pair = Pair(quorum=1)
    pair.join("a")
    pair.rounds(3, "a")
    pair.crash("a")
    pair.held = {"fresh:GlobalFragment"}
    pair.join("fresh")
    before = pair.syncer.global_step
    nothing = (Adopted(), Adopted())
    pair.arrive("fresh", SYNCER, StepReport("fresh", 1, 1, 10, 0, nothing, 1.0, 2.5, 2, 128))
    pair.arrive("fresh", SYNCER, FragmentValue("fresh", 1, before + 1, 0, 1, 1, 10, 0, 2, 0))
    assert pair.syncer.global_step == before and pair.syncer.membership.live == 0
    assert pair.drops()[-1] == f"value for round {before + 1} came late or was not asked for"


BITS_10M = 10e6 / 8
TRANSPORT = TransportConfig(payload_bytes_max=1 << 24, chunk_bytes=1 << 16)


@pytest.fixture
def listener() -> Iterator[GrpcListener]:
    made = grpc_link.listen(TRANSPORT, run_id="run")
    yield made
    made.close(1.0)


@pytest.mark.net
def test_2_bulk_on_a_10_mbit_link_does_not_starve_heartbeats(listener: GrpcListener) -> None:
    """Elsewhere: heartbeats queued behind parameters on a slow link, and healthy workers were expelled."""
    # The link needs 2.5 s for this payload.
    payload = np.random.default_rng(0).bytes(3 << 20)
    with Relay(listener.address) as relay:
        relay.change(bytes_per_s=BITS_10M)
        config = dataclasses.replace(TRANSPORT, address=relay.address)
        link = grpc_link.connect(config, run_id="run", learner_id="a", incarnation=0)
        link.send(FragmentValue("a", 0, 1, 0, 9, 9, 9, 0, 9, len(payload)), payload)
        beats = 50
        for _ in range(beats):
            link.send(Heartbeat("a", 0))
        heard: list[Any] = []
        while not any(isinstance(message, FragmentValue) for message in heard):
            delivery = listener.receive(HANGS_S)
            assert delivery is not None and delivery.kind == "message", delivery
            heard.append(delivery.message)
        assert len(heard) == beats + 1, "every beat overtakes the payload"
        link.close(0.0)


def test_2_a_learner_whose_value_takes_longer_than_the_lease_stays_alive() -> None:
    pair = Pair(quorum=2, silence_s=20.0, heartbeat_s=5.0, pull_timeout_s=1000.0)
    pair.join("a", "slow")
    pair.wait(1.0)
    pair.held = {"slow:FragmentValue"}
    pair.step("a", "slow")
    pair.wait(100.0)  # five leases
    assert pair.notes("silent") == [] and pair.notes("disconnected") == []
    pair.held = set()
    pair.deliver()
    assert pair.contributors() == [("a", "slow")]


PARTS = 9


@pytest.mark.parametrize("arrived", range(PARTS + 1))
def test_3_donor_dies_while_a_learner_recovers(arrived: int) -> None:
    """Elsewhere: live recovery broke for good when the donor left in the middle. Here: after any number of parts."""
    pair = Pair(recover_from_peers=True, state_parts=PARTS, quorum=1, sync_every=4, num_fragments=2)
    pair.join("a", "b", "c")
    pair.rounds(2, "a", "b", "c")
    pair.held = {"a:StateChunk"}
    pair.join("new")
    for _ in range(min(arrived, PARTS)):
        pair.let_pass("a:StateChunk")
    assert (pair.learners["new"].state == TRAINING) == (arrived == PARTS)
    pair.crash("a")
    pair.step("new")
    assert pair.learners["new"].local_step == 1, f"it is {pair.learners['new'].state}"
    # All chunks come from one donor; drivers.py checks that.
    givers = [note.members[1] for note in pair.notes("recovered")]
    assert givers == (["a"] if arrived == PARTS else ["b"])
    assert all(not driver.states for driver in pair.drivers.values() if driver.name != "a"), "copies are freed"


def test_3_every_donor_dies_in_turn_and_the_last_one_left_continues_from_the_syncer() -> None:
    pair = Pair(recover_from_peers=True, state_parts=PARTS, quorum=1, recovery_attempts=10)
    pair.join("a", "b")
    pair.rounds(3, "a", "b")
    pair.held = {"a:StateChunk", "b:StateChunk"}
    pair.join("new")
    for donor in ("a", "b"):
        pair.let_pass(f"{donor}:StateChunk")
        assert pair.learners["new"].state == RECOVERING
        pair.crash(donor)
        pair.wait(30.0)
    pair.step("new")
    assert pair.learners["new"].local_step == 1
    assert [a.version for a in pair.learners["new"].adopted] == pair.syncer.versions


def test_4_merge_fails_and_nothing_is_committed() -> None:
    """Elsewhere: the all-reduce failed, the commit went through, and replicas continued with different weights."""
    pair = Pair(quorum=2, strikes_max=100)
    pair.join("a", "b")
    pair.rounds(2, "a", "b")
    values, versions = list(pair.driver.values), list(pair.syncer.versions)
    merged_rounds, global_step = pair.syncer.merged_rounds, pair.syncer.global_step
    sent = len(pair.messages(GlobalFragment))
    pair.poisoned = {"a", "b"}
    pair.rounds(1, "a", "b")
    assert [note.reason for note in pair.notes("abandoned")] == ["no value was usable"]
    assert (pair.driver.values, pair.syncer.versions) == (values, versions)
    assert (pair.syncer.merged_rounds, pair.syncer.global_step) == (merged_rounds, global_step + 1)
    assert len(pair.messages(GlobalFragment)) == sent, "nobody hears of a version that does not exist"
    pair.poisoned = set()
    pair.rounds(2, "a", "b")
    assert pair.syncer.versions > versions, "the steps of the failed round count in the next"
    pair.check_bits()


def test_4_a_merge_without_a_usable_value_leaves_model_and_momentum_alone() -> None:
    model, calm = make_model(OuterConfig(momentum=0.9)), make_model(OuterConfig(momentum=0.9))
    for one in (model, calm):
        merge(one, 1, {"a": gradient(one, 0, 1)})
    broken = np.full(len(gradient(model, 0, 2)) // 4, np.nan, np.float32).tobytes()
    failed = merge(model, 2, {"a": broken, "b": b"torn"})
    assert failed.state is None and failed.excluded.keys() == {"a", "b"}
    assert model.payload(0) == calm.payload(0)
    for one in (model, calm):
        merge(one, 3, {"a": gradient(one, 0, 3)})
    assert model.payload(0) == calm.payload(0), "nor is anything left of it in the next round"


@pytest.mark.parametrize("tau", [1, 2, 4])
def test_5_fragments_seen_in_a_different_order(tau: int) -> None:
    """Elsewhere: replicas visited fragments in different orders and waited for each other forever."""
    pair = Pair(quorum=2, sync_every=4, num_fragments=4, overlap_steps=tau, resend_s=1000.0)
    pair.join("a", "b")
    for _ in range(6):
        pair.held = {"b:PullRequest", "b:GlobalFragment"}
        # As many rounds wait for b as possible.
        pair.rounds(tau, "a", "b")
        # b gets the requests, and then the results, in reverse order.
        while pair.wire:
            under_way = list(pair.wire)
            pair.wire.clear()
            for item in reversed(under_way):
                pair.arrive(*item)
        pair.held = set()
        told = pair.messages(GlobalFragment, "b")
        newest = {p: max(m.version for m in told if m.fragment_id == p) for p in range(4)}
        assert {p: a.version for p, a in enumerate(pair.learners["b"].adopted)} == newest, "adopted in any order"
    asked, answered = (
        {m.global_step for m in pair.messages(kind, "b")} for kind in (messages.PullRequest, FragmentValue)
    )
    assert asked == answered and len(asked) >= 6 * tau - 4, "answered in any order"
    assert all(names == ("a", "b") for names in pair.contributors()), "and merged"
    pair.check_bits()


@pytest.mark.parametrize("outer", [OuterConfig(momentum=0.9), OuterConfig(optimizer="adam")])
def test_6_outer_momentum_is_in_the_snapshot(tmp_path: Path, outer: OuterConfig) -> None:
    """Elsewhere: the outer optimizer's state was not saved, and every resume began with momentum zero."""
    model, other = make_model(outer), make_model(outer)
    for step in range(1, 5):
        merge(model, step, {"a": gradient(model, step % 2, step)}, step % 2)
    machine = Syncer(ProtocolConfig(sync_every=2, num_fragments=2), 100)
    snapshot, capture = Snapshot(4, json.dumps(machine.state()), 0, 0, {}, 0.0), model.capture()
    states = [capture.state(number) for number in range(2)]
    assert any(np.any(moment) for state in states for moment in state.outer.values()), "there is something to lose"
    path = write_snapshot(tmp_path, "run", model, capture, snapshot, keep=1)
    read_snapshot(path, other, TapeExtent(tmp_path / "tape.jsonl", 0))
    for one in (model, other):
        merge(one, 5, {"a": gradient(one, 1, 77)}, 1)
    assert other.payload(1) == model.payload(1), "the next round comes out bit for bit"


def late(pair: Pair, round_: int, fragment_id: int, incarnation: int = 1) -> str:
    """A value for a round that is over arrives; why it is dropped."""
    before = (list(pair.driver.values), pair.syncer.progress.merged_parts)
    pair.arrive("b", SYNCER, FragmentValue("b", incarnation, round_, fragment_id, 2, 2, 20, 0, 4, 0))
    assert (list(pair.driver.values), pair.syncer.progress.merged_parts) == before, "it changed something"
    assert isinstance(pair.history[-1][0], Drop), pair.history[-1]
    return pair.drops()[-1]


def test_7_late_report_after_its_round_closed() -> None:
    """Elsewhere: a worker that came back wrote into a generation that was closed already."""
    pair = Pair(quorum=2, pull_timeout_s=8.0, silence_s=1000.0)
    pair.join("a", "b")
    pair.rounds(1, "a", "b")
    pair.held = {"b:FragmentValue"}
    pair.rounds(1, "a", "b")
    round_, fragment_id = pair.syncer.global_step, pair.syncer.rounds.turns.due(pair.syncer.global_step)
    # The round was given up without b.
    pair.wait(8.0)
    assert pair.contributors()[-1] == ("a",)
    words = f"value for round {round_} came late or was not asked for"
    assert late(pair, round_, fragment_id) == words
    assert late(pair, round_, fragment_id) == words, "and again"
    assert late(pair, 1, fragment_id) == "value for round 1 came late or was not asked for", "long over"
    pair.held = set()
    pair.lose_wire("b")
    pair.restart_syncer()
    pair.connect("a", "b")
    assert late(pair, round_, fragment_id) == words, "of an earlier epoch of the syncer"
    pair.join("b", incarnation=2)
    assert late(pair, round_, fragment_id, incarnation=1) == "FragmentValue before hello, or of an old incarnation"
    before = pair.syncer.membership.members["b"].local_step
    pair.arrive("b", SYNCER, StepReport("b", 1, 99, 990, 0, (Adopted(0),) * 2, 1.0, 2.5, 2, 128))
    assert pair.syncer.membership.members["b"].local_step == before, "nor does the old incarnation's report count"


CHILD = """
import sys
from diloco_jax.protocol.messages import Heartbeat
from diloco_jax.transport.endpoints import grpc_link
from diloco_jax.transport.link import TransportConfig
link = grpc_link.connect(TransportConfig(address=sys.argv[1]), run_id="run", learner_id="a", incarnation=0)
link.send(Heartbeat("a", 0))
link.receive(60)
"""


@pytest.mark.net
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux' /proc")
def test_8_no_island_advertises_an_address(listener: GrpcListener) -> None:
    """Elsewhere: peers told each other 127.0.0.1, or the address of the slow network card.

    Here islands only dial out, to one address that a person wrote down: nothing listens, no message has an address.
    """
    assert listening(os.getpid()), "the syncer does, and the test can see it"
    child = subprocess.Popen([sys.executable, "-c", CHILD, listener.address], cwd=os.getcwd())
    try:
        delivery = listener.receive(HANGS_S)
        assert delivery is not None and isinstance(delivery.message, Heartbeat), delivery
        assert listening(child.pid) == []
    finally:
        child.kill()
        child.wait()
    for kind in (*typing.get_args(messages.LearnerMessage), *typing.get_args(messages.SyncerMessage)):
        assert not {"address", "host", "port", "url"} & set(kind._fields), kind
    # The host of this field is a number.
    fields = pb.Header.DESCRIPTOR.fields_by_name
    assert {name for name in fields if isinstance(getattr(pb.Header(), name), str)} == {"run", "run_id", "sender"}


def test_9_first_compile_takes_longer_than_the_lease() -> None:
    """Elsewhere: a worker that compiled for minutes was declared dead, restarted, and compiled again."""
    pair = Pair(quorum=1, total_steps=1000, silence_s=20.0, heartbeat_s=5.0, release_s=30.0)
    pair.join("a")
    pair.rounds(3, "a")
    pair.join("compiles")
    for _ in range(100):
        # The waits take ten minutes in all.
        pair.wait(6.0)
        pair.step("a")
    assert pair.notes("silent") == [] and pair.notes("disconnected") == [] and pair.notes("released") == []
    (condition,) = [c for c in conditions(pair.syncer, pair.now_s) if c.learner_id == "compiles"]
    assert condition.condition == "joining" and pair.now_s - condition.since_s > 10 * pair.config.silence_s
    assert len(pair.merges()) > 100, "nobody waited for it"
    pair.step("compiles", step_s=600.0)
    assert pair.syncer.membership.members["compiles"].state == "active"
    pair.rounds(1, "compiles", "a")
    assert any("compiles" in names for names in pair.contributors()[-2:])


def test_10_an_island_that_is_alive_but_never_merged_raises_an_alarm() -> None:
    """Elsewhere: half of the islands were alive, and none of their work was in the model; nobody noticed."""
    pair = Pair(quorum=1, unmerged_rounds_max=10, pull_timeout_s=2.0, silence_s=20.0, heartbeat_s=5.0)
    pair.join("a", "b")
    # b steps, reports and sends heartbeats; its values never arrive.
    pair.held = {"b:FragmentValue"}
    for _ in range(40):
        pair.wait(3.0)
        pair.step("a", "b")
    assert pair.syncer.membership.members["b"].state == "active" and pair.notes("silent") == []
    assert not any("b" in names for names in pair.contributors())
    assert [note.members for note in pair.notes("unmerged")] == [("b",)], "one alarm, not one per round"
    a, b = conditions(pair.syncer, pair.now_s)
    assert (a.learner_id, a.condition, b.learner_id, b.condition) == ("a", "training", "b", "unanswered")
    assert "requests for a value in time" in b.reason
    pair.held = set()
    pair.lose_wire("b")
    # It is asked in every 32nd round by now.
    for _ in range(32):
        pair.wait(3.0)
        pair.step("a", "b")
    assert {c.condition for c in conditions(pair.syncer, pair.now_s)} == {"training"}, "its work arrives again"
