"""FedLoRU's theorem 4.2: the rate of the factors' gradients on a smooth problem. Takes a minute.

Client k: f_k(W) = ||W - W*_k||^2 / 2 (so L = 1), gradients with Gaussian noise; step size eta_0 T^(-1/2). Shapes:
S seeds and K clients side by side, W (M, N) = W_t + A B, A (M, R).
"""

import argparse

import numpy as np
import torch

from evidence.claims import report
from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import compare_pairs

M, N, R, K, STEPS, NOISE, DRIFT, ETA = 20, 12, 2, 8, 5, 1.0, 1.0, 1.0
ROUNDS = (128, 512, 2048)


def run(seeds: int, rounds: int, period: int, participants: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run Algorithm 1; ``period`` is its tau.

    Returns:
        The mean over rounds of the left side of (81), that over its right side, and the last ||grad_W f||^2 over the
        first, each (S,).
    """
    draw, eta = create_generator(0, "rate", seeds, rounds, period, participants), ETA / rounds**0.5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((seeds, *shape), generator=draw, dtype=torch.float64)

    targets = normal(1, M, N) / N**0.5 + DRIFT * normal(K, M, N) / (M * N) ** 0.5
    W, A, B = (
        torch.zeros(seeds, 1, M, N, dtype=torch.float64),
        normal(1, M, R) / M**0.5,
        torch.zeros(seeds, 1, R, N).double(),
    )
    goal, left = targets.mean(1, keepdim=True), torch.zeros(seeds, dtype=torch.float64)
    first, largest = (W - goal).square().sum((1, 2, 3)), torch.zeros(3, seeds, dtype=torch.float64)
    for number in range(rounds):
        error = W + A @ B - goal
        left += ((error @ B.mT).square().sum((1, 2, 3)) + (A.mT @ error).square().sum((1, 2, 3))) / rounds
        chosen = torch.randperm(K, generator=draw)[:participants]
        A_k, B_k = A.expand(-1, participants, -1, -1), B.expand(-1, participants, -1, -1)
        for _ in range(STEPS):
            exact = W + A_k @ B_k - targets[:, chosen]
            gradient = exact + NOISE * normal(participants, M, N) / (M * N) ** 0.5
            norms = [one.square().sum((2, 3)).amax(1) for one in (A_k, B_k, exact)]
            largest = torch.maximum(largest, torch.stack(norms))
            A_k, B_k = A_k - eta * gradient @ B_k.mT, B_k - eta * A_k.mT @ gradient
        A, B = A_k.mean(1, keepdim=True), B_k.mean(1, keepdim=True)
        if (number + 1) % period == 0:
            W, A, B = W + A @ B, normal(1, M, R) / M**0.5, torch.zeros_like(B)
    a, b, g = largest  # C_A^2, C_B^2, G^2
    K_1 = 8 / 3 * (NOISE**2 + g) * STEPS * (b / 2 * (b + a * b + g) + a * (1 + a / 2))
    K_2 = 16 / 3 * STEPS**2 * (NOISE**2 + g) * (2 * (a + b) * (a**2 + b**2) + g * (a + b))
    # f's minimum is that of the mean target, so f - f* is half the squared distance from it.
    right = 2 * first / (3 * eta * rounds * STEPS) + K_1 * eta + K_2 * eta**2
    return left, left / right, (W + A @ B - goal).square().sum((1, 2, 3)) / first


def main() -> None:
    """Findings, and the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, nargs="+", default=list(ROUNDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    findings: list[report.Finding] = []
    rows: list[list[str]] = []
    cases = {"": (8, K), ", half of the clients a round": (8, K // 2), ", never accumulated": (10**9, K)}
    for name, (period, participants) in cases.items():
        lefts, ratios, shares = zip(
            *(run(args.seeds, rounds, period, participants) for rounds in args.rounds), strict=True
        )
        worst = float(torch.stack(ratios).max())
        verdict = "holds" if worst <= 1 else "contradicted"
        findings.append(report.Finding(f"Theorem 4.2: the bound (81){name}", f"at most {worst:.2g} of it", verdict))
        slopes = np.polyfit(np.log(args.rounds), torch.stack(lefts).log().numpy(), 1)[0]
        one = compare_pairs([-0.5] * args.seeds, list(slopes))
        text = f"Theorem 4.2: the gradients fall at least as T^-0.5{name}"
        findings.append(report.Finding(text, f"as T^{-0.5 - one.mean:.3f} ± {one.half_width:.3f}", one.verdict))
        rows.append(
            [f"tau {period}, {participants} of {K}", *(f"{float(one.mean()):.2g}" for one in (*lefts, *shares))]
        )
    parts = [f"{part}, T = {rounds}" for part in ("mean gradient", "||grad_W||^2 left") for rounds in args.rounds]
    report.show(findings, [report.format_table(("setting", *parts), rows)])


if __name__ == "__main__":
    main()
