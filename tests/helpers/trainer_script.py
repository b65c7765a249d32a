"""A data owner's training script: a Transformers trainer on the texts of a site, which joins a federation.

python -m helpers.trainer_script NODE.yaml TINY_FOLDER SITE
torchrun --nproc_per_node 2 -m helpers.trainer_script NODE.yaml TINY_FOLDER SITE
"""

import logging
import sys
from pathlib import Path

import torch

import fedspan
from fedspan.training.trainers.processes import count_processes

from .trainer_clients import arguments, make_trainer


def main(node: Path, tiny_folder: Path, site: str) -> None:
    """Join a run as a site whose data its own trainer holds."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    backend = "gloo" if count_processes() > 1 else None
    args = arguments(node.parent / f"{site}-trainer", per_device_train_batch_size=2, ddp_backend=backend)
    fedspan.join(node, trainer=make_trainer(tiny_folder, site, args=args))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
