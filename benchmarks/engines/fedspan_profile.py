"""What a round of the batched engine spends its time on, by kinds of operators, and how many floating-point operations
its products of matrices are; one JSON line about both.

python fedspan_profile.py CONFIG.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from peers_answers import Answers
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fedspan.config import parse_config
from fedspan.runs.setup import prepare

KINDS = {
    "products with weights": ("addmm", "mm"),
    "batched products: factors, attention": ("bmm", "baddbmm"),
    "GELU": ("gelu", "gelu_backward"),
    "softmax": ("_softmax", "_softmax_backward_data"),
    "layer norms": ("native_layer_norm", "native_layer_norm_backward"),
    "moving and copying": ("index_select", "index_fill_", "index", "cat", "copy_", "stack", "clone", "fill_"),
    "sums and scalings": ("add", "add_", "mul", "mul_", "div", "sub_", "sum", "neg"),
    "optimizer": ("_fused_adamw_",),
}


def main() -> None:
    """Profile the third round: the first ones measure, and fill caches."""
    answers = Answers()
    prepared = prepare(parse_config(json.loads(Path(sys.argv[1]).read_text())))
    federation = prepared.federation
    progress = federation.begin()
    for _ in range(2):
        progress = federation.run_round(progress).progress
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        federation.run_round(progress)
        seconds_in_all = time.perf_counter() - began  # without what the profiler does at its end
    names = {f"aten::{name}": kind for kind, operations in KINDS.items() for name in operations}
    seconds = dict.fromkeys([*KINDS, "other operators"], 0.0)
    for event in profiler.key_averages():
        seconds[names.get(event.key, "other operators")] += event.self_cpu_time_total / 1e6
    seconds["outside of operators"] = seconds_in_all - sum(seconds.values())
    with FlopCounterMode(display=False) as counter:  # in this thread only: there is one worker
        federation.run_round(progress)
    examples = sum(len(client_data.train) for client_data in federation.clients.values())
    milliseconds = {kind: 1000 * spent / examples for kind, spent in seconds.items()}
    answers.say(milliseconds=milliseconds, operations=counter.get_total_flops() / examples)


if __name__ == "__main__":
    main()
