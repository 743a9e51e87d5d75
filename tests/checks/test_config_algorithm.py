"""The `algo` section: presets, invalid settings, and advice on settings that train badly."""

from __future__ import annotations

from pathlib import Path

import pytest

from config_inputs import make_working_folder, skip_input_checks
from msrl import registry
from msrl.checks.algorithm import advice
from msrl.cli.configuration import load_configuration as load
from msrl.config.presets import preset_names
from msrl.config.schema import AlgoConfig
from msrl.config.show import to_yaml
from msrl.errors import ManyErrors, MsrlError
from msrl.plan.derived import aggregate_constant, needs_reference
from msrl.workflows.rl.setup import count_steps
from msrl.workflows.rl.update.updater import policy_loss
from support import assert_each_mentions, assert_mentions, mentions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with all inputs of a training."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def resolve(*sets: str):
    return load(["grpo.yaml"], sets, command="train-grpo")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_configuration(folder: Path, name: str):
    resolved = resolve(f"algo.preset={name}")
    algo = resolved.config.algo
    assert algo.advantage.estimator in registry.names("msrl.algorithms.advantages")
    assert policy_loss(resolved.config).policy_loss == algo.policy_loss
    assert not [line for line in advice(resolved, "train-grpo") if name != "reinforce"]
    assert f"# preset {name}" in to_yaml(resolved.config, resolved.origins)
    assert algo != AlgoConfig(preset=algo.preset), "a preset that is the defaults"


def test_a_preset_fills_only_what_is_not_set_in_file_flag_or_set(folder: Path):
    (folder / "mine.yaml").write_text("algo: {preset: dapo, clip: {low: 0.1}}\n", encoding="utf-8")
    resolved = load(
        ["grpo.yaml", "mine.yaml"], ["algo.mask.equal_groups=false"], command="train-grpo"
    )
    algo = resolved.config.algo
    assert (algo.clip.low, algo.clip.high, algo.mask.equal_groups, algo.kl.loss.coef) == (
        0.1,
        0.28,
        False,
        0.0,
    )
    origins = [
        str(resolved.origins[f"algo.{key}"])
        for key in ("clip.low", "clip.high", "mask.equal_groups", "kl.loss.coef")
    ]
    assert origins == ["mine.yaml:1", "preset dapo", "--set", "default"]
    assert (
        resolved.is_set("algo.clip.low")
        and not resolved.is_set("algo.clip.high")
        and resolved.is_set("algo.preset")
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("grpo", ("group_norm", "token", "ppo", 0.2, 0.2, "seq-mean-token-mean", 0.001)),
        ("dr_grpo", ("dr_grpo", "token", "ppo", 0.2, 0.2, "seq-sum-over-constant", 0.0)),
        ("dapo", ("group_norm", "token", "ppo", 0.2, 0.28, "token-mean", 0.0)),
        ("gspo", ("group_norm", "sequence", "ppo", 3e-4, 4e-4, "seq-mean-token-mean", 0.0)),
        ("gmpo", ("group_norm", "token", "gmpo", 0.4, 0.4, "seq-mean-token-mean", 0.0)),
        ("cpgd", ("cpgd", "token", "cpgd", 0.2, 0.2, "token-mean", 0.0)),
        ("rloo", ("rloo", "token", "ppo", 0.2, 0.2, "seq-mean-token-sum", 0.0)),
        ("reinforce", ("reinforce", "token", "vanilla", 0.2, 0.2, "seq-mean-token-sum", 0.0)),
        ("reinforce_pp", ("reinforce_pp", "token", "ppo", 0.2, 0.2, "token-mean", 0.0)),
        ("ppo", ("gae", "token", "ppo", 0.2, 0.2, "token-mean", 0.0)),
        ("topr", ("dr_grpo", "token", "topr", 0.2, 0.2, "seq-mean-token-sum", 0.0)),
        ("cispo", ("group_norm", "token", "cispo", 1.0, 4.0, "token-mean", 0.0)),
    ],
)
def test_presets_have_the_settings_of_their_papers(
    folder: Path, preset: str, expected: tuple[object, ...]
):
    algo = resolve(f"algo.preset={preset}").config.algo
    clip = algo.clip
    assert (
        algo.advantage.estimator,
        algo.ratio,
        algo.policy_loss,
        clip.low,
        clip.high,
        algo.aggregate.mode,
        algo.kl.loss.coef,
    ) == expected


