"""Admission of new groups in asynchronous rollouts.

A step trains on B groups. The policy version v is the number of updates of the policy, and S is the
largest allowed difference between the version that trains on a group and the oldest version that
sampled one of its tokens. At most (S + v + 1) B groups may have been started in total at version v:
if groups are trained in the order in which they are started, a group that starts now is trained by
version v + S at the latest.
"""

from __future__ import annotations


def admission(
    max_running: int, running: int, staleness: int, version: int, batch: int, accepted: int
) -> int:
    """Return the number of groups that may start now.

    Args:
        max_running: Largest number of groups that generate at the same time.
        running: Number of groups that generate now.
        staleness: Staleness bound S.
        version: Policy version v of the engines, which samples the first token of a new group.
        batch: Number B of groups per step.
        accepted: Number of groups that are generated, including all that were trained. In a resumed
            run it starts at v B plus the finished groups of the checkpoint.
    """
    free = max_running - running
    allowed = (staleness + version + 1) * batch - (accepted + running)
    return max(0, min(free, allowed))
