"""Bounds on connections that have not sent an accepted request, and on those of one node."""

from __future__ import annotations

import pytest

connections = pytest.importorskip(
    "fedspan.transports.flower.connections", reason="the extra fedspan[flower] is not installed"
)


class Connection:
    """A connection that remembers whether it was closed."""

    def __init__(self) -> None:
        self.allowance: int | None = 0
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_addresses_have_few_connections_without_an_accepted_request() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_address=2, total=3))
    one, other, third = ("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.1", 3)
    assert made.add(one, Connection())
    assert made.add(other, Connection())
    assert not made.add(third, Connection())
    assert made.add(("192.0.2.2", 1), Connection())
    made.accept(one, b"node", 5)
    assert not made.is_pending(one)
    assert made.add(third, Connection())
    made.remove(other)
    made.remove(third)
    assert made.add(other, Connection())


def test_the_oldest_connection_of_the_fullest_address_makes_room_for_another_address() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_address=2, total=3))
    full = [Connection(), Connection()]
    for port, connection in enumerate(full):
        assert made.add(("192.0.2.1", port), connection)
    assert made.add(("192.0.2.2", 1), Connection())
    assert made.add(("192.0.2.3", 1), Connection())
    assert [one.aborted for one in full] == [True, False]
    assert not made.is_pending(("192.0.2.1", 0))


def test_a_node_s_oldest_connection_is_closed_for_a_new_one() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_sender=2))
    own = {("192.0.2.1", port): Connection() for port in range(3)}
    for client, connection in own.items():
        assert made.add(client, connection)
        made.accept(client, b"node", 10)
        made.accept(client, b"node", 20)
        assert connection.allowance == 20
    assert [one.aborted for one in own.values()] == [True, False, False]
    foreign = Connection()
    made.add(("192.0.2.1", 9), foreign)
    made.accept(("192.0.2.1", 9), b"another node", 10)
    assert not foreign.aborted


def test_the_operator_s_connections_are_not_bounded() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_sender=1))
    own = {("127.0.0.1", port): Connection() for port in range(4)}
    for client, connection in own.items():
        made.add(client, connection)
        made.accept(client, b"operator", None)
    assert not any(one.aborted for one in own.values())


def test_what_is_not_registered_is_ignored() -> None:
    made = connections.Connections()
    made.accept(("192.0.2.1", 1), b"node", 1)
    made.accept(None, b"node", 1)
    made.remove(("192.0.2.1", 1))
    assert not made.is_pending(("192.0.2.1", 1))
