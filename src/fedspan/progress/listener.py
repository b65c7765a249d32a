"""The events of a run, for listeners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fedspan.training.stages import Stage

if TYPE_CHECKING:
    from fedspan.assembly.run import Prepared


class Listener:
    """Receives the events of a run; every method does nothing by default. Derive from it and define some of them.

    Examples:
        >>> class Losses(fedspan.Listener):
        ...     def on_round_finish(self, row):
        ...         print(row["round"], row["loss"])
        >>> fedspan.run("config.yaml", folder="runs/first", listener=Losses())
    """

    def on_environment_change(self, changes: Mapping[str, tuple[object, object]]) -> None:
        """Handle a run that resumes with other versions or threads, ``{name: (before, after)}``; bits may differ."""

    def on_start(self, prepared: Prepared, done: int, resumed: bool) -> None:
        """Handle the start of a run, which is built; ``done`` rounds are already finished."""

    def on_note(self, text: str) -> None:
        """Handle a note for the user, one sentence without its full stop."""

    def on_stage_change(self, stage: Stage | None) -> None:
        """Handle a new stage of the work, or progress within it; None: no stage is open.

        It is called after every batch, also from the threads that train, and must return quickly.
        """

    def on_start_scores(self, scores: Mapping[str, Any]) -> None:
        """Handle the scores of the model as loaded; those of a head from statistics are the row of round 0."""

    def on_round_start(self, round: int) -> None:
        """Handle the start of a round; rounds count from 1."""

    def on_client_order(self, round: int, client: str) -> None:
        """Handle that a client has an order in an asynchronous round, from an earlier round or since now."""

    def on_client_finish(self, round: int, client: str, loss: float) -> None:
        """Handle the end of a client's training; rounds count from 1."""

    def on_client_failure(self, round: int, client: str, reason: str) -> None:
        """Handle a training reply that was rejected on arrival or did not arrive; the round may be retried."""

    def on_round_finish(self, row: Mapping[str, Any]) -> None:
        """Handle a committed round; ``row`` is its line of metrics.jsonl."""

    def on_baseline_start(self, name: str, rounds: int) -> None:
        """Handle the start of a baseline's training."""

    def on_baseline_round(self, name: str, round: int, loss: float) -> None:
        """Handle a finished epoch of a baseline."""


class Listeners(Listener):
    """Passes every event on to several listeners, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners


def pass_on(events: type[Listener], forwarding: type[Listeners]) -> None:
    """Give a class a method for each event of another one, which passes the event on to ``listeners``."""

    def create_method(name: str) -> Callable[..., None]:
        def pass_event(self: Listeners, *args: object) -> None:
            for listener in self.listeners:
                getattr(listener, name)(*args)

        return pass_event

    for name in vars(events):
        if name.startswith("on_"):
            setattr(forwarding, name, create_method(name))


pass_on(Listener, Listeners)
