"""One mover's behaviour, seen through commands and statuses: arrival, order, limits, failures, proof of quiet."""

from __future__ import annotations

import pytest

from k3.config.tree import TransferConfig
from k3.transfer.local import Fate
from k3.transfer.outgoing import RAISED_QUIET_S
from k3.transfer.record import Kind, Record
from k3.v1 import plan_pb2, prefill_pb2
from tests.mover_script import ID, LEN, PAGES, TARGETS, Script, running
from tests.movers import Net, Reached
from tests.resharding import sharding


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (sharding(3), sharding(3, cp=2)),
        (sharding(3, pp=3), sharding(3)),
        (sharding(3, tp=4), sharding(3, cp=2, columns=3)),
        (sharding(3, pp=2, tp=2), sharding(3, pp=2, tp=2, cp=2)),
    ],
)
def test_a_transfer_arrives_on_every_rank_byte_for_byte(prefill, decode):
    net = running(Net(prefill=prefill, decode=decode))
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.run(0.1)
    net.assert_received()
    for node in net.out:
        (sent,) = node.heard("sent")
        assert sent.transfer_id == ID
        assert sum(sent.bytes.values()) == node.heard("progress")[-1].bytes_done


def test_a_rank_that_nobody_writes_to_arrives_at_once():
    net = Net(kinds="m", decode=sharding(1, cp=4))
    net.fill(3, [5], [2])
    net.connect()
    net.expect(ID, 3)
    net.turn()
    assert [len(node.heard("arrived")) for node in net.into] == [0, 1, 1, 1]


def test_a_sender_without_anything_to_send_says_so():
    net = Net(kinds="mk", prefill=sharding(2, tp=4), decode=sharding(2))
    net.fill(3, [5], [2])
    net.connect()
    net.start(ID, 3, [2])
    net.copy(ID, first_page=0, pages=[5], last=True, state_slot=2, tokens=3)
    net.until(lambda: all(node.heard("sent") for node in net.out))
    assert [dict(node.heard("sent")[0].bytes).get("latent", 0) > 0 for node in net.out] == [
        True,
        False,
        False,
        False,
    ]


def test_nothing_is_posted_before_the_step_is_complete():
    fabric = Script()
    net = running(Net(fabric=fabric), after_step=5)
    event = Reached(False)
    net.run(0.1)
    assert fabric.n_posted == 0
    assert net.out[0].core.wants_steps
    net.out[0].core.step_done(4, Reached())
    net.out[0].core.step_done(5, event)
    net.run(0.1)
    assert fabric.n_posted == 0
    event.is_reached = True
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_pages_of_several_chunks_are_counted_until_the_last_record():
    net = running(Net(), first_page=0, pages=PAGES[:4], last=False, tokens=16)
    net.run(0.5)
    assert not any(node.heard("arrived") for node in net.into)
    assert not net.out[0].heard("sent")
    net.copy(ID, first_page=4, pages=PAGES[4:], last=True, state_slot=2, tokens=LEN)
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_a_last_copy_without_data_for_a_receiver_still_closes_it():
    net = Net(kinds="m", decode=sharding(1, cp=2))
    net.fill(9, PAGES[:3], TARGETS)
    net.connect()
    net.expect(ID, 9)
    net.start(ID, 9, TARGETS)
    net.copy(ID, first_page=0, pages=PAGES[:2], tokens=8)
    net.copy(ID, first_page=2, pages=PAGES[2:3], last=True, tokens=9)
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_handles_and_bytes_in_flight_are_bounded():
    fabric = Script(rest=Fate(delay_s=0.1))
    config = TransferConfig(handles_in_flight=2, bytes_in_flight=400)
    net = running(Net(config=config, fabric=fabric, decode=sharding(3)))
    net.run(0.02)
    assert fabric.n_posted == 2
    net.until(lambda: bool(net.into[0].heard("arrived")))
    net.assert_received()


