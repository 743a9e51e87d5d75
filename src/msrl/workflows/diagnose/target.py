"""Model or run to diagnose: configuration, weights, prompts and rollout record."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from msrl.config.schema import Config
from msrl.data.files.location import names_rows
from msrl.data.render import Renderer
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.models.paths import is_adapter_folder
from msrl.plan.run_plan import RunPlan, resolve
from msrl.trainer.checkpointing.resume import SavedTraining, saved_steps
from msrl.trainer.settings import RankSettings
from msrl.types import Conversation, Message, Prompt, SamplingParams
from msrl.workflows.engine import choose_renderer, open_model
from msrl.workflows.evaluate.checkpoints import Checkpoint, open_checkpoint
from msrl.workflows.row_cache import row_settings
from msrl.workflows.training.settings import rank_settings
from msrl.workflows.view.samples import ViewSample, read_samples, sample_files, step_of

if TYPE_CHECKING:
    from msrl.checkpoint.source import WeightSource

QUESTIONS = (
    "What is 17 + 25?",
    "Name three rivers of Europe and the seas that they flow into.",
    "def fibonacci(n: int) -> int:",
    "Write a sentence about the moon. Then translate it into French.",
    "\u5df2\u77e5 x + y = 10\uff0c\u6c42 x \u7684\u6700\u5927\u503c\u3002",
    "A train travels 120 km in 1.5 hours. How fast is it?",
    "List the prime numbers below 30, separated by commas.",
    "Why is the sky blue? Answer in two sentences.",
)
_MAX_TOKENS = 64  # of a response
_MAX_PROMPTS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """Model or checkpoint of a run to diagnose.

    Attributes:
        plan: Plan of a train-grpo run with this model.
        source: Weights as the engine must sample with them, with a merged adapter.
        base: Weights without the adapter; None without one.
        settings: Settings of the ranks.
        resume: Checkpoint that ranks with an adapter load; None if `settings` name the weights.
        reference_dir: Folder of the tokenizer and chat template that belong to the weights.
        renderer: Renderer of the prompts that the run trains on.
        prompts: Prompts to sample from.
        sampling: Sampling parameters.
        version: Policy version of the weights.
        adapted: Weights that have an adapter.
        recorded: Samples of the rollout record that this version has sampled.
        has_folder_template: False if the renderer may have another template than `reference_dir`,
            as the data of a run may have another one than its initial model.
    """

    plan: RunPlan
    source: WeightSource
    base: WeightSource | None
    settings: RankSettings
    resume: SavedTraining | None
    reference_dir: Path
    renderer: Renderer
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    version: int
    adapted: frozenset[str] = frozenset()
    recorded: tuple[ViewSample, ...] = ()
    has_folder_template: bool = True

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence in the engine, in tokens."""
        return min(self.plan.max_model_len, self.plan.shape.max_position_embeddings)


def open_target(config: Config, platform: str, run_dir: Path | None) -> Target:
    """Open the model of a configuration, or the newest checkpoint of its run.

    Raises:
        MsrlError: The model cannot be read or does not generate text.
    """
    plan = resolve(config, "train-grpo")
    path = str(plan.model.weights)
    if is_adapter_folder(path):
        raise MsrlError(
            f"{path}: is an adapter without its base model. Merge it: msrl convert-ckpt hf2hf "
            f"--load BASE --lora {path} --save FOLDER"
        )
    if not plan.sampling.temperature:
        raise MsrlError(
            "rollout.sampling.temperature=0: greedy decoding has no log-probabilities to compare. "
            "Set it above 0."
        )
    if plan.shape.reward_head:
        raise MsrlError(f"{path}: generates scores instead of text. Name a language model.")
    return _open_model(plan, platform) if run_dir is None else _open_run(plan, platform, run_dir)


def _open_model(plan: RunPlan, platform: str) -> Target:
    source = open_model(str(plan.model.weights), "model.path")
    renderer = choose_renderer(plan.tokenizer_dir, plan.config.model.template)
    return Target(
        plan=plan,
        source=source,
        base=None,
        settings=_forward_only(rank_settings(plan, platform)),
        resume=None,
        reference_dir=plan.model.hf_dir,
        renderer=renderer,
        prompts=_questions(renderer),
        sampling=_short(plan.sampling),
        version=0,
    )


