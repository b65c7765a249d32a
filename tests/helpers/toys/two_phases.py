"""A method whose extras train in both of its phases: pFedLoRU without the rest that it gives them in the first."""

from dataclasses import dataclass, replace
from typing import final

from fedspan.core.method import Memory, Wrapper
from fedspan.core.values import Client, Job, Message


@final
@dataclass(frozen=True, kw_only=True)
class ExtrasInBothPhases(Wrapper):
    """Around ``PFedLoRU``, inside ``WithExtras``."""

    def start(self, message: Message, client: Client | None, memory: Memory, round: int) -> Job:
        return replace(self.inner.start(message, client, memory, round), extras=True)
