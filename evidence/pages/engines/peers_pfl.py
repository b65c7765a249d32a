"""pfl-research's simulation: federated averaging of a PEFT model, in one process or in several.

python peers_pfl.py PLAN
torchrun --nproc-per-node 2 peers_pfl.py PLAN --threads 1
"""

from __future__ import annotations

import argparse
import itertools
import time
from types import MethodType
from typing import Any

import torch
from peers_answers import Answers
from peers_common import Batch, Plan, build_model
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchDataDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.utils.data import Dataset


class Examples(Dataset[int]):
    """A client's examples in the order in which they are trained on."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> int:
        return self.indices[index]


class Rounds:
    """pfl's parts, and what is counted of a round.

    Args:
        plan: The work that is trained.
        model: The model, adapted by PEFT.
    """

    def __init__(self, plan: Plan, model: Any) -> None:
        self.plan, self.round, self.losses = plan, 0, list[float]()
        self.training, self.examples = 0.0, 0
        model.loss = MethodType(self._loss, model)
        model.metrics = MethodType(lambda *_, **__: {}, model)  # required, never evaluated
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.model = PyTorchModel(
            model=model,
            local_optimizer_create=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0),
            central_optimizer=torch.optim.SGD(trained, lr=1.0),
        )
        users = FederatedDataset(self._user, get_user_sampler("minimize_reuse", list(range(len(plan.clients)))))
        self.backend = SimulatedBackend(users, users, [WeightByDatapoints()])
        self.algorithm = FederatedAveraging()
        self._time_training()

    def _loss(self, model: Any, **batch: Tensor) -> Tensor:
        loss = model(**batch).loss
        count = len(batch["labels"])
        self.losses.append(loss.item() * count)
        self.examples += count
        return loss

    def _user(self, client: int) -> PyTorchDataDataset:
        batches = self.plan.batches(client, self.round)
        return PyTorchDataDataset(
            Examples([index for batch in batches for index in batch]), user_id=client, collate_fn=self._collate
        )

    def _collate(self, indices: list[int]) -> Batch:
        return self.plan.collate(indices)

    def _time_training(self) -> None:
        epochs = self.model.do_multiple_epochs_of

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return epochs(*args, **options)
            finally:
                self.training += time.perf_counter() - began

        self.model.do_multiple_epochs_of = timed

    def run_round(self, round: int) -> dict[str, float]:
        """The round of a number."""
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # no process begins before the driver asks
        self.round, self.losses, self.training, self.examples = round, [], 0.0, 0
        clients = len(self.plan.clients)
        self.algorithm.run(
            NNAlgorithmParams(
                central_num_iterations=round + 1,
                evaluation_frequency=10**9,
                train_cohort_size=clients,
                val_cohort_size=0,
            ),
            self.backend,
            self.model,
            NNTrainHyperParams(
                local_batch_size=self.plan.batch_size,
                local_num_epochs=1,
                local_learning_rate=self.plan.settings["lr"],
                local_max_grad_norm=self.plan.settings["max_grad_norm"],
            ),
            NNEvalHyperParams(local_batch_size=None),
            send_metrics_to_platform=False,
        )
        sums, processes = torch.tensor([sum(self.losses), self.examples, self.training], dtype=torch.float64), 1
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            processes = torch.distributed.get_world_size()
        loss, examples, training = sums.tolist()
        return {"loss": loss / examples, "examples": examples, "training": training / processes}


def main() -> None:
    """Serve the driver."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--threads", type=int, help="of each process; left out: the plan's")
    args = parser.parse_args()
    answers, plan = Answers(), Plan(args.plan)
    torch.set_num_threads(args.threads or plan.settings["threads"])
    rounds = Rounds(plan, build_model(plan, getattr(torch, args.dtype), args.attention))
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        for round in itertools.count():  # in step with the first process, which answers
            rounds.run_round(round)
    answers.serve(rounds.run_round, len(plan.settings["checked"]))


if __name__ == "__main__":
    main()
