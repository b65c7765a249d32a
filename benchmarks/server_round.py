"""Seconds of the server's part of one round, by method, on random replies in the shape of a large model's adapter.

    python benchmarks/server_round.py --threads 2
    python benchmarks/server_round.py --method flexlora --layers 16 --clients 10

The default shape is LoRA of rank 8 on 128 layers of 4096 x 4096 (Llama-2-7B's attention) with 50 replies. Counted are
``contribute`` of every reply, the reduction and ``update``; no training, no network. Beside the wall clock stands the
processor time over the number of threads: what the round takes on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import time

import torch

from fedspan.core.tensors import generator
from fedspan.core.values import Client, LayerSpec, Message, Spec
from fedspan.engines.reduction import Reducer
from fedspan.methods.registry import METHODS


class _Weights:
    """A pretrained model whose weights all have the same few singular values: only its shape matters here."""

    def __init__(self, size: int) -> None:
        self.size = size

    def weight(self, layer: str) -> torch.Tensor:
        return torch.eye(self.size)

    def extra(self, parameter: str) -> torch.Tensor:
        raise KeyError(parameter)


def seconds(key: str, layers: int, size: int, rank: int, clients: int) -> tuple[float, float]:
    """One server round: wall clock and processor time."""
    spec = Spec(tuple(LayerSpec(f"layer{i:03d}", size, size) for i in range(layers)), clients=clients)
    options = {"singular": "randomized"} if "singular" in METHODS[key].__dataclass_fields__ else {}
    method = METHODS[key](spec=spec, r=rank, **options)
    state = method.init(_Weights(size))
    cohort = [Client(f"c{i:03d}", rank, method.scaling(None), 10 + i, 10.0 + i) for i in range(clients)]
    job = method.start(method.sync(state, None), None, {})
    replies = [
        Message(
            {
                name: 0.01 * torch.randn(job.tensors[name].shape, generator=generator(0, client.id, name))
                for name in job.trainable_names
            }
        )
        for client in cohort
    ]
    begun, busy = time.perf_counter(), time.process_time()
    reducer = Reducer(cohort)
    for client, reply in zip(cohort, replies, strict=True):
        reducer.add(client.id, method.contribute(reply, client))
    method.update(state, reducer.result())
    return time.perf_counter() - begun, time.process_time() - busy


def main() -> None:
    """Print one line a method."""
    parser = argparse.ArgumentParser(description=__doc__)
    adapters = [key for key, cls in METHODS.items() if cls.claims.adapter and not cls.claims.personal]
    parser.add_argument("--method", nargs="*", default=adapters)
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for key in args.method:
        wall, busy = seconds(key, args.layers, args.size, args.rank, args.clients)
        print(f"{key:<14} {wall:7.2f} s by the clock, {busy / args.threads:7.2f} s of each thread", flush=True)


if __name__ == "__main__":
    main()
