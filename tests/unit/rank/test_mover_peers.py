"""What a mover knows of its peers: connected, lost, dropped, come back, unfit, and strangers in their name."""

from __future__ import annotations

import pytest

from k3.transfer.local import Fate
from k3.v1 import plan_pb2
from tests.mover_script import ID, LEN, TARGETS, Script, running
from tests.movers import PEER, Net, geometry
from tests.resharding import sharding


def test_after_a_rebuild_the_peer_must_be_connected_again():
    net = Net()
    net.connect()
    net.out[0].tell(rebuild=plan_pb2.RebuildAgent())
    net.start(ID, LEN, TARGETS)
    net.run(0.05)
    (failed,) = net.out[0].heard("failed")
    assert failed.peer_lost
    net.connect()
    running(net, 2)
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_a_dead_receiver_fails_every_transfer_of_its_instance():
    fabric = Script(rest=Fate(delay_s=0.5))
    net = running(Net(fabric=fabric))
    net.start(2, LEN, TARGETS, slot=2)
    net.run(0.05)
    fabric.kill(net.into[1].endpoint.agent_name)
    net.until(lambda: len(net.out[0].heard("quiet")) == 2)
    failed = net.out[0].heard("failed")
    assert {(f.transfer_id, f.reason, f.peer_lost) for f in failed} == {
        (ID, "peer_lost", True),
        (2, "peer_lost", True),
    }


def test_an_instance_that_comes_back_with_new_agents_is_connected_anew():
    fabric = Script()
    net = Net(fabric=fabric)
    net.connect()
    for node in net.into:
        node.tell(rebuild=plan_pb2.RebuildAgent())
    net.turn()
    running(net)
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_a_peer_that_cannot_be_reached_is_reported():
    fabric = Script()
    net = Net(fabric=fabric)
    fabric.kill(net.into[0].endpoint.agent_name)
    net.connect()
    (answer,) = net.out[0].heard("peer_connected")
    assert "gone" in answer.error


def test_a_stranger_cannot_take_the_agents_of_a_connected_peer():
    net = running(Net())
    net.connect("stranger")
    assert all(PEER in node.heard("peer_connected")[-1].error for node in net.out)
    net.until(lambda: all(node.heard("arrived") for node in net.into))
    net.assert_received()


def test_agents_of_a_lost_peer_are_connected_again_once_it_is_forgotten():
    net = running(Net(fabric=Script(rest=Fate(delay_s=0.5))))
    net.run(0.05)
    for node in net.out:
        node.tell(drop_peer=plan_pb2.DropPeer(peer_id=PEER))
    net.turn()
    net.connect("again")
    assert all(node.heard("peer_connected")[-1].error == "" for node in net.out)
    assert all(node.heard("quiet") for node in net.out)


def test_a_geometry_that_does_not_fit_is_reported():
    net = Net(decode=sharding(3, cp=2))
    net.decode = sharding(3)
    net.connect()
    (answer,) = net.out[0].heard("peer_connected")
    assert "announced ranks [0, 1]" in answer.error


@pytest.mark.parametrize(
    ("pages", "slot", "text"),
    [
        (TARGETS[:4], 1, "4 pages for rank 0: the prompt needs 5"),
        ([3, 4, 1, 8, 9], 1, "page 9 for rank 0: the peer has 9"),
        (TARGETS, 3, "state_slot=3: the peer has 3"),
    ],
)
def test_a_destination_outside_the_peer_is_refused(pages, slot, text):
    net = Net()
    net.connect()
    net.start(ID, LEN, pages, slot=slot)
    net.run(0.02)
    (failed,) = net.out[0].heard("failed")
    assert failed.reason == "refused"
    assert text in failed.message
    assert net.out[0].heard("quiet")


def test_an_unknown_peer_is_lost():
    net = Net()
    net.start(ID, LEN, TARGETS)
    net.run(0.02)
    (failed,) = net.out[0].heard("failed")
    assert failed.peer_lost


def test_a_dropped_peer_fails_its_transfers():
    net = running(Net(fabric=Script(rest=Fate(delay_s=0.2))))
    net.run(0.05)
    net.out[0].tell(drop_peer=plan_pb2.DropPeer(peer_id=PEER))
    net.until(lambda: bool(net.out[0].heard("quiet")))
    assert net.out[0].heard("failed")[0].peer_lost


def test_a_peer_dropped_before_its_connection_is_made_is_not_connected():
    net = Net()
    ranks = [node.endpoint for node in net.into]
    for n in range(300):  # more than a mover keeps
        connect = plan_pb2.ConnectPeer(
            peer_id=f"{PEER}#{n}", geometry=geometry(net.decode), ranks=ranks
        )
        for node in net.out:
            node.tell(connect_peer=connect)
            node.tell(drop_peer=plan_pb2.DropPeer(peer_id=f"{PEER}#{n}"))
        net.turn()
    net.connect()
    assert all(node.heard("peer_connected")[-1].error == "" for node in net.out)
    assert all(node.heard("peer_connected")[-1].peer_id == PEER for node in net.out)
