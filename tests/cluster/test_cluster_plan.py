"""Placement of workers on devices, compared with placements by hand on small clusters."""

from __future__ import annotations

import pytest

from msrl.cluster.placement import NodePlan, Role, plan
from msrl.errors import MsrlError
from support import assert_mentions


def place_all(roles, devices_per_node, num_nodes=1):
    """Return every worker as (role, worker, node, bundles, share)."""
    placement = plan(roles, devices_per_node, num_nodes, resource="device")
    return [(a.role, a.worker, a.node, a.bundle_indices, a.share) for a in placement.assignments]


@pytest.mark.parametrize(
    ("roles", "devices_per_node", "num_nodes", "expected"),
    [
        ([Role("actor", 1)], 1, 1, [("actor", 0, 0, (0,), 1.0)]),
        (
            [Role("actor", 2), Role("rollout", 1, 2)],
            2,
            1,
            [
                ("actor", 0, 0, (0,), 0.5),
                ("actor", 1, 0, (1,), 0.5),
                ("rollout", 0, 0, (0, 1), 0.5),
            ],
        ),
        (
            [Role("actor", 1), Role("rollout", 1), Role("reference", 1)],
            1,
            1,
            [
                ("actor", 0, 0, (0,), 0.3333),
                ("rollout", 0, 0, (0,), 0.3333),
                ("reference", 0, 0, (0,), 0.3333),
            ],
        ),
        (
            [Role("actor", 4), Role("rollout", 2, 2)],
            2,
            2,
            [("actor", i, i // 2, (i % 2,), 0.5) for i in range(4)]
            + [("rollout", 0, 0, (0, 1), 0.5), ("rollout", 1, 1, (0, 1), 0.5)],
        ),
    ],
)
def test_workers_are_placed_on_the_expected_devices(roles, devices_per_node, num_nodes, expected):
    assert place_all(roles, devices_per_node, num_nodes) == expected


def test_a_worker_of_several_devices_never_spans_two_nodes():
    assert [
        (node, bundles) for _, _, node, bundles, _ in place_all([Role("rollout", 2, 2)], 3, 2)
    ] == [(0, (0, 1)), (1, (0, 1))]


def test_only_the_devices_in_use_are_reserved_and_idle_ones_are_listed():
    placement = plan([Role("actor", 3), Role("rollout", 2, 2)], 4, 2, resource="device")
    assert placement.bundles == (NodePlan(0, 4),)
    separate = Role("critic", 1, 3, is_separate=True)
    placement = plan([Role("actor", 3), separate], 4, 2, resource="device")
    assert placement.bundles == (NodePlan(0, 3), NodePlan(1, 3))
    assert placement.num_devices == 3 + 3
    uneven = plan([Role("engine", 2, 2), Role("actor", 6)], 3, 2, resource="device")
    assert uneven.describe()[2] == "node 0 device 2: actor 2"
    assert uneven.describe()[5] == "node 1 device 2: actor 5"


def test_shares_on_a_device_never_add_up_to_more_than_the_device():
    for count in range(1, 12):
        shares = [share for *_, share in place_all([Role(f"role{i}", 2) for i in range(count)], 2)]
        assert sum(round(share * 10_000) for share in shares) <= 2 * 10_000  # Ray's unit
        assert min(shares) > 0


def test_a_role_plan_lists_the_bundles_of_each_of_its_workers():
    placement = plan([Role("actor", 4)], 2, 2, resource="device")
    assert placement.roles[0].bundle_indices == ((0,), (1,), (0,), (1,))
    assert placement.roles[0].nodes == (0, 0, 1, 1)
    assert placement.worker("actor", 3).node == 1


@pytest.mark.parametrize(
    ("roles", "devices_per_node", "num_nodes", "keywords"),
    [
        ([Role("actor", 4)], 2, 1, ("2 node", "actor 4 x 1 = 4", "1 x 2 = 2")),
        ([Role("rollout", 1, 4)], 2, 2, ("rollout", "4 devices", "2")),
    ],
)
def test_an_impossible_plan_is_refused_with_needed_and_available_devices(
    roles, devices_per_node, num_nodes, keywords
):
    with pytest.raises(MsrlError) as caught:
        plan(roles, devices_per_node, num_nodes, resource="device")
    assert_mentions(caught.value, *keywords)
