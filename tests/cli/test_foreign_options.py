"""Options of other tools on the command line: the message names what msrl has instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from typer.main import get_command

from msrl.cli import app
from msrl.cli.hints import _NO_OPTIONS, _option_hint, extra_words
from msrl.cli.own_options import all_commands
from msrl.config.foreign_names import OTHER_NAMES
from msrl.config.messages import keys
from msrl.importers.table import load_table
from support import assert_mentions
from test_cli import msrl

COMMANDS = {
    name: {option: known.key for option, known in options.items()}
    for name, options in all_commands(get_command(app.app))
}
KEYS = set(keys())
OPTION_KEYS = {key.removesuffix(".options") for key in KEYS if key.endswith(".options")}
# What users of the guides and of other tools type, and words of the answer.
MISTAKES: Mapping[str, tuple[str, ...]] = {
    "train-sft --log-interval 10": ("log.every_steps", "config import"),
    "train-sft --micro-batch-size 1": ("train.micro_batch",),
    "train-sft --lr-decay-style cosine": ("train.optimizer.schedule",),
    "train-grpo --tokenizer-type PretrainedFromHF": ("config import",),
    "preprocess --tokenizer-type PretrainedFromHF": ("Remove it", "folders"),
    "convert-ckpt hf2mcore --use-mcore-models": ("Remove it", "this form"),
    "convert-ckpt hf2mcore --num-layer-list 1, 3": ("--num-layer-list 1,3",),
    "convert-ckpt hf2mcore --num-layer-list 1 3": ("--num-layer-list 1,3",),
    "convert-ckpt reshard --noop-layers 0 ,3": ("--noop-layers 0,3",),
    "train-sft --set train.steps 10": ("--set train.steps=10",),
    "train-sft --num_train_epochs 3": ("train.epochs",),
    "train-sft --model_name_or_path Qwen": ("--model",),
    "train-sft --per_device_train_batch_size 4": ("train.micro_batch",),
    "train-sft --learning_rate 1e-5": ("--lr",),
    "train-sft --cutoff_len 2048": ("data.seq_length",),
    "train-sft --finetuning_type lora": ("train.lora.rank",),
    "train-sft --stage sft": ("train-sft", "train-dpo"),
    "train-sft --deepspeed z3.json": ("train.parallel",),
    "train-dpo --pref_beta 0.1": ("algo.preference.beta",),
    "train-grpo --num_generations 8": ("rollout.samples_per_prompt",),
    "train-grpo --max_completion_length 8": ("rollout.max_response_tokens",),
    "train-grpo --trust_remote_code": ("never run",),
    "train-grpo --top_p 0.9": ("rollout.sampling.top_p",),
    "train-grpo --rollout-batch-size 8": ("rollout.prompts_per_step",),
    "train-distill --teacher Qwen": ("algo.distill.teachers",),
    "train-sft --completion_only_loss": ("prompts are not",),
    "generate --max_new_tokens 8": ("--max-tokens",),
    "generate --max_tokens 8": ("--max-tokens",),
    "eval --model_name_or_path Qwen": ("--model",),
    "serve --tensor-parallel-size 2": ("--tp",),
    "serve --api-key secret": ("--api-key-file",),
    "preprocess --cutoff_len 8": ("--seq-length",),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("line", MISTAKES)
def test_an_option_of_another_tool_is_answered_with_the_one_of_msrl(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert msrl(*line.split()) == 2
    assert_mentions(capsys.readouterr().err, *MISTAKES[line])


def test_every_other_name_leads_to_keys_that_exist() -> None:
    assert {key for own in OTHER_NAMES.values() for key in own} <= KEYS
    assert not OTHER_NAMES.keys() & _NO_OPTIONS.keys()


@pytest.mark.sample(5)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_answer_names_options_and_keys_that_the_command_has(command: str) -> None:
    options = COMMANDS[command]
    flags = {f"--{name}" for name in (*OTHER_NAMES, *_NO_OPTIONS)}
    flags |= {f"--{key.replace('_', '-')}" for _, key in load_table("mindspeed_llm").rows}
    for flag in flags - options.keys():
        hint = _option_hint(flag, command.split()[0], options)
        setting = re.search(r"(?:Did you mean|It is) (--[a-z-]+)(?: ([a-z_.]+)=VALUE)?", hint)
        if setting and command.split()[0] not in ("config", "doctor"):
            assert setting[1] in options, (flag, hint)
        if setting and setting[2]:
            assert setting[2].partition(".options.")[0] in KEYS | OPTION_KEYS, (flag, hint)


def test_a_word_that_belongs_to_no_option_gets_no_answer_about_a_split_value() -> None:
    line = ["--model", "a", "b"]
    assert extra_words(["b"], line, []) == "Unexpected extra argument: b."


@pytest.mark.parametrize(
    "words",
    [
        "data.train_files=x",
        "trainer.nnodes=1 algorithm.adv_estimator=grpo",
        "+actor_rollout_ref.a=1",
    ],
)
def test_words_of_verl_after_a_training_name_its_import(words: str, capsys):
    assert msrl("train-grpo", *words.split()) == 2
    error = capsys.readouterr().err
    assert_mentions(error, words.split()[0], "--set", "config import --from verl")
    assert "Did you mean" not in error


def test_a_key_of_msrl_without_set_names_the_option(capsys):
    assert msrl("train-grpo", "algo.preset=ppo") == 2
    error = capsys.readouterr().err
    assert_mentions(error, "--set algo.preset=ppo")
    assert "verl" not in error
