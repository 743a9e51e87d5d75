"""Start of the training ranks: as processes of this machine, or as Ray actors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from msrl.cluster.ports import Ports
from msrl.config.schema import Config
from msrl.plan.derived import world_size
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.trainer.settings import RankSettings
from msrl.workflows.training.settings import worker_variables
from msrl.workflows.training.train_worker import SavePlan, TrainActor, TrainWorker
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.local import local_workers

if TYPE_CHECKING:
    from msrl.cluster.session import PlacedWorkers, Session


@contextmanager
def open_trainers(
    config: Config, settings: RankSettings, platform: Platform
) -> Iterator[TrainerGroup]:
    """Start the ranks of a training without engines; end them with the context.

    They are Ray actors if `cluster.address` is set, otherwise processes of this machine.

    Raises:
        MsrlError: The cluster does not answer, or there are fewer devices than ranks.
    """
    if config.cluster.address is not None:
        with _cluster_trainers(config, settings, platform) as trainers:
            yield trainers
        return
    with local_workers(
        partial(TrainWorker, settings),
        num_workers=world_size(config),
        platform=platform,
        env=worker_variables(config, platform),
        silence_s=config.cluster.rpc_timeout_s,
    ) as workers:
        trainers = TrainerGroup(workers)
        yield trainers
        trainers.close()


@contextmanager
def _cluster_trainers(
    config: Config, settings: RankSettings, platform: Platform
) -> Iterator[TrainerGroup]:
    from msrl.cluster.placement import Role, plan
    from msrl.cluster.session import ray_session
    from msrl.cluster.state import tls_files

    cluster, num_ranks, resource = config.cluster, world_size(config), platform.ray_resource
    with ray_session(
        cluster.address,
        num_devices=0,
        resource_name=resource,
        env=cluster.env,
        tls=tls_files(cluster.tls),
    ) as session:
        roles, ranks_per_node = [Role("actor", num_ranks)], num_ranks // cluster.nodes
        placed = session.create_placement(
            plan(roles, ranks_per_node, cluster.nodes, resource=resource),
            timeout_s=cluster.wait_for_nodes_s,
        )
        # A step, an evaluation and a save may take any time; collectives have their own timeout.
        yield ray_ranks(session, placed, config, settings, platform, timeout_s=math.inf)


def ray_ranks(
    session: Session,
    placed: PlacedWorkers,
    config: Config,
    settings: RankSettings,
    platform: Platform,
    *,
    role: str = "actor",
    timeout_s: float,
) -> TrainerGroup:
    """Create the actors of the ranks of a placed role. A call takes at most `timeout_s` seconds."""
    from msrl.workflows.training.transport.ray_actors import RayWorkers

    plan = placed.placement.role(role)
    num_ranks, nodes = plan.num_workers, len(set(plan.nodes))
    cluster = config.cluster
    env = {
        **platform.worker_environment(-(-num_ranks // nodes), spans_machines=nodes > 1),
        **worker_variables(config, platform),
    }
    arguments = [(settings, rank, num_ranks) for rank in range(num_ranks)]
    return TrainerGroup(
        RayWorkers(
            session,
            placed,
            role,
            TrainActor,
            arguments,
            [env] * num_ranks,
            timeout_s=timeout_s,
            silence_s=cluster.rpc_timeout_s,
            wait_for_nodes_s=cluster.wait_for_nodes_s,
            watched=(role,),
            rendezvous_ports=_rendezvous_ports(config),
        )
    )


def _rendezvous_ports(config: Config) -> Sequence[int]:
    """Return the ports for the rendezvous of the ranks; 0 selects any free port."""
    ports = config.cluster.ports
    return (0,) if ports is None else Ports.parse(ports).rendezvous


def save_plan(plan: RunPlan) -> SavePlan:
    """Return the settings for saving checkpoints."""
    in_background = plan.config.checkpoint.in_background
    return SavePlan(plan.checkpoint_dir, plan.model.hf_dir, in_background)
