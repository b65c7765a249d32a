"""Loading of labeled data and its partition among clients.

``config`` defines the options, ``loading.load`` reads the data, ``partition.partition`` divides it, ``plot`` draws the
partition. Only ``config`` is imported here: the others need ``datasets`` or ``matplotlib``, which take seconds that a
command that only parses options should not spend.
"""

from fedspan.data.config import DataConfig, PartitionConfig

__all__ = ["DataConfig", "PartitionConfig"]
