"""From what a user has, a mesh or a group, to this rank's transport."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longpack.collectives.loopback import Loopback
from longpack.collectives.process_group import ProcessGroupTransport
from longpack.collectives.transport import Transport
from longpack.errors import CollectiveError


def as_transport(axis: "DeviceMesh | dist.ProcessGroup | Transport | None") -> Transport:
    """Return this rank's transport over an axis.

    Args:
        axis: a one-dimensional device mesh, a process group, a transport (returned as it is),
            or None for one rank alone, which needs no process group.

    Raises:
        CollectiveError: a mesh of more than one dimension, or one this rank is not part of.
    """
    if axis is None:
        return Loopback(1).transport(0)
    if isinstance(axis, Transport):
        return axis
    if isinstance(axis, DeviceMesh):
        if axis.ndim != 1:
            raise CollectiveError(
                f"the mesh has {axis.ndim} dimensions {axis.mesh_dim_names} of sizes "
                f"{tuple(axis.shape)}; pass the one that splits the row, as mesh['cp']"
            )
        group = axis.get_group()
        if dist.get_world_size(group) != axis.size():
            raise CollectiveError(
                f"the mesh has {axis.size()} ranks but its process group has "
                f"{dist.get_world_size(group)}: build the mesh with init_device_mesh and slice it "
                "by name"
            )
        return ProcessGroupTransport(group)
    if isinstance(axis, dist.ProcessGroup):
        return ProcessGroupTransport(axis)
    raise CollectiveError(
        f"expected a device mesh, a process group or None for the axis, got {type(axis).__name__}"
    )