def test_presets_place_the_kl_term_like_their_papers(folder: Path):
    kl = {name: resolve(f"algo.preset={name}").config.algo.kl for name in preset_names()}
    assert {
        name: (section.reward.coef, section.reward.estimator)
        for name, section in kl.items()
        if section.reward.coef
    } == {"reinforce_pp": (1e-3, "k1")}
    assert {
        name: (section.loss.coef, section.loss.estimator)
        for name, section in kl.items()
        if section.loss.coef
    } == {"grpo": (1e-3, "k3")}


def test_a_preset_beside_a_file_that_sets_all_its_keys_is_refused(folder: Path):
    resolved = resolve()
    (folder / "complete.yaml").write_text(to_yaml(resolved.config, resolved.origins))
    with pytest.raises(
        MsrlError, match=mentions("algo.preset=gspo", "complete.yaml", "algo.ratio")
    ):
        load(["complete.yaml"], ["algo.preset=gspo"], command="train-grpo")
    load(["complete.yaml"], ["algo.preset=gspo", "algo.ratio=sequence"], command="train-grpo")


def test_an_unknown_preset_is_refused_by_name(folder: Path):
    with pytest.raises(ManyErrors, match=mentions("algo.preset=gsp", "gspo")):
        resolve("algo.preset=gsp")


