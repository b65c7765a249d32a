"""FedLoRU's Figure 1: the stable rank of the Hessian of a network trained on few images, or on ten times as many.

    python -m evidence.claims.fedloru_stable_rank --data FOLDER     # Fashion-MNIST's four idx files, gzipped

Fashion-MNIST at 14 x 14 pixels and a ResNet-8 stand for the paper's CIFAR-100 and ResNet-18. The stable rank is the
definition's, ||H||_F^2 / ||H||_2^2 (``curvature.py``); the paper's equation (89) weights the eigenvalues of pyHessian's
density by that density, which is not the stable rank's sum. After equally many epochs the larger set has had ten times
as many steps; with the initial weights, nothing differs but the images that the Hessian is taken on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from evidence.claims import report
from evidence.claims.curvature import estimate_norms, make_hessian_product
from evidence.claims.rolora_mnist import Images, read_images
from fedspan.core.tensors import create_generator
from fedspan.experiments.intervals import compare_pairs
from fedspan.models.resnet import ResNetForSmallImages, SmallResNetConfig

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
        rows.append(report.Finding(text, f"by {one.mean:+.1f} ± {one.half_width:.1f}", one.verdict))
    means = [[sum(curve) / len(curve) for curve in curves[size]] for size in (few, many)]
    one = compare_pairs(*means)
    text = f"The stable rank with {few} images is above that with {many}, mean over all measured epochs"
    return [report.Finding(text, f"by {one.mean:+.1f} ± {one.half_width:.1f}", one.verdict), *rows]


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


def main() -> None:
    """Train and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=report.OUT)
    parser.add_argument("--images", type=int, nargs=2, default=[50, 500])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="epochs between two measurements")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--probes", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    curves = measure_curves(args)
    measured_epochs = list(range(0, args.epochs + 1, args.every))
    report.save_figure(draw_figure(curves, measured_epochs), args.out, "fedloru_stable_rank")
    rows = [
        [size, *(f"{sum(values) / len(values):.1f}" for values in zip(*given, strict=True))]
        for size, given in curves.items()
    ]
    table = report.format_table(("images", *(f"epoch {epoch}" for epoch in measured_epochs)), rows)
    report.show(build_findings(curves, measured_epochs), [table])


if __name__ == "__main__":
    main()
