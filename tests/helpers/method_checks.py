"""What every method declares of itself, measured on a watched run of it, whatever its options."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedspan.core.base import BaseUpdate, apply_patch
from fedspan.core.tensors import Tensors, is_extra, join_extra_name, join_tensor_name, split_extras
from fedspan.core.values import Client, Contribution, Job, Reduced
from fedspan.federation.aggregation.reduction import Reducer
from fedspan.federation.serialization import decode, encode
from fedspan.methods.registry import METHODS

from .claim_measures import errors, require_declared_traffic
from .watched_rounds import MethodRun, Round, RunMethod, differences

POLICIES = ("average", "local", "frozen")


def require_exactness(key: str, run_method: RunMethod) -> None:
    """Check that aggregation is exact where the method claims it, and measurably not elsewhere.

    1e-6 is a few roundings of float32 (6e-8 each): of the average, of the products folded into the base.
    """
    run = run_method(key)
    stepped = [round for round in run.rounds if any(local.trained.steps for local in round.trained)]  # no mere probe
    found = [errors(run, round) for round in stepped]
    if METHODS[key].claims.exact:
        assert max(max(layers.values()) for layers in found) < 1e-6
    else:
        assert max(min(layers.values()) for layers in found) > 1e-3


def sends(run: MethodRun) -> str:
    """What wrappers may make of the replies: the claim's own words."""
    values, something = True, False
    for round in run.rounds:
        method, everything = run.federation.method, run.prepared.evaluator.build_job(round.before, None).tensors
        replies = split_messages(round)
        something |= any(replies.values())
        for contribution, reply in ((call.result, dict(call.args[0].tensors)) for call in round.of("contribute")):
            identity = contribution.weight is None and differences(contribution.sum, reply) == []
            values &= method.declare_claims().reduction == "stack" or identity
        for local in round.trained:
            start = local.job.tensors
            values &= all(
                name in start and name in everything and torch.equal(start[name], everything[name])
                for name in replies[local.client]
            )
    return "nothing" if not something else "values" if values else "other"


def split_messages(round: Round) -> dict[str, Tensors]:
    """The target layers' tensors in every client's reply."""
    pairs = zip(round.result.transfers, round.messages(), strict=True)
    return {one.client: split_extras(message.tensors)[0] for one, message in pairs if one.direction == "up"}


def require_new_values(key: str, run_method: RunMethod) -> None:
    """Check that tensors with the names of a job are new values from a common start.

    So a wrapper may send their changes instead, except of the slots that are claimed to be whole.
    """
    run = run_method(key)
    whole = run.federation.method.declare_claims().whole
    checked: set[str] = set()
    for round in run.rounds:
        common = split_extras(run.prepared.evaluator.build_job(round.before, None).tensors)[0]
        started = {local.client: local.job.tensors for local in reversed(round.trained)}  # in the first phase
        for call in round.of("contribute"):
            reply, client = call.args
            for name in reply.tensors.keys() & started.get(client.id, {}).keys() & common.keys():
                is_new_value = torch.equal(started[client.id][name], common[name]) and (
                    call.result.sum.get(name) is reply.tensors[name]
                )
                assert is_new_value != (name.rpartition("/")[2] in whole)
                checked.add(name.rpartition("/")[2])
    assert checked >= set(whole)
    assert bool(checked) == (key not in ("fedask", "local-only", "lora-a2"))  # sketches, nothing, and changes


def require_frozen_tensors(key: str, training: dict[str, object], run_method: RunMethod) -> None:
    """Check that frozen tensors never move.

    Bit for bit, under momentum, weight decay and moments kept from rounds in which they did train.
    """
    run = run_method(key, **({"training": training, "federation": {"rounds": 3}} if training else {}))
    moved: set[str] = set()
    stepped = [local for round in run.rounds for local in round.trained if local.trained.steps]  # no mere probe
    for local in stepped:
        before, after = local.job.tensors, local.trained.tensors
        assert before.keys() == after.keys()
        renewed = (
            {join_tensor_name(layer, "P") for layer in local.job.parametrization} if local.job.refresh else set[str]()
        )
        changed = {name for name in before if not torch.equal(before[name], after[name])} - renewed
        assert changed <= set(local.job.trainable_names)
        moved |= changed
    assert moved == {name for local in stepped for name in local.job.trainable_names}


def require_short_moments(key: str, run_method: RunMethod) -> None:
    """Check that moments do not outlive the factors that they belong to.

    Where factors start again or are turned, two steps a round are all that moments have seen, but for those that the
    job itself hands over.
    """
    run = run_method(key)  # with moments kept
    for round in run.rounds:
        for local in round.trained:
            steps = {name: count for name, count in local.trained.optimizer_state.steps.items() if not is_extra(name)}
            given = {} if local.job.optimizer_state is None else local.job.optimizer_state.steps
            assert steps == {name: 2 + given.get(name, 0) for name in steps}
            assert steps


def require_any_order(key: str, run_method: RunMethod) -> None:
    """Check that a round ends with the same bits in whatever order the replies arrived."""
    run = run_method(key)
    for round in run.rounds[:3]:
        names = {name for call in round.of("build_second_reply") for name in call.result.tensors}
        first, second = list[tuple[Client, Contribution]](), list[tuple[Client, Contribution]]()
        for call in round.of("contribute"):
            (second if names & call.args[0].tensors.keys() else first).append((call.args[1], call.result))
        for numbers in itertools.permutations(range(len(first))):
            reduced = _reduce([first[number] for number in numbers])
            if second:
                means = _reduce([second[number] for number in numbers]).mean
                reduced = replace(reduced, mean={**reduced.mean, **means})
            after = run.federation.method.update(round.before.state, reduced)
            assert differences(after, round.after.state) == []


