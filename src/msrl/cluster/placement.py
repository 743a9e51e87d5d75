"""Placement of roles on devices: the node and devices of every worker.

This is pure arithmetic, so a dry run can show the placement of a launch. A bundle is one device.
The bundles of a node are reserved together on one physical node, so a worker with several devices
never spans nodes. Roles that share devices each request a fraction of the device of their first
bundle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msrl.errors import MsrlError

_SHARES_PER_DEVICE = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True, slots=True)
class Role:
    """Workers that a role needs.

    The actor needs TP x PP x DP workers of one device, the rollout needs DP engines of TP devices.
    A separate role shares no device with another role.
    """

    name: str
    num_workers: int
    devices_per_worker: int = 1
    is_separate: bool = False


@dataclass(frozen=True, slots=True)
class RolePlan:
    """Placement of one role: the node of each worker and its bundles within the node.

    Worker i of an actor is rank i.
    """

    role: str
    num_workers: int
    devices_per_worker: int
    nodes: tuple[int, ...]  # [num_workers]
    bundle_indices: tuple[tuple[int, ...], ...]  # [num_workers][devices_per_worker]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Devices of one node that the run reserves: bundles 0 .. num_bundles - 1."""

    node: int
    num_bundles: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Placement of one worker.

    `share` is the fraction of the device of its first bundle that it requests from Ray.
    """

    role: str
    worker: int
    node: int
    bundle_indices: tuple[int, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a run on devices of the logical `resource` (one unit per device)."""

    resource: str
    bundles: tuple[NodePlan, ...]
    roles: tuple[RolePlan, ...]
    assignments: tuple[Assignment, ...]

    @property
    def num_devices(self) -> int:
        return sum(node.num_bundles for node in self.bundles)

    def worker(self, role: str, index: int) -> Assignment:
        """Return the placement of worker `index` of `role`.

        Raises:
            KeyError: The plan has no such worker.
        """
        for assignment in self.assignments:
            if (assignment.role, assignment.worker) == (role, index):
                return assignment
        raise KeyError(f"{role} {index}")

    def role(self, name: str) -> RolePlan:
        """Return the placement of a role.

        Raises:
            KeyError: The plan has no such role.
        """
        for role in self.roles:
            if role.role == name:
                return role
        raise KeyError(name)

    def describe(self) -> tuple[str, ...]:
        """Return one line per device for a dry run: `node 0 device 1: actor 1, rollout 0`."""
        return tuple(
            f"node {node.node} device {bundle}: "
            f"{', '.join(self._workers_on(node.node, bundle)) or 'idle'}"
            for node in self.bundles
            for bundle in range(node.num_bundles)
        )

    def _workers_on(self, node: int, bundle: int) -> Iterator[str]:
        return (
            f"{a.role} {a.worker}"
            for a in self.assignments
            if a.node == node and bundle in a.bundle_indices
        )


def plan(
    roles: Sequence[Role],
    devices_per_node: int,
    num_nodes: int = 1,
    *,
    resource: str,
) -> Placement:
    """Place the workers of `roles` on `num_nodes` nodes of `devices_per_node` devices each.

    All roles start at the first device and share devices. A worker that does not fit into the
    remaining devices of a node starts on the next one.

    A role with `is_separate` gets further nodes of at most as many devices. A machine with enough
    devices may hold several of these nodes.

    Raises:
        MsrlError: The workers do not fit. The message compares the needed and the available
            devices.
    """
    _check_devices(roles, devices_per_node)
    planned = [
        _role_plan(role, _starts(role, 0, devices_per_node), devices_per_node)
        for role in roles
        if not role.is_separate
    ]
    _check_fits(planned, devices_per_node, num_nodes)
    first_node = 1 + max((node for role in planned for node in role.nodes), default=-1)
    for role in (role for role in roles if role.is_separate):
        size = max(devices_per_node, role.devices_per_worker)
        planned.append(_role_plan(role, _starts(role, first_node * size, size), size))
        first_node = planned[-1].nodes[-1] + 1
    return Placement(resource, _node_plans(planned), tuple(planned), _assignments(planned))


def _check_devices(roles: Sequence[Role], devices_per_node: int) -> None:
    for role in roles:
        if role.devices_per_worker > devices_per_node and not role.is_separate:
            raise MsrlError(
                f"cluster: one worker of {role.name} needs {role.devices_per_worker} devices "
                f"of one node, but a node has {devices_per_node}."
                " Use nodes with more devices or a smaller tensor-parallel size."
            )


def _starts(role: Role, start: int, devices_per_node: int) -> list[int]:
    """Return the first device of each worker, counted over all nodes."""
    starts: list[int] = []
    for _ in range(role.num_workers):
        remaining = devices_per_node - start % devices_per_node
        if role.devices_per_worker > remaining:
            start += remaining
        starts.append(start)
        start += role.devices_per_worker
    return starts


def _role_plan(role: Role, starts: Sequence[int], devices_per_node: int) -> RolePlan:
    nodes: list[int] = []
    bundles: list[tuple[int, ...]] = []
    for start in starts:
        node, first = divmod(start, devices_per_node)
        nodes.append(node)
        bundles.append(tuple(range(first, first + role.devices_per_worker)))
    return RolePlan(
        role.name, role.num_workers, role.devices_per_worker, tuple(nodes), tuple(bundles)
    )


def _check_fits(planned: Sequence[RolePlan], devices_per_node: int, num_nodes: int) -> None:
    needed = 1 + max((node for role in planned for node in role.nodes), default=-1)
    if needed <= num_nodes:
        return
    needs = ", ".join(
        f"{r.role} {r.num_workers} x {r.devices_per_worker} = "
        f"{r.num_workers * r.devices_per_worker}"
        for r in planned
    )
    raise MsrlError(
        f"cluster: the run needs {needed} node(s) of {devices_per_node} device(s) (shared: "
        f"{needs}),"
        f" but there are {num_nodes} x {devices_per_node} = {num_nodes * devices_per_node}. "
        "Add nodes (msrl cluster join) or use fewer workers."
    )


def _node_plans(planned: Sequence[RolePlan]) -> tuple[NodePlan, ...]:
    used: dict[int, int] = {}
    for role in planned:
        for node, bundles in zip(role.nodes, role.bundle_indices, strict=True):
            used[node] = max(used.get(node, 0), bundles[-1] + 1)
    return tuple(NodePlan(node, used[node]) for node in sorted(used))


def _assignments(planned: Sequence[RolePlan]) -> tuple[Assignment, ...]:
    crowd = Counter(
        (node, bundle)
        for role in planned
        for node, own in zip(role.nodes, role.bundle_indices, strict=True)
        for bundle in own
    )
    return tuple(
        Assignment(
            role.role,
            worker,
            node,
            own,
            _SHARES_PER_DEVICE // crowd[node, own[0]] / _SHARES_PER_DEVICE,
        )
        for role in planned
        for worker, (node, own) in enumerate(zip(role.nodes, role.bundle_indices, strict=True))
    )
