"""One thread of the batched engine: trains its share of a round's clients, several in one pass, on a model of its own.

Shapes: C clients in a pass, B examples of each, P elements of a client's trainable tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedspan.core.tensors import to_device
from fedspan.core.values import Trained
from fedspan.models.compiled import CompiledBlocks
from fedspan.models.precision import tolerance
from fedspan.models.stacked import StackedModel, Unstackable
from fedspan.tasks.labelling import OFFSETS
from fedspan.tasks.task import Examples
from fedspan.training.client_slot import ClientSlot, perturb, select_group, stack_frozen
from fedspan.training.engine import dropout_mask, refresh_due, refresh_projectors
from fedspan.training.jobs import Assignment
from fedspan.training.loop import LoopEngine
from fedspan.training.optimizers import Layout, clip_rows, fused_step, spec_of, step_rows

__all__ = ["Worker"]

Opened = Callable[[str], Assignment]
Finished = Callable[[Assignment, Trained], Assignment | None]

_WINDOW = 4
"""Open client slots per client in a pass: enough to find batches of similar length without opening a whole cohort."""


class Worker:
    """Trains clients on one model.

    Args:
        loop: The loop engine with the model and its settings, which trains jobs that can't be stacked; no other object
            may use its model at the same time.
        compiled: Compile the model's blocks for stacked passes.
    """

    def __init__(self, loop: LoopEngine, compiled: bool = False) -> None:
        adapted, task, settings, seed = loop.adapted, loop.task, loop.settings, loop.seed
        self.loop = loop
        self.adapted, self.task, self.settings, self.seed = adapted, task, settings, seed
        self.stacked = StackedModel(adapted)
        self.compiled = CompiledBlocks(adapted) if compiled else None
        self.why_not = self.stacked.refusal()
        if loop.private is not None:
            self.why_not = "DP-SGD clips the gradient of each example, which takes the place of clients in a pass"
        """The reason why all clients train one by one here, if they must."""
        self.why_alone: str | None = None
        """The reason why some job trained alone."""
        self._mode: frozenset[str] | None = None
        self._known: dict[str, Tensor] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._verified: set[int] = set()

    def run(self, examples: Examples, clients: Sequence[str], at_once: int, opened: Opened, finished: Finished) -> None:
        """Train clients, up to ``at_once`` of them in a pass."""
        waiting, seats = list(reversed(clients)), list[ClientSlot]()
        self._known.clear()
        self._mode = None
        while waiting or seats:
            while waiting and len(seats) < _WINDOW * at_once:
                self._admit(opened(waiting.pop()), examples, at_once, seats, finished)
            if not seats:
                continue
            group = select_group(seats, at_once, not self.loop.padding.possible)
            count = sum(len(seat.batch) for seat in group)
            try:
                self.advance(group, examples)
            except Unstackable as error:
                self.why_not = str(error)
                for seat in seats:
                    self._alone(seat.work, examples, finished)
                seats.clear()
                continue
            self.loop.stages.advance("training", count)
            for seat in group:
                if not seat.left:
                    seats.remove(seat)
                    following = finished(seat.work, seat.result())
                    if following is not None:
                        self._admit(following, examples, at_once, seats, finished)
                else:
                    self._renew(seat, examples)

    def _admit(
        self, work: Assignment, examples: Examples, at_once: int, seats: list[ClientSlot], finished: Finished
    ) -> None:
        seat = None if at_once == 1 or self.why_not is not None else self.seat(work, examples)
        if seat is None:
            self._alone(work, examples, finished, at_once, seats)
            return
        seats.append(seat)
        self._renew(seat, examples)

    def _alone(
        self,
        work: Assignment,
        examples: Examples,
        finished: Finished,
        at_once: int = 1,
        seats: list[ClientSlot] | None = None,
    ) -> None:
        """Train a job as the loop engine does; the client's next job may be stacked again."""
        self._mode = None
        following = finished(work, self.loop.take(work, examples))
        if following is not None:
            self._admit(following, examples, at_once, [] if seats is None else seats, finished)

    def seat(self, work: Assignment, examples: Examples) -> ClientSlot | None:
        """Open a client slot for a job; None if the job must train alone."""
        spec = spec_of(work, self.settings)
        layout = Layout.of(work.job, spec)
        reasons = {
            "its trainable tensors have several number formats": layout is None,
            "its weight decay shrinks the base, by each client's own steps": work.job.decay_base and spec.weight_decay,
            "packed batches are one row": getattr(self.task, "packing", False),
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        self.why_alone = reason or self.why_alone
        if layout is None or reason is not None or not len(work.indices):
            return None
        self.loop.ready(examples, [work.indices])
        self._mode = None
        offsets = self.loop.logit_offsets(work, examples)
        seat = ClientSlot(work, layout, self.settings, self.seed, examples, self.adapted.device, offsets)
        for name, value in seat.others.items():
            if name in work.job.buffers:
                continue
            known = self._known.setdefault(name, value)
            if known is not value and known.dtype == value.dtype and torch.equal(known, value):
                seat.others[name] = known  # stored once, however many clients share it
        self._sort(seat)
        return seat

    def _sort(self, seat: ClientSlot) -> None:
        """Set a client's kind: clients of one kind can share a pass."""
        seat.kind = self._kinds.setdefault(seat.key(), len(self._kinds))

    def _renew(self, seat: ClientSlot, examples: Examples) -> None:
        """Refresh a client's projectors if that is due before its next batch."""
        job = seat.work.job
        first = seat.taken % self.settings.accumulate == 0
        if job.refresh is None or not first or not refresh_due(job.refresh, seat.steps):
            return
        self.adapted.train_mode(job.buffers)
        self._mode = None
        live = self.adapted.install(job.parametrization, seat.tensors(), frozenset(job.trainable_names))
        refresh_projectors(self.loop, job, live, seat, seat.steps, examples, seat.batch)
        seat.absorb(live)
        self._sort(seat)

    def advance(self, group: Sequence[ClientSlot], examples: Examples) -> None:
        """Train one batch of each of several clients of one kind, and take the optimizer steps that it completes."""
        losses, gradients = self._gradients(group, examples)
        gathering = group[0].probing or self.settings.accumulate > 1
        ready: list[ClientSlot] = []
        for loss, gradient, seat in zip(losses, gradients, group, strict=True):
            seat.count(loss)
            if gathering:
                seat.gathered = gradient if seat.gathered is None else seat.gathered + gradient
            if not seat.left or not (seat.probing or seat.taken % self.settings.accumulate):
                ready.append(seat)
        if gathering:
            gradients = torch.stack([seat.take_gathered() for seat in ready]) if ready else gradients[:0]
        if ready:
            self._step(ready, gradients)

    def _gradients(self, group: Sequence[ClientSlot], examples: Examples) -> tuple[Tensor, Tensor]:
        """Compute losses (C,) and gradients (C, P) of the clients' next batches."""
        job, layout, device = group[0].work.job, group[0].layout, self.adapted.device
        clients, size = len(group), max(len(seat.batch) for seat in group)
        rows: list[int] = []
        members = torch.zeros(clients, clients * size)
        for number, seat in enumerate(group):
            own = seat.batch.tolist()
            members[number, number * size : number * size + len(own)] = 1
            rows += own + own[:1] * (size - len(own))  # filler: all clients need equally many rows
        if self._mode != job.buffers:
            self.adapted.train_mode(job.buffers)
            self._mode = job.buffers
        values = torch.stack([seat.values for seat in group])
        leaves = {name: view.detach().requires_grad_() for name, view in layout.views(values).items()}
        others = stack_frozen(group)
        batch = self.task.batch(examples, rows, device)
        offsets = [seat.logit_offsets.expand(size, -1) for seat in group if seat.logit_offsets is not None]
        if offsets:
            batch = {**batch, OFFSETS: torch.cat(offsets)}
        counted = members.sum(0).numpy() > 0
        lengths = examples.lengths[rows]
        self._verify(group, batch, size, lengths, counted)
        self._set_dropout(group, batch, size)
        held = self.stacked.hold_tensors(job.parametrization, {**others, **leaves}, clients, clients * size)
        padding, compiled = self.loop.padding, self.compiled
        quick = padding.remove_padding(batch, lengths, clients, counted) if compiled is None else compiled.within()
        with held, quick, self.loop.prefixes.feed(examples, rows):
            losses = self.task.losses(self.adapted.model, batch, to_device(members, device))
            shares = to_device(torch.tensor([seat.share for seat in group], dtype=losses.dtype), device)
            (losses * shares).sum().backward()
        found = [leaf.grad for leaf in leaves.values()]
        for name in job.buffers:
            for number, seat in enumerate(group):
                seat.others[name].copy_(others[name][number])
        return losses.detach(), layout.join(found, clients, values)

    def _step(self, group: Sequence[ClientSlot], gradients: Tensor) -> None:
        layout, settings = group[0].layout, self.settings
        for number, seat in enumerate(group):
            if seat.work.job.want_gradient or seat.probing:
                own = gradients[number]
                seat.gradient = own.clone() if seat.gradient is None else seat.gradient + own
        if group[0].probing:
            return
        if any(seat.work.job.penalties for seat in group):
            gradients = gradients + torch.stack([self._penalty(seat) for seat in group])
        masks = [seat.mask for seat in group if seat.mask is not None]
        mask = torch.stack(masks) if masks else None
        if mask is not None:
            gradients = gradients * mask
        if settings.max_grad_norm:
            gradients = clip_rows(gradients, settings.max_grad_norm)
        offsets = [seat.offset for seat in group if seat.offset is not None]
        if offsets:
            zero = torch.zeros_like(offsets[0])
            gradients = gradients + torch.stack([zero if seat.offset is None else seat.offset for seat in group])
        for seat in group:
            seat.steps += 1
            seat.counts += 1
        rows, spec = [seat.values for seat in group], group[0].spec
        if mask is None and all(seat.evenly for seat in group):
            kinds = {kind: [seat.moments[kind] for seat in group] for kind in group[0].moments}
            fused_step(spec, layout, rows, gradients, kinds, [int(seat.counts[0]) for seat in group])
            return
        values = torch.stack(rows)
        moments = {kind: torch.stack([seat.moments[kind] for seat in group]) for kind in group[0].moments}
        counts, before = np.stack([seat.counts for seat in group]), np.stack([seat.before for seat in group])
        step_rows(spec, layout, values, gradients, moments, counts, before, mask)
        for number, seat in enumerate(group):
            seat.values.copy_(values[number])
            for kind, moment in moments.items():
                seat.moments[kind].copy_(moment[number])

    def _penalty(self, seat: ClientSlot) -> Tensor:
        """Compute the gradient of a client's penalties, (P,)."""
        if not seat.work.job.penalties:
            return torch.zeros_like(seat.values)
        with torch.enable_grad():
            own = {name: view.detach().requires_grad_() for name, view in seat.layout.views(seat.values).items()}
            terms = [penalty.value({**seat.others, **own}) for penalty in seat.work.job.penalties]
            found = torch.autograd.grad(torch.stack(terms).sum(), list(own.values()), allow_unused=True)
        return seat.layout.join(found, 1, seat.values)[0]

    def _set_dropout(self, group: Sequence[ClientSlot], batch: Mapping[str, Tensor], size: int) -> None:
        rate = self.settings.dropout
        if not rate:
            return
        tokens = batch["input_ids"].shape[1] if "input_ids" in batch else None

        def dropout(x: Tensor, layer: str) -> Tensor:
            if x.shape[0] != len(group) * size:
                raise Unstackable(f"dropout before {layer}, which is given the tokens of all examples in one row")
            kept = torch.ones(x.shape, dtype=torch.bool)
            for number, seat in enumerate(group):
                work, count = seat.work, len(seat.batch)
                # Draw the mask of a client that trains alone: its batch is padded to its own longest text only.
                middle = [seat.cost] if x.ndim > 2 and x.shape[1] == tokens else list(x.shape[1:2])
                shape = [count, *middle, *x.shape[2:]]
                key = (self.seed, work.round, work.client, work.job.phase, seat.taken, layer)
                first = number * size
                kept[first : first + count, : middle[0]] = dropout_mask(shape, rate, *key)
            return x * to_device(kept, x.device).to(x.dtype) / (1 - rate)

        self.adapted.set_dropout(dropout)

    @torch.no_grad()
    def _verify(
        self,
        group: Sequence[ClientSlot],
        batch: Mapping[str, Tensor],
        size: int,
        lengths: np.ndarray,
        counted: np.ndarray,
    ) -> None:
        """Check, before clients first share a pass, that each gets the same result as alone, up to rounding.

        Raises:
            Unstackable: If results differ: the model mixes the examples of a batch, or uses a target layer unusually.
        """
        if len(group) == 1 or group[0].kind in self._verified:
            return
        job, first, second = group[0].work.job, group[0], group[1]
        tensors = [perturb(seat) for seat in (first, second)]
        both = {name: value[: 2 * size] for name, value in batch.items()}
        together = {name: torch.stack([one[name] for one in tensors]) for name in tensors[0]}
        held = self.stacked.hold_tensors(job.parametrization, together, 2, 2 * size)
        with held, self.loop.padding.remove_padding(both, lengths[: 2 * size], 2, counted[: 2 * size]):
            found = self.task.predict(self.adapted.model, both)
        for number, own in enumerate(tensors):
            rows = slice(number * size, (number + 1) * size)
            self.adapted.install(job.parametrization, own, frozenset())
            alone = self.task.predict(self.adapted.model, {name: value[rows] for name, value in batch.items()})
            real = torch.from_numpy(counted[rows]).to(alone.device)
            apart = float((found[rows] - alone)[real].norm() / alone[real].norm())
            if not apart < tolerance(self.adapted.model):
                raise Unstackable(f"predictions differ by {apart:.1e} when two clients share a pass")
        self._verified.add(group[0].kind)