def test_an_abort_is_quiet_only_when_posted_writes_have_ended():
    net = running(Net(fabric=Script(rest=Fate(delay_s=1.0))))
    net.run(0.05)
    net.abort(ID)
    net.run(0.5)
    assert not net.out[0].heard("quiet")
    net.until(lambda: bool(net.out[0].heard("quiet")))
    before = net.snapshot()
    net.run(5.0)
    net.assert_unchanged(before)
    assert not net.out[0].heard("sent")
    assert not net.out[0].heard("failed")


def test_an_abort_posts_nothing_more():
    fabric = Script(rest=Fate(delay_s=1.0))
    net = running(Net(fabric=fabric, config=TransferConfig(handles_in_flight=1)))
    net.run(0.05)
    n_posted = fabric.n_posted
    net.abort(ID)
    net.until(lambda: bool(net.out[0].heard("quiet")))
    assert fabric.n_posted == n_posted


def test_an_abort_that_overtakes_its_start_keeps_it_from_starting():
    net = Net()
    net.connect()
    net.abort(ID)
    net.start(ID, LEN, TARGETS)
    net.run(0.05)
    (failed,) = net.out[0].heard("failed")
    assert failed.reason == "refused"
    assert len(net.out[0].heard("quiet")) == 2


def test_an_abort_of_a_finished_transfer_is_quiet_at_once():
    net = running(Net())
    net.until(lambda: bool(net.out[0].heard("sent")))
    net.abort(ID)
    net.abort(ID)
    net.turn()
    assert len(net.out[0].heard("quiet")) >= 1


def test_a_stalled_write_fails_its_transfer_and_then_costs_the_agent():
    config = TransferConfig(handle_deadline_s=2.0, drain_s=3.0)
    fabric = Script(Fate(stalls=True))
    net = running(Net(config=config, fabric=fabric))
    old = net.out[0].endpoint.agent_name
    net.until(lambda: bool(net.out[0].heard("failed")), 2.5)
    assert net.out[0].heard("failed")[0].reason == "stalled"
    assert not net.out[0].heard("quiet")
    net.start(2, LEN, TARGETS, slot=2)
    net.until(lambda: bool(net.out[0].heard("quiet")), 3.5)
    assert net.out[0].endpoint.agent_name != old
    assert {failed.transfer_id for failed in net.out[0].heard("failed")} == {ID, 2}
    assert {quiet.transfer_id for quiet in net.out[0].heard("quiet")} == {ID, 2}
    before = net.snapshot()
    fabric.resume()
    net.run(2.0)
    net.assert_unchanged(before)


def test_a_failed_write_is_posted_again_with_the_same_number():
    net = running(Net(fabric=Script(Fate(fails=True), Fate(fails=True))))
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_a_write_that_keeps_failing_loses_the_peer():
    net = running(Net(fabric=Script(rest=Fate(fails=True))))
    net.until(lambda: bool(net.out[0].heard("quiet")))
    (failed,) = net.out[0].heard("failed")
    assert failed.peer_lost
    assert "posted 3 times" in failed.message


def test_a_lost_record_is_missed_and_sent_again_without_bytes():
    fabric = Script(Fate(loses_record=True))
    net = running(Net(fabric=fabric, decode=sharding(3), config=TransferConfig(resend_after_s=5.0)))
    net.until(lambda: bool(net.out[0].heard("sent")))
    net.run(4.0)
    assert not net.into[0].heard("missing")
    net.until(lambda: bool(net.into[0].heard("missing")), 2.0)
    n_posted = fabric.n_posted
    (missing,) = net.into[0].heard("missing")
    assert [(m.sender, m.receiver, list(m.seqs)) for m in missing.missing] == [(0, 0, [0])]
    resend = plan_pb2.ResendTransferRecords(transfer_id=ID, missing=missing.missing)
    net.out[0].tell(resend=resend)
    net.until(lambda: bool(net.into[0].heard("arrived")), 1.0)
    assert fabric.n_posted == n_posted
    net.assert_received()


def test_records_are_not_sent_again_while_bytes_are_on_their_way():
    net = running(Net(fabric=Script(rest=Fate(delay_s=1.0)), decode=sharding(3)))
    net.run(0.05)
    missing = [prefill_pb2.MissingRecords(sender=0, receiver=0)]
    net.out[0].tell(resend=plan_pb2.ResendTransferRecords(transfer_id=ID, missing=missing))
    net.run(0.5)
    assert not net.into[0].heard("arrived")
    net.until(lambda: bool(net.into[0].heard("arrived")))
    net.assert_received()


