"""AJIVE of low-rank views: from their factors, from the dense matrices, and by mvlearn.

    python benchmarks/ajive.py [--mvlearn PYTHON] [--size 1024] [--rank 8] [--views 5]

Views have a planted joint component of half their rank. Checked: the factored form is at least 50 times as fast as the
dense one and equal to it, and, with ``--mvlearn``, to mvlearn's AJIVE, both to 1e-6 of the joint and individual
matrices, which are not zero. mvlearn needs older libraries than fedspan, so it runs under an interpreter of its own:

    python -m venv /tmp/mvlearn
    /tmp/mvlearn/bin/pip install "numpy<2" "scipy<1.14" "scikit-learn<1.5" "matplotlib<3.9" "pandas<2.3" \\
        "seaborn<0.14" joblib
    /tmp/mvlearn/bin/pip install --no-deps mvlearn==0.5.0
    python benchmarks/ajive.py --mvlearn /tmp/mvlearn/bin/python
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedspan.core.alignment import Ajive, compute_ajive

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "claims"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from planted_views import draw_views, time_shortest

from helpers.ajive_parts import compute_individual, lift

TOLERANCE, FASTER = 1e-6, 50.0

PEER = """
import sys, time
import numpy as np
from mvlearn.decomposition import AJIVE

given = np.load(sys.argv[1])
views = [given[f"view{k}"] for k in range(int(given["views"]))]
rank, joint = int(given["rank"]), int(given["joint"])
begin = time.perf_counter()
found = AJIVE(init_signal_ranks=[rank] * len(views), joint_rank=joint)
joints = found.fit_transform(views)
seconds = time.perf_counter() - begin
individual = found.individual_mats_
np.savez(sys.argv[2], seconds=seconds, **{f"joint{k}": one for k, one in enumerate(joints)},
         **{f"individual{k}": one for k, one in enumerate(individual)})
"""


def compute_parts(decomposition: Ajive) -> list[tuple[Tensor, Tensor]]:
    """(J_i, I_i) as dense matrices."""
    return [
        (lift(view, decomposition.compute_joint(number)), lift(view, compute_individual(decomposition, number)))
        for number, view in enumerate(decomposition.views)
    ]


def compute_difference(left: Sequence[tuple[Tensor, Tensor]], right: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest relative difference (Frobenius) over views of J_i and I_i; none of them may be zero."""
    worst = 0.0
    for ours, theirs in zip(left, right, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert other.norm() > 1e-3, "nothing was found"
            worst = max(worst, float((one - other).norm() / other.norm()))
    return worst


def run_mvlearn(
    python: str, dense: Sequence[Tensor], rank: int, joint: int
) -> tuple[float, list[tuple[Tensor, Tensor]]]:
    """Seconds, and J_i and I_i, of mvlearn under another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        input_file, output_file = Path(folder, "given.npz"), Path(folder, "found.npz")
        arrays = {f"view{number}": view.numpy() for number, view in enumerate(dense)}
        np.savez(input_file, views=len(dense), rank=rank, joint=joint, **arrays)
        subprocess.run([python, "-c", PEER, str(input_file), str(output_file)], check=True)
        read = np.load(output_file)
        pairs = [
            (torch.from_numpy(read[f"joint{number}"]), torch.from_numpy(read[f"individual{number}"]))
            for number in range(len(dense))
        ]
        return float(read["seconds"]), pairs


def main() -> None:
    parser = argparse.ArgumentParser(description="AJIVE: factored, dense, mvlearn.")
    parser.add_argument("--mvlearn", metavar="PYTHON", help="an interpreter that has mvlearn")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--views", type=int, default=5)
    args = parser.parse_args()
    joint = args.rank // 2
    for shared in (True, False):
        pairs = draw_views(args.size, args.rank, args.views, shared)
        dense = [pair.to_dense() for pair in pairs]
        # With one projector the small factors are the views, in other coordinates.
        views = [pair.B for pair in pairs] if shared else pairs
        quick, decomposition = time_shortest(
            lambda views=views: compute_ajive(views, joint, args.rank, identifiable=True), 5
        )
        slow, dense_decomposition = time_shortest(
            lambda dense=dense: compute_ajive(dense, joint, args.rank, identifiable=True), 1
        )
        small = compute_parts(decomposition)
        if shared:
            small = [(left @ pair.A, right @ pair.A) for (left, right), pair in zip(small, pairs, strict=True)]
        apart = compute_difference(small, compute_parts(dense_decomposition))
        print(f"{args.views} views of {args.size} x {args.size}, rank {args.rank}, joint rank {joint}, ", end="")
        print("one projector for all" if shared else "a projector each")
        print(f"  factored {quick * 1e3:.2f} ms, dense {slow * 1e3:.0f} ms: {slow / quick:.0f} x; apart by {apart:.1e}")
        assert apart < TOLERANCE, f"the factored form differs by {apart}"
        assert slow / quick >= FASTER, f"only {slow / quick:.0f} times as fast"
        if args.mvlearn:
            seconds, theirs = run_mvlearn(args.mvlearn, dense, args.rank, joint)
            apart = compute_difference(small, theirs)
            print(f"  mvlearn {seconds * 1e3:.0f} ms: {seconds / quick:.0f} x; apart by {apart:.1e}")
            assert apart < TOLERANCE, f"mvlearn differs by {apart}"


if __name__ == "__main__":
    main()