@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("sets", "line"),
    [
        *(
            (
                (f"algo.advantage.estimator={name}",),
                (f"algo.advantage.estimator={name}", "environment.name"),
            )
            for name in ("gigpo", "step_reinforce", "agentic_reinforce")
        ),
        (
            ("algo.advantage.lambda=0.9",),
            ("algo.advantage.lambda=0.9", "group_norm", "gae"),
        ),
        (
            ("algo.value.clip=0.2",),
            ("algo.value.clip=0.2", "group_norm", "critic"),
        ),
        (
            ("algo.preset=dapo", "cluster.roles.critic.optimizer.lr=0.1"),
            ("cluster.roles.critic.optimizer.lr=0.1", "group_norm", "critic"),
        ),
        (
            ("algo.preset=ppo", "algo.value.warmup_steps=30", "train.steps=30"),
            ("algo.value.warmup_steps=30", "train.steps=30"),
        ),
        (
            (
                "algo.preset=ppo",
                "cluster.roles.critic.optimizer.lr=1e-9",
                "train.optimizer.min_lr=1e-8",
            ),
            ("cluster.roles.critic.optimizer.lr=1e-09", "1e-08"),
        ),
        (
            ("algo.preset=ppo", "cluster.roles.critic.load=nowhere"),
            ("cluster.roles.critic.load=nowhere", "folder"),
        ),
        (("algo.advantage.gamma=0.9",), ("algo.advantage.gamma=0.9", "group_norm")),
        (
            ("algo.policy_loss=gmpo", "algo.ratio=sequence"),
            ("algo.ratio=sequence", "algo.policy_loss=gmpo", "token"),
        ),
        (
            ("algo.policy_loss=tis", "algo.clip.low=0.1"),
            ("algo.clip.low=0.1", "algo.policy_loss=tis"),
        ),
        (
            ("algo.policy_loss=gmpo", "algo.clip.dual=3"),
            ("algo.clip.dual=3.0", "algo.policy_loss=gmpo"),
        ),
        (("algo.clip.dual=1.1",), ("algo.clip.dual=1.1", "algo.clip.high", "1.2")),
        (
            ("algo.kl.controller.kind=adaptive", "algo.kl.loss.coef=0.1"),
            ("algo.kl.controller.kind=adaptive", "algo.kl.controller.target"),
        ),
        (
            ("algo.kl.controller={kind: adaptive, target: 0.1}",),
            ("algo.kl.controller.kind=adaptive", "algo.kl.loss.coef", "algo.kl.reward.coef"),
        ),
        (
            ("algo.kl.controller.target=0.1",),
            ("algo.kl.controller.target=0.1", "algo.kl.controller.kind", "adaptive"),
        ),
        (
            (
                "algo.mismatch.weight=token",
                "rollout.sampling.top_p=0.9",
                "rollout.sampling.top_k=50",
            ),
            ("algo.mismatch.weight=token", "rollout.sampling.top_p", "rollout.sampling.top_k"),
        ),
        (
            ("algo.rl_coef=0",),
            ("algo.rl_coef=0.0", "algo.sft.coef", "algo.entropy_coef"),
        ),
        (
            ("algo.kl.loss={coef: 0.1, estimator: full, bias_correction: true}",),
            ("algo.kl.loss.bias_correction=true", "algo.kl.loss.estimator=full", "k3"),
        ),
        (
            ("algo.kl.loss.bias_correction=true",),
            ("algo.kl.loss.bias_correction=true", "algo.kl.loss.coef"),
        ),
        (
            ("algo.mismatch.normalize=true",),
            ("algo.mismatch.normalize=true", "algo.mismatch.weight"),
        ),
        (
            ("algo.mismatch.off_policy_limit=0.1", "rollout.sampling.top_p=0.9"),
            ("algo.mismatch.off_policy_limit=0.1", "rollout.sampling.top_p", "null"),
        ),
        (
            ("algo.policy_loss=gmpo", "algo.top_entropy=0.2"),
            ("algo.top_entropy=0.2", "algo.policy_loss=gmpo", "1"),
        ),
        (("algo.mismatch.low=3",), ("algo.mismatch.low=3.0", "algo.mismatch.high=2.0")),
        (
            ("algo.aggregate.constant=9",),
            ("algo.aggregate.constant=9.0", "algo.aggregate.mode=token-mean"),
        ),
        (
            (
                "algo.mask.equal_groups=true",
                "algo.preset=reinforce_pp",
                "rollout.samples_per_prompt=1",
            ),
            ("algo.mask.equal_groups=true", "rollout.samples_per_prompt"),
        ),
        (("algo.mask.difficulty=[0.9, 0.1]",), ("algo.mask.difficulty=[0.9, 0.1]", "number")),
        (
            ("algo.policy_loss=cpgd", "algo.options={drif: 1}"),
            ("algo.options.drif=1", "option", "'drift'"),
        ),
        (
            ("algo.policy_loss=cpgd", "algo.options={drift: much}"),
            ("algo.options.drift=much", "number"),
        ),
        (
            ("algo.policy_loss=sapo", "algo.options={tau_negative: 0.0}"),
            ("algo.options.tau_negative=0.0", "above"),
        ),
        (
            ("algo.policy_loss=clip_cov", "algo.options={share: 1.5}"),
            ("algo.options.share=1.5", "at most 1"),
        ),
        (
            ("algo.policy_loss=kl_cov", "algo.sample_weight.length=true"),
            ("algo.sample_weight.length=true", "algo.policy_loss=kl_cov"),
        ),
        (
            ("algo.policy_loss=clip_cov", "algo.ratio=sequence"),
            ("algo.ratio=sequence", "algo.policy_loss=clip_cov", "token"),
        ),
        (
            ("algo.policy_loss=dppo", "algo.options={divergence: js}"),
            ("algo.options.divergence=js", "'tv'", "'kl'"),
        ),
        (
            ("algo.advantage.estimator=gpg", "algo.options={count: all}"),
            ("algo.options.count=all", "'groups'", "'rewards'"),
        ),
        (
            ("algo.advantage.estimator=opo", "rollout.samples_per_prompt=1"),
            ("rollout.samples_per_prompt=1", "opo", "2"),
        ),
        (
            ("algo.advantage.correction=0.5", "algo.advantage.estimator=rloo"),
            ("algo.advantage.correction=0.5", "estimator=rloo", "whiten"),
        ),
        (
            ("algo.policy_loss=topr", "algo.options={split: score}"),
            ("algo.options.split=score", "'advantage'", "'reward'"),
        ),
        (
            ("algo.policy_loss=topr", "algo.options={level: turn}"),
            ("algo.options.level=turn", "'sequence'", "'token'"),
        ),
    ],
)
def test_each_invalid_setting_is_one_line(
    folder: Path, sets: tuple[str, ...], line: tuple[str, ...]
):
    with pytest.raises(ManyErrors) as caught:
        resolve(*sets)
    assert_each_mentions(caught.value.messages, (f"--set: {line[0]}: ", *line[1:]))


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("algo.advantage.estimator=gae",), "algo.advantage.estimator=gae"),
        (
            ("algo.advantage.estimator=reinforce_pp", "algo.advantage.gamma=0.9"),
            "algo.advantage.gamma=0.9",
        ),
        (
            ("algo.advantage.estimator=reinforce", "algo.kl.reward.coef=0.1"),
            "algo.kl.reward.coef=0.1",
        ),
        (
            ("algo.advantage.estimator=reinforce_pp", "algo.advantage.whiten_rewards=true"),
            "algo.advantage.whiten_rewards=true",
        ),
        (("algo.mismatch.weight=token",), "algo.mismatch.weight=token"),
        (("algo.mismatch.filter=token",), "algo.mismatch.filter=token"),
        (
            ("algo.advantage.estimator=optimal_token_baseline",),
            "algo.advantage.estimator=optimal_token_baseline",
        ),
    ],
)
def test_token_level_variation_is_refused_for_losses_with_one_term_per_sequence(
    folder: Path, sets: tuple[str, ...], key: str
):
    with pytest.raises(ManyErrors) as caught:
        resolve("algo.policy_loss=gmpo", *sets)
    (message,) = caught.value.messages
    assert key in message and "algo.policy_loss=gmpo" in message and "each token" in message
    for loss in ("ppo", "tis", "cispo", "cpgd"):
        resolve(f"algo.policy_loss={loss}", "algo.ratio=sequence", *sets)


