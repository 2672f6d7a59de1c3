"""A frozen base model whose layers are spread over a group: each rank holds its part; a layer is whole while it runs.

FSDP2 (``torch.distributed.fsdp.fully_shard``) on a mesh made of one of our groups; the default group is never computed
with. Its all-gathers go around ``Group``, so they are in no chain; sync points and the watchdog still hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from descant.distributed.mesh import Group


def shard_layers(root: nn.Module, layers: Sequence[nn.Module], group: Group) -> None:
    """In place. Each layer is gathered before its forward and its backward, and resharded after each; so all ranks of
    the group have to run every layer equally often. Layers move to the group's device; the rest of ``root``, which
    calls them, stays whole, where it is."""
    mesh = DeviceMesh.from_group(group.process_group, "cuda" if group.stream_ordered else "cpu")
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = {parameter for parameter in root.parameters() if id(parameter) not in inside}
    fully_shard(root, mesh=mesh, ignored_params=rest)  # knows the layers' order, and gathers the next one ahead
