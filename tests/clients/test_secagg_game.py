"""A dishonest server and its colluders against real clients: up to the stated bound, no vector is opened alone."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")
pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")

from fedspan.clients.secagg_store import MemorySessionStore, Sum
from fedspan.core.values import Message
from fedspan.federation.serialization import decode, encode
from helpers.secure_game import MODEL, Game, Play, Story, compute_bound, list_attacks, list_lies

ATTACKS = tuple(list_attacks(("a", "b", "c"), 1))


OTHER_MODEL = encode(Message({"layer/A": torch.full((2, 3), 1e-30)}))
"""A model that trains like the other one."""


BOUNDED = [(clients, colluders) for clients in (3, 5, 11) for colluders in range(compute_bound(clients) + 1)]


def test_the_bounds_are_those_of_the_docs() -> None:
    assert {clients: compute_bound(clients) for clients in (3, 4, 5, 10, 11, 101)} == {
        3: 1,
        4: 1,
        5: 2,
        10: 3,
        11: 4,
        101: 34,
    }


def run_attack(name: str, game: Game) -> set[str]:
    """Play an attack, and return whose vectors the server opens."""
    for play in list_attacks(game.honest, len(game.colluders))[name]:
        game.play(play)
    return game.compute_score()


@pytest.mark.parametrize(
    ("clients", "colluders"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == 11 else ()) for case in BOUNDED],
)
@pytest.mark.parametrize("name", ATTACKS)
def test_up_to_the_bound_no_attack_opens_a_vector(name: str, clients: int, colluders: int) -> None:
    game = Game(clients, colluders)
    assert not run_attack(name, game)
    if name == "none":
        assert game.list_sums() == [set(game.honest)]
        assert not game.reasons


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("none", 3),  # the two colluders need no attack: the sum is the vector of the third client
        ("two stories of who survived", 5),
        ("two stories of who survived", 11),
        ("colluders all around", 5),
    ],
)
def test_above_the_bound_the_same_server_opens_the_victim_s_vector(name: str, clients: int) -> None:
    game = Game(clients, compute_bound(clients) + 1, stated=1)
    assert game.honest[0] in run_attack(name, game)


def test_a_bare_majority_withstands_no_colluder() -> None:
    """The owners state none, so they accept what the server sends."""
    game = Game(5, 1, stated=0)
    assert game.honest[0] in run_attack("a threshold of a bare majority", game)


class ForgetfulStore(MemorySessionStore):
    """A store that forgets in which sums shares were revealed."""

    def load_sum(self, client: str, model: str) -> Sum | None:
        return None


@pytest.mark.parametrize(
    ("name", "opened"),
    [
        ("the same model without the victim", 0),
        ("the victim is said to have dropped out in a retry", 0),
        ("another largest weight", -1),
        ("another rank of the victim", 0),
        ("unasked clients are summed again", 0),
    ],
)
def test_clients_that_forget_their_sums_are_told_apart_without_any_colluder(name: str, opened: int) -> None:
    game = Game(7, 0, stores={f"honest-{number:02}": ForgetfulStore() for number in range(7)})
    assert run_attack(name, game) == {game.honest[opened]}


def test_another_model_is_another_sum_and_only_a_fixed_set_of_equal_clients_helps() -> None:
    """The update hardly changes with one bit of the model: here not at all. The docs say so."""
    game = Game(5, 0)
    game.play(Play())
    game.play(Play(Story(unknown=game.honest[:1])), body=OTHER_MODEL)
    assert game.compute_score() == {game.honest[0]}
    fixed = Game(5, 0, min_clients=5)
    fixed.play(Play())
    fixed.play(Play(Story(unknown=fixed.honest[:1])), body=OTHER_MODEL)
    assert not fixed.compute_score()
    assert fixed.list_sums() == [set(fixed.honest)]
    fixed.play(Play(Story(top=len(fixed.honest) + 0.5)), body=OTHER_MODEL)
    assert fixed.compute_score() == {fixed.honest[-1]}, "the heaviest client"


def test_another_encoding_of_a_model_is_refused() -> None:
    """It would have another digest, and its sum would count as that of another model."""
    size = int.from_bytes(MODEL[:8], "little")
    padded = (size + 8).to_bytes(8, "little") + MODEL[8 : 8 + size] + b" " * 8 + MODEL[8 + size :]
    assert decode(padded).tensors.keys() == decode(MODEL).tensors.keys()
    game = Game(5, 0)
    game.play(Play())
    game.play(Play(Story(unknown=game.honest[:1])), body=padded)
    assert not game.compute_score()
    assert "the only encoding of its message that nodes accept" in game.reasons[0]


def test_two_weightings_and_a_colluder_open_no_vector() -> None:
    game = Game(3, 1)
    game.play(Play())
    game.play(Play(Story(weight=1.0)))
    assert not game.compute_score()
    assert game.reasons
    forgetful = Game(3, 1, stores={f"honest-{number:02}": ForgetfulStore() for number in range(2)})
    forgetful.play(Play())
    forgetful.play(Play(Story(weight=1.0)))
    assert forgetful.compute_score() == set(forgetful.honest)


def test_an_attempt_without_shares_may_be_followed_by_one_of_other_clients() -> None:
    game = Game(5, 0)
    game.play(Play(unasked=game.honest))
    game.play(Play(Story(unknown=game.honest[:1])))
    game.play(Play(Story(unknown=game.honest[:1])))
    assert game.list_sums() == 2 * [set(game.honest[1:])]
    assert not game.reasons
    game.play(Play())
    assert len(game.list_sums()) == 2
    assert "has revealed shares in a sum of this model with other clients or other facts" in game.reasons[0]


def play_drawn(data: st.DataObject, clients: int, colluders: int) -> None:
    """Play some sessions, in each of which the server combines some lies."""
    game = Game(clients, colluders)
    lies = st.lists(st.sampled_from(list_lies(game.honest, colluders)), max_size=2)
    for told in data.draw(st.lists(lies, min_size=1, max_size=3)):
        game.play(functools.reduce(lambda play, lie: lie(play), told, Play()))
    assert not game.compute_score()


@pytest.mark.parametrize("clients", [3, 5])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_no_mixture_of_lies_opens_a_vector(clients: int, data: st.DataObject) -> None:
    play_drawn(data, clients, data.draw(st.integers(0, compute_bound(clients))))


@pytest.mark.slow
@pytest.mark.parametrize("clients", [5, 11])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_mixture_of_more_lies_opens_a_vector(clients: int, data: st.DataObject) -> None:
    play_drawn(data, clients, data.draw(st.integers(0, compute_bound(clients))))
