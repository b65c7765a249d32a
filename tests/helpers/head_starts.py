"""The heads with which runs begin that start them from statistics."""

from torch import Tensor

from fedspan.assembly.head import begin
from fedspan.assembly.run import Prepared
from fedspan.core.tensors import join_extra_name

HEAD = (join_extra_name("classifier.weight"), join_extra_name("classifier.bias"))


def start_of(run: Prepared) -> dict[str, Tensor]:
    """The head with which a run begins."""
    tensors = begin(run.federation, run.head).state.tensors
    return {name: tensors[name] for name in HEAD}