def _open_run(plan: RunPlan, platform: str, run_dir: Path) -> Target:
    files = {step_of(path): path for path in sample_files(run_dir, "rollout")}
    own = run_dir.absolute() / "checkpoints"
    root = own if own.is_dir() else plan.checkpoint_dir
    step = choose_step(saved_steps(root), files)
    samples = _samples(plan, files, step)
    model = _open_model(plan, platform)
    prompts = _recorded_prompts(samples) or model.prompts
    model = replace(model, renderer=_data_renderer(plan), prompts=prompts)
    if step == 0:
        return replace(model, recorded=_sampled_by(samples, 0), has_folder_template=False)
    saved = SavedTraining(root, step)
    source = open_checkpoint(Checkpoint(f"step {step}", run_dir.name, root, step, step))
    settings, base, resume = rank_settings(plan, platform), None, None
    adapted = frozenset[str]()
    if plan.train.lora.rank is None:
        settings = _forward_only(settings, root, step)
    else:
        base, resume, adapted = model.source, saved, _adapted_names(source)
    own_files = root / "hf"
    return replace(
        model,
        source=source,
        base=base,
        settings=replace(settings, reference=None, critic=None, reward_models={}),
        resume=resume,
        reference_dir=own_files if own_files.is_dir() else model.reference_dir,
        version=step,
        adapted=adapted,
        recorded=_sampled_by(samples, step),
    )


def _adapted_names(source: WeightSource) -> frozenset[str]:
    from msrl.checkpoint.adapters.merge import MergedSource

    return frozenset(source.adapter.deltas) if isinstance(source, MergedSource) else frozenset()


def _data_renderer(plan: RunPlan) -> Renderer:
    """Return the renderer with the template that the prompts of a run were preprocessed with."""
    name = next(iter(plan.data.blend), plan.data.train)
    if name is not None and names_rows(name):
        settings = row_settings(plan, name)
        return choose_renderer(plan.tokenizer_dir, settings.template, day=settings.date)
    manifest = None if name is None else plan.datasets[name].manifest
    if manifest is None:
        return choose_renderer(plan.tokenizer_dir, None)
    with contextlib.suppress(MsrlError):  # an exported template has the day of the rows already
        return choose_renderer(plan.tokenizer_dir, manifest.template, day=manifest.date or None)
    return choose_renderer(plan.tokenizer_dir, manifest.template)


def _forward_only(
    settings: RankSettings, model: Path | None = None, step: int | None = None
) -> RankSettings:
    """Return the settings of ranks that only score, with the weights of a step of a run."""
    assert settings.policy is not None
    policy = replace(settings.policy, optimizer=None, is_random=False)
    if model is not None:
        policy = replace(policy, model=model.absolute(), iteration=step)
    return replace(settings, policy=policy, reference=None, critic=None, reward_models={})


def choose_step(steps: Sequence[int], files: Mapping[int, Path]) -> int:
    """Return the newest saved step whose policy sampled recorded rollouts, else the newest one."""
    sampled = [step for step in steps if step + 1 in files]
    newest = sampled or steps
    return newest[-1] if newest else 0


def _samples(plan: RunPlan, files: Mapping[int, Path], step: int) -> list[ViewSample]:
    """Return the rollouts that version `step` sampled, else the rollouts of the newest step."""
    number = step + 1 if step + 1 in files else max(files, default=None)
    if number is None:
        return []
    samples = read_samples(files[number], plan.rollout.samples_per_prompt)
    if any(sample.images for sample in samples):
        print_note(
            "the record does not contain the images of prompts: sequences without images are "
            "sampled and scored, and the stages of one image are compared"
        )
    return samples


def _sampled_by(samples: Sequence[ViewSample], version: int) -> tuple[ViewSample, ...]:
    chosen = [
        sample
        for sample in samples
        if "behavior" in sample.values
        and not sample.images
        and {number for number, _ in sample.versions} == {version}
    ]
    return tuple(chosen[:_MAX_PROMPTS])


def _recorded_prompts(samples: Sequence[ViewSample]) -> tuple[Prompt, ...]:
    """Return the prompts of different groups. Prompts with images are left out: see `_samples`."""
    groups = {
        sample.group: sample
        for sample in reversed(samples)
        if sample.is_sampled.any() and not sample.images
    }
    chosen = [groups[number] for number in sorted(groups)][:_MAX_PROMPTS]
    return tuple(
        Prompt(number, sample.token_ids[: int(np.argmax(sample.is_sampled))])
        for number, sample in enumerate(chosen)
    )


def _questions(renderer: Renderer) -> tuple[Prompt, ...]:
    conversations = [Conversation((Message("user", question),)) for question in QUESTIONS]
    return tuple(
        Prompt(number, renderer.prompt(conversation))
        for number, conversation in enumerate(conversations)
    )


def _short(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling of a run with one short response per prompt that nothing stops."""
    return replace(
        sampling,
        num_samples=1,
        max_tokens=min(sampling.max_tokens, _MAX_TOKENS),
        stop=(),
        stop_token_ids=(),
        ignore_eos=True,
        with_routes=False,
    )
