"""Nodes of a deployment, forked from one process that has imported what each would take seconds to import.

``python -m helpers.forked_nodes FILE...`` runs what ``fedspan join`` calls for each node's file, until it is ended. The
process in which a node trains is forked, too, and not spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification  # noqa: F401

import fedspan.deployment.node
import fedspan.transports.flower.supernode  # noqa: F401
from fedspan.deployment.console import log_to_console
from fedspan.deployment.deploy import join


def run_node(path: str) -> None:
    """Be the process of a node."""
    log_to_console()
    join(path)


def main() -> None:
    """Run a node for each file that the command line names."""
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # no test cuts the power
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
    nodes = [fork.Process(target=run_node, args=[path]) for path in sys.argv[1:]]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()


if __name__ == "__main__":
    main()