def test_asking_an_ending_transfer_for_records_does_not_make_it_quiet():
    net = running(Net(fabric=Script(rest=Fate(delay_s=1.0)), decode=sharding(3)))
    net.run(0.05)
    net.abort(ID)
    missing = [prefill_pb2.MissingRecords(sender=0, receiver=0)]
    net.out[0].tell(resend=plan_pb2.ResendTransferRecords(transfer_id=ID, missing=missing))
    net.run(0.5)
    assert not net.out[0].heard("quiet")
    net.until(lambda: bool(net.out[0].heard("quiet")))


def test_foreign_records_are_dropped_and_counted():
    net = running(Net(decode=sharding(3)))
    name = net.into[0].endpoint.agent_name
    good = Record(Kind.LAST, 0, ID, 7, 0, 1, LEN)
    foreign = [
        b"nonsense",
        Record(Kind.LAST, 0, 1, 7, 0, 1, LEN).pack(),  # unknown transfer
        Record(Kind.LAST, 0, ID, 8, 0, 1, LEN).pack(),  # another nonce
        Record(Kind.LAST, 5, ID, 7, 0, 1, LEN).pack(),  # nobody expects this sender
    ]
    net.turn()
    net.fabric.agents[name].inbox += foreign
    net.until(lambda: bool(net.into[0].heard("arrived")))
    net.fabric.agents[name].inbox.append(good.pack())
    net.run(1.5)
    assert len(net.into[0].heard("arrived")) == 1
    assert net.into[0].heard("heartbeat")[-1].fenced_records == 4


def test_a_forgotten_transfer_makes_its_records_foreign():
    net = running(Net(decode=sharding(3), fabric=Script(rest=Fate(delay_s=0.2))))
    net.run(0.05)
    net.into[0].tell(abort=plan_pb2.AbortTransfer(transfer_id=ID))
    net.until(lambda: bool(net.out[0].heard("sent")))
    net.run(2.5)
    assert not net.into[0].heard("arrived")
    assert net.into[0].heard("heartbeat")[-1].fenced_records > 0


def test_an_idle_mover_sleeps_until_its_next_heartbeat():
    net = Net()
    assert net.out[0].core.sleep_s(net.now) > 0.9
    net.expect(ID, LEN)
    net.turn()
    assert net.into[0].core.sleep_s(net.now) <= 0.002


def test_records_of_a_long_prompt_are_looked_for_less_often_until_a_younger_one_waits():
    net = Net()
    net.expect(ID, LEN)
    net.turn()
    core = net.into[0].core
    assert core.sleep_s(net.now + 0.5) == pytest.approx(0.005)
    assert core.sleep_s(net.now + 0.9) == pytest.approx(0.009)
    assert core.sleep_s(net.now + 0.99) <= 0.010
    net.run(0.5)
    net.expect(ID + 1, LEN)
    net.turn()
    assert core.sleep_s(net.now) <= 0.002


def test_a_heartbeat_comes_every_second_and_counts_zombies():
    net = running(Net(fabric=Script(rest=Fate(delay_s=3.0)), decode=sharding(3)))
    net.run(0.05)
    net.abort(ID)
    net.run(2.2)
    beats = net.out[0].heard("heartbeat")
    assert len(beats) == 2
    assert beats[-1].zombie_handles == 3


def test_a_write_to_gpu_memory_that_raised_keeps_the_transfer_from_being_complete_at_once():
    fabric = Script(Fate(fails=True))
    net = running(Net(fabric=fabric, memory="VRAM"))
    net.run(RAISED_QUIET_S - 0.5)
    n_sent = sum(len(node.heard("sent")) for node in net.out)
    assert n_sent == len(net.out) - 1, "its bytes may still land, over newer ones"
    net.run(1.5)
    assert all(node.heard("sent") for node in net.out)
    net.assert_received()
