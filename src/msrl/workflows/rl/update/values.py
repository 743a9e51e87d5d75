"""Values of tokens that a step needs before its first update.

In: the arrays of a step, the models on the ranks and teachers on servers. Out: `StepValues`, with
only what the configured advantages and losses need.

P prompts, G completions per prompt, N sampled tokens, end to end, S sequences of T tokens, L
mixture layers of the model, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.algorithms.packing import has_all_routes
from msrl.algorithms.rollout_arrays import RolloutArrays
from msrl.algorithms.selection import Flags
from msrl.algorithms.token_rewards import Reals
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.plan.derived import needs_critic, needs_distribution, needs_old_logprobs
from msrl.trainer.objective.batches import BatchLimits
from msrl.trainer.objective.requests import TokenRequest, TokenValue
from msrl.types import Floats, Routes
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.teacher_servers import TeacherServers, teacher_advantages
from msrl.workflows.training.trainer_group import ForwardResult, TrainerGroup


@dataclass(frozen=True, slots=True)
class StepValues:
    """Values of every token; None if a step does not need them.

    Attributes:
        policy: Log-probabilities of the policy before the first update.
        reference: Log-probabilities of the reference.
        squared_probabilities: Sums over the vocabulary of the policy's squared probabilities.
        entropies: Entropies of the policy.
        routes: Routes of the policy's pass.
        critic: Value of the state before each sampled token.
        teachers: Advantages of teachers on servers, without their coefficient.
    """

    policy: tuple[Floats, ...] | None = None  # S of [T]
    reference: tuple[Floats, ...] | None = None  # S of [T]
    squared_probabilities: tuple[Floats, ...] | None = None  # S of [T]
    entropies: tuple[Floats, ...] | None = None  # S of [T]
    routes: tuple[Routes, ...] | None = None  # S of [T, L, k]
    critic: Reals | None = None  # [N]
    teachers: Reals | None = None  # [N]


def step_values(
    arrays: RolloutArrays,
    is_trained: Flags,  # [P, G]
    trainers: TrainerGroup,
    teachers: TeacherServers,
    config: Config,
    clock: Clock,
) -> StepValues:
    """Run the passes of a step, while teachers on servers compute.

    Raises:
        MsrlError: A response has no routes to replay, or a request to a teacher failed.
    """
    sequences, limits = arrays.sequences, forward_limits(config)
    if config.train.router.replay == "engine" and not has_all_routes(sequences):
        raise MsrlError(
            "train.router.replay=engine: a response has no routes, because a run without them "
            "sampled it. Resume with the value of that run, or set it to trainer."
        )
    critic = taught = None
    with teachers.request(arrays, is_trained) as answers:
        with clock("logprobs"):
            # A reference on separate devices computes alongside the policy.
            pending = {
                request.model: trainers.begin_forward(request, sequences, limits)
                for request in _requests(config, with_teachers=bool(teachers))
            }
            done = {model: calls.wait() for model, calls in pending.items()}
        policy = done.get("policy", ForwardResult({}))
        if needs_critic(config):
            with clock("values"):
                request = TokenRequest(("values",), model="critic")
                critic = arrays.gather(trainers.forward(request, sequences, limits)["values"])
        if teachers:
            with clock("teachers"):
                taught = arrays.gather(teacher_advantages(policy["logprobs"], answers()))
    return StepValues(
        policy.by_name.get("logprobs"),
        done["reference"]["logprobs"] if "reference" in done else None,
        policy.by_name.get("squared_probabilities"),
        policy.by_name.get("entropies"),
        policy.routes,
        critic,
        taught,
    )


def _requests(config: Config, *, with_teachers: bool) -> list[TokenRequest]:
    """Return the requests to policy and reference.

    A step with one update needs the policy's log-probabilities only for its advantages: its loss
    computes them.
    """
    algo, kl = config.algo, config.algo.kl
    temperature, requests = config.rollout.sampling.temperature, list[TokenRequest]()
    values, has_norms = list[TokenValue](), needs_distribution(config)
    if needs_old_logprobs(config) or kl.reward.coef or has_norms or with_teachers:
        values.append("logprobs")
    if has_norms:
        values.append("squared_probabilities")
    if algo.top_entropy < 1.0:
        values.append("entropies")
    if values:
        # The updates of the step replay the routes of this pass, which itself replays the engine's.
        records_routes = config.train.router.replay == "trainer" and "logprobs" in values
        requests.append(TokenRequest(tuple(values), "policy", temperature, records_routes))
    if kl.reward.coef or (kl.loss.coef and kl.loss.estimator != "full"):
        requests.append(TokenRequest(("logprobs",), "reference", temperature))
    return requests


def forward_limits(config: Config) -> BatchLimits:
    """Return the limits of a micro-batch of a pass without gradients."""
    train = config.train
    return BatchLimits.of(train, train.forward_micro_batch or train.micro_batch)
