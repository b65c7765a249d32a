"""FedLoRU's Figure 1: the stable rank of the Hessian of a network trained on few images, or on ten times as many.

``python claims/fedloru_stable_rank.py --data PATH/fashion-mnist`` (the four idx files, gzipped).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import report
import torch
from curvature import estimate_norms, make_hessian_product
from matplotlib.figure import Figure
from rolora_mnist import Images, read_images
from torch import Tensor, nn
from torch.nn import functional as F

from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import compare_pairs
from fedspan.models.resnet import ResNetForSmallImages, SmallResNetConfig

PAPER = (
    "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit Regularization "
    "(FedLoRU), Figure 1 and appendix D.3"
)
SIDE, CLASSES = 28, 10
Curves = dict[int, list[list[float]]]
"""By number of images: for each seed, the stable rank at every measured epoch."""


def create_network(seed: int) -> ResNetForSmallImages:
    """A ResNet-8 with weights of its own for each seed, the same for all sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNetForSmallImages(
            SmallResNetConfig(widths=(16, 32, 64), depths=(1, 1, 1), image_size=SIDE // 2, num_labels=CLASSES)
        )


def load_pixels(images: Images) -> Tensor:
    """Three equal channels of half the side, (N, 3, 14, 14)."""
    small = F.avg_pool2d(images.x.view(-1, 1, SIDE, SIDE), 2)
    return ((small - small.mean()) / small.std()).expand(-1, 3, -1, -1).contiguous()


def measure_rank(model: nn.Module, x: Tensor, y: Tensor, draw: torch.Generator, args: argparse.Namespace) -> float:
    """The stable rank of the Hessian on the training images, running statistics held."""
    model.eval()
    product, size = make_hessian_product(F.cross_entropy(model(x).logits, y), list(model.parameters()))
    return estimate_norms(product, size, draw, probes=args.probes, iterations=args.iterations).stable_rank


def measure_training(x: Tensor, y: Tensor, seed: int, args: argparse.Namespace) -> list[float]:
    """Measure stable ranks before training and at each measured epoch."""
    model, count = create_network(seed), len(y)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    ranks = [measure_rank(model, x, y, create_generator(seed, "look", count, 0), args)]
    for epoch in range(1, args.epochs + 1):
        model.train()
        order = torch.randperm(count, generator=create_generator(seed, "order", count, epoch))
        for batch in order.split(args.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]).logits, y[batch]).backward()
            optimizer.step()
        if epoch % args.every == 0:
            ranks.append(measure_rank(model, x, y, create_generator(seed, "look", count, epoch), args))
    return ranks


def measure_curves(args: argparse.Namespace) -> Curves:
    """For every size and seed; the smaller sets are part of the larger ones of their seed."""
    images = read_images(args.data, "train")
    curves: Curves = {size: [] for size in sorted(args.images)}
    for seed in args.seeds:
        chosen = torch.randperm(len(images), generator=create_generator(seed, "images"))[: max(args.images)]
        x, y = load_pixels(Images(images.x[chosen], images.y[chosen])), images.y[chosen]
        for size in curves:
            curves[size].append(measure_training(x[:size], y[:size], seed, args))
            print(f"seed {seed}, {size} images: {', '.join(f'{one:.1f}' for one in curves[size][-1])}", flush=True)
    return curves


def build_findings(curves: Curves, measured_epochs: Sequence[int]) -> list[report.Finding]:
    """Build the findings for every measured epoch and for all of them together."""
    few, many = min(curves), max(curves)
    rows: list[report.Finding] = []
    for index, epoch in enumerate(measured_epochs):
        one = compare_pairs([curve[index] for curve in curves[few]], [curve[index] for curve in curves[many]])
        when = "with the initial weights" if epoch == 0 else f"after {epoch} epochs"
        text = f"The stable rank with {few} images is above that with {many}, {when}"
        rows.append(report.Finding(text, f"by {one.mean:+.1f} ± {one.error:.1f}", one.verdict))
    means = [[sum(curve) / len(curve) for curve in curves[size]] for size in (few, many)]
    one = compare_pairs(*means)
    text = f"The stable rank with {few} images is above that with {many}, mean over all measured epochs"
    return [report.Finding(text, f"by {one.mean:+.1f} ± {one.error:.1f}", one.verdict), *rows]


def draw_figure(curves_by_size: Curves, measured_epochs: Sequence[int]) -> Figure:
    """The paper's figure."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for (size, curves), style in zip(curves_by_size.items(), ("o-", "s--", "^:"), strict=False):
        means = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        axes.plot(measured_epochs, means, style, label=f"{size} images")
    axes.set(xlabel="epoch", ylabel="stable rank of the Hessian", ylim=(0, None))
    axes.legend()
    return figure


def describe_setting(args: argparse.Namespace, minutes: float) -> str:
    """What was run, and where it differs from the paper."""
    return f"""## Setting

Fashion-MNIST instead of CIFAR-100, at {SIDE // 2} x {SIDE // 2} pixels; a ResNet-8 (16, 32, 64 channels) instead of a
ResNet-18; {len(args.seeds)} seeds, each with its own initial weights (the same for both sizes) and images. SGD with
momentum 0.9, learning rate {args.lr}, batches of {args.batch}; the paper names neither. {minutes:.1f} minutes in all.

The stable rank is the definition's, ||H||_F^2 / ||H||_2^2, of the mean cross-entropy over the training images, running
statistics held: Hutchinson's mean over {args.probes} vectors, and {args.iterations} steps of Lanczos
(`claims/curvature.py`, tested against the whole Hessian of a small network). The paper's equation (89)
weights each eigenvalue that pyHessian's density shows, the largest too, by its density, which is not the stable rank's
sum.

After equally many epochs the larger set has had ten times as many steps. With the initial weights nothing differs but
the images that the Hessian is taken on."""


def main() -> None:
    """Train, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=report.FOLDER)
    parser.add_argument("--images", type=int, nargs=2, default=[50, 500])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="epochs between two measurements")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--probes", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    curves = measure_curves(args)
    measured_epochs = list(range(0, args.epochs + 1, args.every))
    figure = report.save_figure(
        draw_figure(curves, measured_epochs), args.out, "fedloru_stable_rank", "stable rank by epoch"
    )
    rows = [
        [size, *(f"{sum(values) / len(values):.1f}" for values in zip(*given, strict=True))]
        for size, given in curves.items()
    ]
    table = report.format_table(("images", *(f"epoch {epoch}" for epoch in measured_epochs)), rows)
    sections = ["Stable rank, mean over seeds:", table, figure, describe_setting(args, (time.monotonic() - start) / 60)]
    title = "FedLoRU: the stable rank of the Hessian"
    report.write(args.out, "fedloru_stable_rank", title, PAPER, build_findings(curves, measured_epochs), sections)


if __name__ == "__main__":
    main()
