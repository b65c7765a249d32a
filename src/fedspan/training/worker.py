"""One thread of the batched engine: trains its share of a round's clients, several in one pass, on a model of its own.

Shapes: C clients in a pass, B examples of each, P elements of a client's trainable tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import to_device
from fedspan.core.values import Job
from fedspan.models.precision import compute_tolerance
from fedspan.models.stacked import StackedModel, Unstackable
from fedspan.tasks.task import Examples
from fedspan.training.batching import ModelInputs, build_prediction_key
from fedspan.training.client_slot import (
    ClientSlot,
    SharedTensors,
    build_results,
    perturb,
    place_rows,
    select_group,
    stack_frozen,
)
from fedspan.training.engine import FinishJob, OpenJob
from fedspan.training.jobs import Assignment, convert_out_of_memory
from fedspan.training.loop import LoopEngine
from fedspan.training.optimizers import Layout, build_optimizer_spec, clip_rows, run_fused_step, step_rows
from fedspan.training.projector_refresh import refresh_due, refresh_projectors
from fedspan.training.services import draw_dropout_mask

_WINDOW = 4
"""Open client slots per client in a pass: enough to find batches of similar length without opening a whole cohort."""


class Worker:
    """Trains clients on one model.

    Args:
        loop: The loop engine with the model and its settings, which trains jobs that can't be stacked; no other object
            may use its model at the same time.
    """

    def __init__(self, loop: LoopEngine) -> None:
        adapted, task, settings, seed = loop.adapted, loop.task, loop.settings, loop.seed
        self.loop = loop
        self.adapted, self.task, self.settings, self.seed = adapted, task, settings, seed
        self.stacked = StackedModel(adapted)
        self.refusal = self.stacked.explain_refusal()
        if loop.private is not None:
            self.refusal = "DP-SGD clips the gradient of each example, which takes the place of clients in a pass"
        """The reason why all clients train one by one here, if they must."""
        self.job_refusal: str | None = None
        """The reason why some job trained alone."""
        self._mode: frozenset[str] | None = None
        self._shared = SharedTensors()
        self._kinds: dict[tuple[object, ...], int] = {}
        self._verified: set[int] = set()

    def run(
        self,
        examples: Examples,
        clients: Sequence[str],
        clients_per_pass: int,
        open_job: OpenJob,
        finish_job: FinishJob,
    ) -> None:
        """Train clients, up to ``clients_per_pass`` of them in a pass."""
        pending, slots = list(reversed(clients)), list[ClientSlot]()
        self._shared.clear()
        self._mode = None
        while pending or slots:
            while pending and len(slots) < _WINDOW * clients_per_pass:
                self._admit(open_job(pending.pop()), examples, clients_per_pass, slots, finish_job)
            new = [slot for slot in slots if not slot.rows]
            place_rows(new, self.adapted.device)
            for slot in new:
                self._refresh_projectors(slot, examples)
            if not slots:
                continue
            group = select_group(slots, clients_per_pass, not self.loop.padding.possible)
            count = sum(len(slot.batch) for slot in group)
            try:
                self.advance(group, examples)
            except Unstackable as error:
                self.refusal = str(error)
                for slot in slots:
                    self._train_alone(slot.assignment, examples, finish_job)
                slots.clear()
                continue
            self.loop.stages.advance("training", count)
            for slot in group:
                if slot.batches_left:
                    self._refresh_projectors(slot, examples)
            finished = [slot for slot in group if not slot.batches_left]
            for slot, trained in zip(finished, build_results(finished), strict=True):
                slots.remove(slot)
                next_assignment = finish_job(slot.assignment, trained)
                if next_assignment is not None:
                    self._admit(next_assignment, examples, clients_per_pass, slots, finish_job)

    def _admit(
        self,
        assignment: Assignment,
        examples: Examples,
        clients_per_pass: int,
        slots: list[ClientSlot],
        finish_job: FinishJob,
    ) -> None:
        slot = None if clients_per_pass == 1 or self.refusal is not None else self.open_slot(assignment, examples)
        if slot is None:
            self._train_alone(assignment, examples, finish_job, clients_per_pass, slots)
            return
        slots.append(slot)

    def _train_alone(
        self,
        assignment: Assignment,
        examples: Examples,
        finish_job: FinishJob,
        clients_per_pass: int = 1,
        slots: list[ClientSlot] | None = None,
    ) -> None:
        """Train a job as the loop engine does; the client's next job may be stacked again."""
        self._mode = None
        next_assignment = finish_job(assignment, self.loop.train(assignment, examples))
        if next_assignment is not None:
            self._admit(next_assignment, examples, clients_per_pass, [] if slots is None else slots, finish_job)

    def open_slot(self, assignment: Assignment, examples: Examples) -> ClientSlot | None:
        """Open a client slot for a job; None if the job must train alone."""
        spec = build_optimizer_spec(assignment, self.settings)
        layout = Layout.build(assignment.job, spec)
        reasons = {
            "its trainable tensors have several number formats": layout is None,
            "its weight decay shrinks the base, by each client's own steps": assignment.job.decay_base
            and spec.weight_decay,
            "packed batches are one row": getattr(self.task, "packing", False),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        self.job_refusal = reason or self.job_refusal
        if layout is None or reason is not None or not len(assignment.indices):
            return None
        self.loop.prepare_job(assignment.job, examples, assignment.indices)
        self._mode = None
        class_terms = self.loop.compute_class_terms(assignment, examples)
        slot = ClientSlot(
            *(assignment, layout, self.settings, self.seed, examples, self.adapted.device),
            class_terms,
            self._shared,
        )
        self._set_kind(slot)
        return slot

    def _set_kind(self, slot: ClientSlot) -> None:
        """Set a client's kind: clients of one kind can share a pass."""
        slot.kind = self._kinds.setdefault(slot.get_grouping_key(), len(self._kinds))

    def _refresh_projectors(self, slot: ClientSlot, examples: Examples) -> None:
        """Refresh a client's projectors if that is due before its next batch."""
        job = slot.assignment.job
        first = slot.batches_done % self.settings.gradient_accumulation_steps == 0
        if job.refresh is None or not first or not refresh_due(job.refresh, slot.steps):
            return
        self.adapted.train_mode(job.buffers)
        self._mode = None
        live = self.adapted.install(job.parametrization, slot.get_tensors(), frozenset(job.trainable_names))
        refresh_projectors(self.loop, job, live, slot, slot.steps, examples, slot.batch)
        slot.update_tensors(live)
        self._set_kind(slot)

    def advance(self, group: Sequence[ClientSlot], examples: Examples) -> None:
        """Train one batch of each of several clients of one kind, and take the optimizer steps that it completes."""
        losses, gradients = self._compute_gradients(group, examples)
        passes = self.settings.gradient_accumulation_steps
        gathers = group[0].is_probe or passes > 1
        complete: list[ClientSlot] = []
        for loss, gradient, slot in zip(losses, gradients, group, strict=True):
            slot.losses.append(loss)
            slot.batches_done += 1
            if gathers:
                slot.add_gradient("gathered", gradient)
            if not slot.batches_left or not (slot.is_probe or slot.batches_done % passes):
                complete.append(slot)
        if gathers:
            gradients = torch.stack([slot.rows.pop("gathered") for slot in complete]) if complete else gradients[:0]
        turns = [slot.steps % slot.layout.turns for slot in complete]
        for turn in sorted(set(turns)):  # clients of one kind share passes, whichever of their tensors train next
            rows = [number for number, slot_turn in enumerate(turns) if slot_turn == turn]
            selected = [complete[number] for number in rows]
            if len(rows) < len(complete):  # numbers of rows in pageable memory would have the host wait for a GPU
                indices = to_device(torch.tensor(rows), gradients.device)
                self._step(selected, gradients.index_select(0, indices))
            else:
                self._step(selected, gradients)

    def _compute_gradients(self, group: Sequence[ClientSlot], examples: Examples) -> tuple[Tensor, Tensor]:
        """Compute losses (C,) and gradients (C, P) of the clients' next batches."""
        job, layout, device = group[0].assignment.job, group[0].layout, self.adapted.device
        clients, size = len(group), max(len(slot.batch) for slot in group)
        parts: list[tuple[Assignment, int, list[int]]] = []
        rows_by_client = torch.zeros(clients, clients * size)
        for number, slot in enumerate(group):
            indices = slot.batch.tolist()
            rows_by_client[number, number * size : number * size + len(indices)] = 1
            indices += indices[:1] * (size - len(indices))  # filler: all clients need equally many rows
            parts.append((slot.assignment, slot.batches_done, indices))
        rows = [index for _, _, indices in parts for index in indices]
        if self._mode != job.buffers:
            self.adapted.train_mode(job.buffers)
            self._mode = job.buffers
        values = torch.stack([slot.rows["values"] for slot in group])
        leaves = {name: view.detach().requires_grad_() for name, view in layout.split_views(values).items()}
        frozen = stack_frozen(group)
        batch = self.loop.make_batch(examples, parts)
        terms = {
            name: torch.cat([slot.class_terms[name].expand(size, -1) for slot in group])
            for name in group[0].class_terms
        }
        batch = {**batch, **terms}
        counted = rows_by_client.sum(0).numpy() > 0
        lengths = examples.lengths[rows]
        if len(group) > 1 and group[0].kind not in self._verified:
            pair = [perturb(slot.get_tensors(), slot.layout.names, slot.assignment.client) for slot in group[:2]]
            self._verify(group[0].kind, job, pair, batch, size, lengths, counted)
        self._set_dropout(group, batch, size)
        stacked = self.stacked.hold_tensors(job.parametrization, {**frozen, **leaves}, clients, clients * size)
        unpadded = self.loop.padding.remove_padding(batch, lengths, clients, counted)
        with stacked, unpadded, self.loop.feed(job, examples, rows):
            losses = self.task.compute_client_losses(self.adapted.model, batch, to_device(rows_by_client, device))
            shares = to_device(torch.tensor([slot.share for slot in group], dtype=losses.dtype), device)
            (losses * shares).sum().backward()
        leaf_gradients = [leaf.grad for leaf in leaves.values()]
        for name in job.buffers:
            for number, slot in enumerate(group):
                slot.frozen[name].copy_(frozen[name][number])
        return losses.detach(), layout.join(leaf_gradients, clients, values)

    def _step(self, group: Sequence[ClientSlot], gradients: Tensor) -> None:
        """Take an optimizer step of clients that are at the same turn, from their gradients (C, P)."""
        layout, settings, step = group[0].layout, self.settings, group[0].steps
        for number, slot in enumerate(group):
            if slot.assignment.job.want_gradient or slot.is_probe:
                slot.add_gradient("gradient", gradients[number])
        if group[0].is_probe:
            return
        if any(slot.penalties for slot in group):
            gradients = gradients + torch.stack([self._compute_penalty_gradient(slot) for slot in group])
        masks = [slot.rows["mask"] for slot in group if "mask" in slot.rows]
        mask = torch.stack(masks) if masks else None
        if mask is not None:
            gradients = gradients * mask
        gradients = layout.drop_inactive(gradients, step)
        if settings.max_grad_norm and group[0].assignment.job.clips:
            gradients = clip_rows(gradients, settings.max_grad_norm)
        gradients = layout.smooth(gradients)
        if any("offset" in slot.rows for slot in group):
            zero = torch.zeros_like(group[0].rows["values"])
            gradients = gradients + torch.stack([slot.rows.get("offset", zero) for slot in group])
        active, segments = layout.find_active_tensors(step), layout.list_active_segments(step)
        for slot in group:
            slot.steps += 1
            slot.counts[active] += 1
        rows, spec = [slot.rows["values"] for slot in group], group[0].spec
        if mask is None and segments and all(slot.has_equal_steps(active) for slot in group):
            kinds = {kind: [slot.rows[kind] for slot in group] for kind in group[0].moments}
            counts = [int(slot.counts[active][0]) for slot in group]
            run_fused_step(spec, layout, rows, gradients, kinds, counts, segments)
            return
        values = torch.stack(rows)
        moments = {kind: torch.stack([slot.rows[kind] for slot in group]) for kind in group[0].moments}
        taken, before = np.stack([slot.counts for slot in group]), np.stack([slot.steps_before for slot in group])
        step_rows(spec, layout, values, gradients, moments, taken, before, mask, segments)
        for name, updated in {"values": values, **moments}.items():  # one operator for all clients
            torch.split_with_sizes_copy(updated, [1] * len(group), out=[slot.rows[name][None] for slot in group])

    def predict(self, models: Sequence[ModelInputs], examples: Examples) -> list[Tensor]:
        """Predict with several models in one forward pass.

        Args:
            models: Models with equal keys (``build_prediction_key``), each with the indices of its examples.

        Returns:
            The predictions of each model, one row per example, float32 on the CPU.

        Raises:
            FedspanError: If the device has too little memory for the pass.
            Unstackable: If the models cannot share a pass.
        """
        if getattr(self.task, "packing", False):
            raise Unstackable("packed batches are one row")
        size = len(models) * max(len(indices) for _, indices in models)
        with convert_out_of_memory(self.adapted.device, "evaluation.batch_size", size, "examples in a batch"):
            return self._predict(models, examples)

    @torch.no_grad()
    def _predict(self, models: Sequence[ModelInputs], examples: Examples) -> list[Tensor]:
        loop, adapted, job = self.loop, self.adapted, models[0][0]
        clients, size = len(models), max(len(indices) for _, indices in models)
        loop.prepare(examples, [indices for _, indices in models])
        adapted.model.eval()
        adapted.install({}, {}, frozenset())  # without dropout or a decayed base, which a job may have left
        rows: list[int] = []
        counted = np.zeros(clients * size, dtype=bool)
        for number, (_, indices) in enumerate(models):
            example_indices = indices.tolist()
            counted[number * size : number * size + len(example_indices)] = True
            # Filler: all models need equally many rows.
            rows += example_indices + example_indices[:1] * (size - len(example_indices))
        batch, lengths = self.task.collate(examples, rows, adapted.device), examples.lengths[rows]
        kind = self._kinds.setdefault(("prediction", *build_prediction_key(job)), len(self._kinds))
        if kind not in self._verified:
            pair = [
                perturb(model_job.tensors, model_job.trainable_names, str(position))
                for position, (model_job, _) in enumerate(models[:2])
            ]
            pair = [{name: to_device(value, adapted.device) for name, value in tensors.items()} for tensors in pair]
            self._verify(kind, job, pair, batch, size, lengths, counted)
            adapted.install({}, {}, frozenset())
        tensors = {
            name: to_device(torch.stack([model_job.tensors[name] for model_job, _ in models]), adapted.device)
            for name in job.tensors
        }
        stacked = self.stacked.hold_tensors(job.parametrization, tensors, clients, clients * size)
        padding = loop.padding.remove_padding(batch, lengths, clients, counted)
        with stacked, padding, loop.prefixes.feed(examples, rows):
            outputs = self.task.predict(adapted.model, batch).float().cpu()
        loop.stages.advance("evaluation", int(counted.sum()))
        return [
            outputs[position * size : position * size + len(indices)] for position, (_, indices) in enumerate(models)
        ]

    def _compute_penalty_gradient(self, slot: ClientSlot) -> Tensor:
        """Compute the gradient of a client's penalties, (P,)."""
        if not slot.penalties:
            return torch.zeros_like(slot.rows["values"])
        with torch.enable_grad():
            views = slot.layout.split_views(slot.rows["values"])
            trainable = {name: view.detach().requires_grad_() for name, view in views.items()}
            terms = [penalty.compute_value({**slot.frozen, **trainable}) for penalty in slot.penalties]
            gradients = torch.autograd.grad(torch.stack(terms).sum(), list(trainable.values()), allow_unused=True)
        return slot.layout.join(gradients, 1, slot.rows["values"])[0]

    def _set_dropout(self, group: Sequence[ClientSlot], batch: Mapping[str, Tensor], size: int) -> None:
        rate = self.settings.lora_dropout
        if not rate:
            return
        if getattr(self.task, "has_several_passes", False):
            raise Unstackable("dropout masks are drawn for one pass of a batch, and each of an example's texts has one")
        tokens = batch["input_ids"].shape[1] if "input_ids" in batch else None

        def dropout(x: Tensor, layer: str) -> Tensor:
            if x.shape[0] != len(group) * size:
                raise Unstackable(f"dropout before {layer}, which is given the tokens of all examples in one row")
            mask = torch.ones(x.shape, dtype=torch.bool)
            for number, slot in enumerate(group):
                assignment, count = slot.assignment, len(slot.batch)
                # Draw the mask of a client that trains alone: its batch is padded to its own longest text only.
                tokens_shape = [slot.cost] if x.ndim > 2 and x.shape[1] == tokens else list(x.shape[1:2])
                shape = [count, *tokens_shape, *x.shape[2:]]
                key = (self.seed, assignment.round, assignment.client, assignment.job.phase, slot.batches_done, layer)
                first = number * size
                mask[first : first + count, : tokens_shape[0]] = draw_dropout_mask(shape, rate, *key)
            return x * to_device(mask, x.device).to(x.dtype) / (1 - rate)

        self.adapted.set_dropout(dropout)

    @torch.no_grad()
    def _verify(
        self,
        kind: int,
        job: Job,
        tensors: Sequence[Mapping[str, Tensor]],
        batch: Mapping[str, Tensor],
        size: int,
        lengths: np.ndarray,
        counted: np.ndarray,
    ) -> None:
        """Check, before clients of a kind first share a pass, that each gets the same result as alone, up to rounding.

        Raises:
            Unstackable: If results differ: the model mixes the examples of a batch, or uses a target layer unusually.
        """
        self.adapted.set_dropout(None)  # a previous pass leaves its dropout, which is that of other clients
        pair = {name: value[: 2 * size] for name, value in batch.items()}
        stacked_tensors = {name: torch.stack([single[name] for single in tensors]) for name in tensors[0]}
        stacked = self.stacked.hold_tensors(job.parametrization, stacked_tensors, 2, 2 * size)
        with stacked, self.loop.padding.remove_padding(pair, lengths[: 2 * size], 2, counted[: 2 * size]):
            shared = self.task.predict(self.adapted.model, pair)
        columns = getattr(self.task, "continuous_columns", None)  # None: all of them
        for number, single in enumerate(tensors):
            rows = slice(number * size, (number + 1) * size)
            self.adapted.install(job.parametrization, single, frozenset())
            predictions = self.task.predict(self.adapted.model, {name: value[rows] for name, value in batch.items()})
            is_real = torch.from_numpy(counted[rows]).to(predictions.device)
            difference, expected = (
                value[is_real][..., :columns] for value in (shared[rows] - predictions, predictions)
            )
            error = float(difference.norm() / expected.norm())
            if not error < compute_tolerance(self.adapted.model):
                raise Unstackable(f"predictions differ by {error:.1e} when two clients share a pass")
        self._verified.add(kind)
