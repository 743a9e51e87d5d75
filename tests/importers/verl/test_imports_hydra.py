"""Files of hydra: `defaults`, references, the environment, anchors, and changes by command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msrl.config.sources import parse, plain
from msrl.errors import ManyErrors, MsrlError
from msrl.importers.command import native_yaml, report, translate_arguments
from msrl.importers.translation import KeyStatus, Translation
from support import assert_mentions

BASE = """\
defaults:
  - model: [qwen25_7b]
megatron_training:
  {stage: ray_grpo, global_batch_size: 8, train_iters: 2, data_path: d, tokenizer_name_or_path: t}
actor_config: {lr: 1e-6, micro_batch_size: 1, load: ckpt, save: out, finetune: true}
rl_config: {n_samples_per_prompt: 4, mini_batch_size: 8, actor_resource: {num_npus: 8}}
generate_config: {infer_tensor_parallel_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "configs" / "cluster").mkdir(parents=True)
    (tmp_path / "configs" / "base.yaml").write_text(BASE)
    return tmp_path


def translate(text: str, folder: Path) -> Translation:
    file = folder / "configs" / "run.yaml"
    file.write_text(text)
    return translate_arguments("mindspeed-rl", [str(file)])


def native_tree(translation: Translation) -> Any:
    return plain(parse(native_yaml(translation), "native.yaml"))


def test_a_file_has_the_keys_of_the_files_in_its_defaults(folder: Path) -> None:
    text = "defaults: [base]\nactor_config: {lr: 5e-6}\n"
    tree = native_tree(translate(text, folder))
    assert tree["train"]["optimizer"]["lr"] == 5e-6
    assert tree["checkpoint"]["load"] == "ckpt"


def test_files_behind_self_override_the_file(folder: Path) -> None:
    text = "defaults: [_self_, base]\nactor_config: {lr: 5e-6}\n"
    assert native_tree(translate(text, folder))["train"]["optimizer"]["lr"] == 1e-6


def test_a_file_with_keys_of_no_system_belongs_to_that_of_its_defaults(folder: Path) -> None:
    tree = native_tree(translate("defaults: [base, _self_]\nref_config: {load: other}\n", folder))
    assert tree["checkpoint"]["load"] == "ckpt"


def test_a_supervised_file_may_share_sections_but_not_those_of_other_programs(
    folder: Path,
) -> None:
    keys = "finetune: true, load: c, data_path: d, lr: 1e-6, global_batch_size: 8, train_iters: 2"
    text = f"shared: &shared {{lr: 5e-6}}\nsft: {{<<: *shared, {keys.replace('lr: 1e-6, ', '')}}}\n"
    tree = native_tree(translate(text, folder))
    assert tree["train"]["optimizer"]["lr"] == 5e-6
    with pytest.raises(MsrlError) as caught:
        translate(f"sft: {{{keys}}}\nrl_config: {{}}\n", folder)
    assert_mentions(str(caught.value), "rl_config", "unknown")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("cluster/many@_here_", "actor_config: {lr: 5e-6}"),
        ("cluster/many@actor_config", "lr: 5e-6"),
        ("cluster/many", "# @package actor_config\nlr: 5e-6"),
        ("cluster/many", "# @package _global_\nactor_config: {lr: 5e-6}"),
        ("cluster@actor_config: many", "lr: 5e-6"),
    ],
)
def test_an_included_file_belongs_to_its_section(item: str, text: str, folder: Path) -> None:
    (folder / "configs" / "cluster" / "many.yaml").write_text(text)
    tree = native_tree(translate(f"defaults:\n- base\n- {item}\nactor_config: {{}}\n", folder))
    assert tree["train"]["optimizer"]["lr"] == 5e-6


def test_a_missing_file_is_an_error_unless_it_is_optional(folder: Path) -> None:
    text = "defaults:\n- base\n- optional none\n- override hydra/job_logging: off\nactor_config: {}"
    translate(text, folder)
    with pytest.raises(MsrlError) as caught:
        translate("defaults:\n- base\n- none\nactor_config: {}\n", folder)
    assert_mentions(str(caught.value), "run.yaml:3", "defaults", "not found", "none.yaml")


def test_references_to_keys_and_the_environment_are_resolved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_SECRET", "s3cret")
    text = (
        "defaults: [base]\n"
        "megatron_training: {data_path: '${actor_config.load}/x', train_iters: '${oc.env:N_X,6}'}\n"
        "actor_config: {lr: '${oc.decode:${oc.env:LR_X,5e-6}}', save: '${.load}_out'}\n"
        "rl_config: {wandb_exp_name: '${oc.env:RUN_SECRET}'}\n"
    )
    translation = translate(text, folder)
    tree = native_tree(translation)
    assert tree["data"]["train"] == "ckpt/x"
    assert tree["checkpoint"]["save"] == "ckpt_out"
    assert (tree["train"]["steps"], tree["train"]["optimizer"]["lr"]) == (6, 5e-6)
    assert tree["run"]["name"] == "${env:RUN_SECRET}"
    assert "s3cret" not in native_yaml(translation) + report(translation)


def test_a_variable_that_is_not_set_is_an_error(folder: Path) -> None:
    with pytest.raises(MsrlError) as caught:
        translate("defaults: [base]\nactor_config: {load: '${oc.env:NOT_SET_X}'}", folder)
    assert_mentions(str(caught.value), "run.yaml:2", "NOT_SET_X", "not set")


def test_a_section_that_only_holds_an_anchor_is_ignored_as_in_the_original(folder: Path) -> None:
    text = "shared: &shared {lr: 5e-6}\ndefaults: [base]\nactor_config: {<<: *shared, save: x}\n"
    translation = translate(text, folder)
    tree = native_tree(translation)
    assert (tree["train"]["optimizer"]["lr"], tree["checkpoint"]["save"]) == (5e-6, "x")
    statuses = {o.entry.key: o.status for o in translation.key_results}
    assert statuses["shared"] is KeyStatus.DEAD
    with pytest.raises(MsrlError) as caught:
        translate("defaults: [base]\nactor_confg: {lr: 5e-6}\n" + "rl_config: {}\n", folder)
    assert_mentions(str(caught.value), "actor_confg", "unknown", "actor_config")


COMMAND = "python cli/train_grpo.py {} actor_config.lr=5e-6 +rl_config.epochs=$N ~actor_config.save"


@pytest.mark.parametrize("flags", ["--config-name base", "-cn base", "--config-name=base"])
def test_changes_of_a_command_line_override_the_file(flags: str, folder: Path) -> None:
    script = folder / "run.sh"
    script.write_text(f"N=3\n{COMMAND.format(flags)} 2>&1 | tee log\n")
    translation = translate_arguments("mindspeed-rl", [str(script)])
    tree = native_tree(translation)
    assert tree["train"]["optimizer"]["lr"] == 5e-6
    assert tree["train"]["updates"]["epochs"] == 3
    assert tree["checkpoint"].keys() == {"load"}
    overrides = [o for o in translation.key_results if o.entry.section == "override"]
    assert [o.status for o in overrides] == [KeyStatus.APPLIED] * 3


def test_changes_without_their_file_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(COMMAND.format("--config-name base"))
    with pytest.raises(ManyErrors) as caught:
        translate_arguments("mindspeed-rl", [str(script)])
    _, name, *overrides = caught.value.messages
    assert_mentions(name, "config_name=base", "not found", "--config-name")
    assert len(overrides) == 3
