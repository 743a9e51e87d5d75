"""Setup of a replay: the record, and whether it fits the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from msrl.config.schema import Config
from msrl.data.order import RowOrder
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import ManyErrors, MsrlError
from msrl.limits import print_note
from msrl.plan.derived import needs_greedy
from msrl.plan.replay import is_run
from msrl.plan.run_plan import RunPlan
from msrl.platforms import resolve
from msrl.platforms.base import Platform
from msrl.tracking.rollouts import RolloutRecord
from msrl.workflows.engine import choose_renderer
from msrl.workflows.rl.replay.initial_logprobs import read_initial_logprobs
from msrl.workflows.rl.replay.recording import RecordFacts, Recording, RunRecording
from msrl.workflows.rl.replay.responses import ResponseFile
from msrl.workflows.rl.setup import (
    RLSetup,
    checked_tokenizer,
    checkpoint_to_resume,
    count_steps,
    refuse_images,
    training_prompts,
)

_PATH = "rollout.replay.path"


@dataclass(frozen=True, kw_only=True)
class ReplaySetup(RLSetup):
    """Setup of a run that trains from recorded rollouts."""

    recording: Recording
    order: RowOrder  # of the groups

    @property
    def has_older_versions(self) -> bool:
        return self.recording.facts.has_older_versions

    @property
    def summary(self) -> str:
        return f"{self.recording.facts.num_groups:,} recorded groups, {super().summary}"


def prepare_replay(plan: RunPlan, platform: Platform | None = None) -> ReplaySetup:
    """Check everything that can be checked before the ranks start and return the setup of the run.

    `platform` is that of the configuration by default, which this machine must support then.

    Raises:
        MsrlError: The configuration, the record or the checkpoint is invalid.
    """
    config = plan.config
    platform = platform or resolve(config.cluster.platform)
    tokenizer = checked_tokenizer(plan)
    refuse_images(plan)
    recording = _open(plan, tokenizer)
    facts = recording.facts
    if mistakes := list(_mistakes(config, facts)):
        raise ManyErrors(mistakes)
    is_shuffled = config.rollout.replay.order == "shuffled"
    batch = config.rollout.prompts_per_step
    order = RowOrder(facts.num_groups, batch, config.run.seed, is_shuffled)
    num_steps = count_steps(config, Fraction(facts.num_groups, facts.num_epochs))
    resume, state = checkpoint_to_resume(plan, order, num_steps)
    if resume is not None and isinstance(recording, ResponseFile) and not facts.has_logprobs:
        recording = recording.with_logprobs(read_initial_logprobs(plan, recording))
    if plan.unread:
        print_note(
            f"{_PATH}={config.rollout.replay.path}: a replay samples and evaluates nothing, so "
            f"these keys have no effect: {', '.join(plan.unread)}"
        )
    return ReplaySetup(
        plan=plan,
        platform=platform,
        placement=plan.place(platform.ray_resource),
        state=state,
        num_steps=num_steps,
        resume=resume,
        tokenizer=tokenizer,
        recording=recording,
        order=order,
    )


def _open(plan: RunPlan, tokenizer: TextTokenizer) -> Recording:
    path = Path(str(plan.config.rollout.replay.path))
    if path.is_file():
        return ResponseFile(
            path,
            lambda: choose_renderer(plan.tokenizer_dir, plan.config.model.template),
            plan.shape.vocab_size,
            needs_rewards=not plan.scores_responses,
        )
    if not is_run(str(path)):
        raise MsrlError(
            f"{_PATH}={path}: no such file or folder. Name the folder of a run, or a JSONL file."
        )
    if plan.has_images:
        dataset = training_prompts(plan, tokenizer).dataset
        recording = RunRecording(path, lambda prompt: dataset[prompt.index].images)
    else:
        recording = RunRecording(path)
    _check_tokenizer(recording.first_record(), plan, tokenizer)
    return recording


def _check_tokenizer(record: RolloutRecord, plan: RunPlan, tokenizer: TextTokenizer) -> None:
    """Raise MsrlError if the tokens of the record mean other texts to the model."""
    role, text = record.messages[0]
    prompt_ids = record.token_ids[~record.is_sampled].tolist()
    is_prompt = role == "prompt" and record.episode is None and not record.images
    is_known = max(record.token_ids.tolist(), default=0) < plan.shape.vocab_size
    shown = tokenizer.backend.decode(prompt_ids, skip_special_tokens=False) if is_known else None
    if not is_known or (is_prompt and shown != text):
        raise MsrlError(
            f"{_PATH}={plan.config.rollout.replay.path}: was recorded with another tokenizer than "
            f"the one in {plan.tokenizer_dir}, so its ids mean other tokens. Use a model with the "
            "tokenizer of the recorded run."
        )


def _mistakes(config: Config, facts: RecordFacts) -> Iterator[str]:
    """Yield a line for each setting that does not fit the record."""
    rollout, shuffled = config.rollout, config.rollout.replay.order == "shuffled"
    batch, temperature = rollout.prompts_per_step, rollout.sampling.temperature
    if facts.groups_per_step and not shuffled and batch != facts.groups_per_step:
        yield (
            f"rollout.prompts_per_step={batch}: the recorded steps have {facts.groups_per_step} "
            "groups. Set it to this number, or rollout.replay.order to shuffled."
        )
    if rollout.samples_per_prompt != facts.group_size:
        yield (
            f"rollout.samples_per_prompt={rollout.samples_per_prompt}: the recorded groups have "
            f"{facts.group_size} responses. Set it to this number."
        )
    if facts.temperature is not None and temperature != facts.temperature:
        yield (
            f"rollout.sampling.temperature={temperature:g}: the responses were sampled with "
            f"{facts.temperature:g}, by which the trainer divides the logits. Set it to this value."
        )
    if facts.num_groups < batch:
        yield (
            f"rollout.prompts_per_step={batch}: the record has {facts.num_groups} groups. Set it "
            "to at most this number."
        )
        return
    yield from _short_limits(config, facts)
    yield from _missing_values(config, facts)
    steps, available = config.train.steps, facts.num_groups // batch
    if steps is not None and steps > available:
        yield (
            f"train.steps={steps}: the record has {available} steps. Set it to at most this "
            "number, or use train.epochs to pass over the record several times."
        )


def _short_limits(config: Config, facts: RecordFacts) -> Iterator[str]:
    """Yield a line for each limit of tokens below that of the record."""
    rollout = config.rollout
    for key, limit, needed in (
        ("rollout.max_prompt_tokens", rollout.max_prompt_tokens, facts.max_prompt_tokens),
        ("rollout.max_response_tokens", rollout.max_response_tokens, facts.max_response_tokens),
    ):
        if limit < needed:
            yield f"{key}={limit}: the record has up to {needed} tokens. Set it to this number."


def _missing_values(config: Config, facts: RecordFacts) -> Iterator[str]:
    """Yield a line for each setting that needs values that the record lacks."""
    estimator, environment = config.algo.advantage.estimator, config.environment
    if needs_greedy(config) and not facts.has_greedy:
        yield (
            f"algo.advantage.estimator={estimator}: compares with greedy responses, which the "
            "record lacks. Record a run with this estimator, or use another one."
        )
    if config.train.router.replay == "engine" and not facts.has_routes:
        yield (
            "train.router.replay=engine: the record lacks the experts that the engine chose. "
            "Record a run with this value, or set it to none or trainer."
        )
    if environment.is_on != facts.has_episodes:
        has, remedy = ("episodes", "Set it as in the recorded run")
        if environment.is_on:
            has, remedy = ("no episodes", "Remove the section")
        yield f"environment: the record has {has}. {remedy}."
    if config.algo.old_logprobs == "log-linear" and config.rollout.replay.order == "shuffled":
        yield (
            "algo.old_logprobs=log-linear: needs the number of updates since a token was sampled, "
            "which a shuffled record does not have. Set it to trainer or behavior."
        )
