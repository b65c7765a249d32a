"""Reading labelled text and dividing it among clients.

``config`` says what a user may ask for, ``loading.load`` reads it, ``partition.partition`` divides it, ``plot`` draws
the division. Only ``config`` is imported here: the others need ``datasets`` or ``matplotlib``, seconds that a command
which only parses options should not pay.
"""

from fedspan.data.config import DataConfig, PartitionConfig

__all__ = ["DataConfig", "PartitionConfig"]