@pytest.mark.parametrize(
    "sets",
    [
        ("algo.mismatch={weight: sequence, filter: sequence}",),
        (
            "algo.kl.reward.coef=0.1",
            "algo.advantage.whiten_rewards=true",
            "algo.advantage.whiten=true",
        ),
        ("algo.advantage.estimator=reinforce_pp",),
    ],
)
def test_sequence_level_settings_fit_every_loss(folder: Path, sets: tuple[str, ...]):
    assert resolve("algo.preset=gmpo", *sets).config.algo.policy_loss == "gmpo"


def test_losses_without_a_clip_get_no_advice_on_its_width(folder: Path):
    assert advice(resolve("algo.ratio=sequence", "algo.policy_loss=tis"), "train-grpo") == []


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("algo.ratio=sequence",), ("algo.clip", "3e-4", "4e-4")),
        (("algo.advantage.estimator=reinforce",), ("reinforce", "baseline")),
        (("algo.kl.loss={coef: 0.1, estimator: k1}",), ("k1", "gradient")),
        (("algo.kl.reward={coef: 0.1, estimator: k2}",), ("k2", "k1", "gradient")),
        (
            ("algo.policy_loss=vanilla", "train.updates.samples_per_update=8"),
            ("4 updates", "off-policy"),
        ),
        (
            ("algo.policy_loss=gpg", "train.updates.samples_per_update=8"),
            ("4 updates", "off-policy"),
        ),
        (("algo.policy_loss=kl_cov",), ("algo.policy_loss=kl_cov", "train.updates")),
        (("rollout.sampling.top_p=0.9",), ("rollout.sampling.top_p", "log-probabilities")),
    ],
)
def test_settings_that_train_badly_are_reported(
    folder: Path, sets: tuple[str, ...], words: tuple[str, ...]
):
    (line,) = advice(resolve(*sets), "train-grpo")
    assert_mentions(line, *words)
    assert advice(resolve(*sets), "train-sft") == [] and advice(resolve(), "train-grpo") == []


def test_a_run_of_epochs_must_be_longer_than_the_critic_warmup(folder: Path):
    """4 prompts per step."""
    config = resolve(
        "algo.preset=ppo", "algo.value.warmup_steps=3", "train={steps: null, epochs: 2}"
    ).config
    assert count_steps(config, 7) == 4 and count_steps(resolve("train={steps: 9}").config, 7) == 9
    with pytest.raises(
        MsrlError, match=mentions("warmup_steps=3", "train.epochs=2", "3 steps", "6 prompts")
    ):
        count_steps(config, 6)


def test_the_constant_of_dr_grpo_is_the_token_budget_of_an_update(folder: Path):
    config = resolve("algo.preset=dr_grpo", "train.updates.samples_per_update=16").config
    assert aggregate_constant(config) == 16 * 64
    assert (
        aggregate_constant(resolve("algo.preset=dr_grpo", "algo.aggregate.constant=7").config)
        == 7.0
    )
    assert aggregate_constant(resolve().config) is None


def test_both_kl_terms_need_a_reference(folder: Path):
    assert not needs_reference(resolve().config)
    assert needs_reference(resolve("algo.kl.reward.coef=0.1").config) and needs_reference(
        resolve("algo.preset=grpo").config
    )


def test_warnings_are_printed_by_dry_run_show_and_validate(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from msrl.cli.app import app

    skip_input_checks(monkeypatch)
    for arguments in (["train-grpo", "--dry-run"], ["config", "show"], ["config", "validate"]):
        app([*arguments, "-c", "grpo.yaml", "--set", "algo.ratio=sequence"], standalone_mode=False)
        assert_mentions(
            capfd.readouterr().err.replace("high", "low"), "warning: algo.clip.low=0.2", "ratios"
        )