def _reduce(replies: Sequence[tuple[Client, Contribution]]) -> Reduced:
    """The reduction of contributions that arrive in this order."""
    reducer = Reducer([client for client, _ in replies])
    for client, contribution in replies:
        reducer.add(client.id, contribution)
    return reducer.compute_result()


def require_no_writes(key: str, run_method: RunMethod) -> None:
    """Check that neither the method's functions nor training, a round or an evaluation write to what they are given."""
    run = run_method(key)
    second = ("build_second_order", "build_second_reply") if METHODS[key].claims.second_exchange else ()
    assert {call.function for round in run.rounds for call in round.calls} == {
        *("sync", "start", "finish", "contribute", "update", *second)
    }
    assert run.written == ()


def with_policy(run_method: RunMethod, key: str, policy: str) -> MethodRun:
    """Three of four clients in four rounds; the same run as elsewhere under the policy that the method prefers."""
    return run_method(key) if policy == METHODS[key].claims.extras else run_method(key, model={"extras": policy})


def initial_extras(run: MethodRun) -> dict[str, Tensor]:
    """The extras of the pretrained model."""
    adapted = run.prepared.engine.adapted
    return {join_extra_name(path): adapted.get_extra(path) for path in adapted.extras}


def extras_of(tensors: Tensors) -> dict[str, Tensor]:
    """The extras among these tensors."""
    return split_extras(tensors)[1]


def equal(left: Tensors, right: Tensors) -> bool:
    """Whether both have the same names with the same values."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def shapes(job: Job) -> dict[str, torch.Size]:
    """The shapes of a job's tensors, by name."""
    return {name: value.shape for name, value in job.tensors.items()}


def require_declared_bytes(key: str, policy: str, run_method: RunMethod) -> None:
    """Check that the bytes counted are those sent and those declared.

    Declared for clients that participated in every round before: four bytes a parameter and nothing else.
    """
    require_declared_traffic(with_policy(run_method, key, policy), policy)


def require_extras_policy(key: str, policy: str, run_method: RunMethod) -> None:
    """Check that extras follow their policy.

    Average: the weighted mean. Local: sent once, moved by their client only. Frozen: sent once, never moved.
    """
    run = with_policy(run_method, key, policy)
    initial, own = initial_extras(run), dict[str, Tensors]()
    for round in run.rounds:
        cohort, sent = round.result.cohort, round.messages()
        server, jobs = extras_of(round.before.state.tensors), {local.client: local for local in round.trained}
        trained = {id: extras_of(local.trained.tensors) for id, local in jobs.items()}
        for id in cohort:
            begun = extras_of(jobs[id].job.tensors)
            assert equal(begun, server if policy == "average" else own.get(id, initial))
            for name in initial:
                rests = policy == "frozen" or not jobs[id].trained.steps  # a mere probe moves nothing
                assert torch.equal(begun[name], trained[id][name]) == rests
        own.update(trained)
        answered = [call.args[0] for call in round.of("build_second_reply")]
        answered += [call.result for call in round.of("build_second_reply")]
        for transfer, message in zip(round.result.transfers, sent, strict=True):
            if any(message is second for second in answered):  # a second exchange carries none
                assert not extras_of(message.tensors)
                continue
            first = transfer.direction == "down" and transfer.client not in round.before.last_rounds
            assert bool(extras_of(message.tensors)) == (policy == "average" or first)
        after, shares = extras_of(round.after.state.tensors), run.weights(cohort)
        for name, value in after.items():
            mean = sum(shares[id] * trained[id][name].double() for id in cohort)
            expected = mean if policy == "average" else initial[name].double()
            assert torch.allclose(value.double(), expected, rtol=1e-7, atol=1e-8)


def require_catching_up(key: str, run_method: RunMethod) -> None:
    """Check that a client that was away catches up exactly.

    From its messages alone: the base that it holds plus what it is sent is the server's, and so is its model.
    """
    # At rank 2 two rounds' increments are smaller than the layers: some clients replay them, some are sent the whole.
    run = run_method(key, method={"r": 2, "lora_alpha": 4}, federation={"clients_per_round": 2, "rounds": 6})
    bases: dict[str, BaseUpdate] = dict.fromkeys(run.federation.clients, BaseUpdate())
    away = 0
    for number, round in enumerate(run.rounds):
        state = round.before.state
        everything = run.prepared.evaluator.build_job(round.before, None)
        for id in run.federation.clients:
            client = run.federation.get_client(id, round.before)
            away += client.last_round is not None and client.last_round < number - 1
            message = decode(encode(run.federation.method.sync(state, client)))
            base = apply_patch(bases[id], message.base)
            memory = round.before.load_memory(id)
            job = run.federation.method.start(message, client, memory, number)
            reference = everything
            if shapes(job) != shapes(everything):  # cut to the client's rank: then as a newcomer's
                newcomer = replace(client, last_round=None)
                reference = run.federation.method.start(
                    run.federation.method.sync(state, newcomer), newcomer, {}, state.round
                )
            for layer in run.layers:
                found = run.change(layer.name, base, job.parametrization[layer.name], job.tensors)
                full = reference.parametrization[layer.name]
                expected = run.change(layer.name, state.base, full, reference.tensors)
                assert torch.equal(found, expected)
            assert equal(extras_of(job.tensors), extras_of(everything.tensors))
            if id in round.result.cohort:
                bases[id] = base
    assert away > 3
