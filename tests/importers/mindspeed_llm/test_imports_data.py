"""Import of MindSpeed preprocessing files and continued-pretraining scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrl.cli.configuration import load_configuration as load
from msrl.config.sources import plain
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from support import mentions
from test_imports_losses import RL

R1_ZERO = """\
input: ./dataset/orz/orz_math_57k_collected.json
tokenizer_type: HuggingFaceTokenizer
tokenizer_name_or_path: ./Qwen2.5-7B
output_prefix: ./dataset/orz/data
handler_name: R1AlpacaStyleInstructionHandler
tokenizer_not_use_fast: true
map_keys: {"prompt": "question", "response": "ground_truth_answer"}
prompt_type: qwen_r1
dataset_additional_keys: ["labels"]
workers: 8
log_interval: 1000
"""
PRETRAIN = """\
python pretrain_gpt.py --load ckpt --tokenizer-name-or-path hf --data-path {} --seq-length 4096 \\
    --global-batch-size 8 --micro-batch-size 1 --lr 1e-5 \\
    --train-iters 100 --bf16 --reset-attention-mask
"""


def test_a_data_file_of_mindspeed_rl_configures_preprocessing(tmp_path: Path):
    (tmp_path / "r1_zero.yaml").write_text(R1_ZERO, encoding="utf-8")
    resolved = load([str(tmp_path / "r1_zero.yaml")])
    section = resolved.config.preprocess
    assert (
        section.input == ("./dataset/orz/orz_math_57k_collected.json",)
        and section.output_prefix == "./dataset/orz/data"
    )
    assert (section.handler, section.template, section.workers) == (
        "R1AlpacaStyleInstructionHandler",
        "qwen_r1",
        8,
    )
    assert (
        section.map_keys == {"prompt": "question", "response": "ground_truth_answer"}
        and section.tokenizer == "./Qwen2.5-7B"
    )
    assert len(resolved.translations[0].key_results) == len(R1_ZERO.splitlines())
    (tmp_path / "r1_zero.yaml").write_text(
        R1_ZERO.replace("prompt_type: qwen_r1\n", ""), encoding="utf-8"
    )
    assert (
        load([str(tmp_path / "r1_zero.yaml")]).config.preprocess.template == "empty"
    )  # the original's default


@pytest.mark.parametrize(
    ("template", "line", "thinking"),
    [
        ("qwen3", "", False),  # the original's default, which only this template reads
        ("qwen_r1", "", None),
        ("qwen3", "enable_thinking: true\n", True),
        ("qwen3", 'enable_thinking: "true"\n', True),
    ],
)
def test_enable_thinking_comes_from_the_data_file_or_the_default_of_the_original(
    template: str, line: str, thinking: bool | None, tmp_path: Path
):
    (tmp_path / "data.yaml").write_text(
        R1_ZERO.replace("qwen_r1", template) + line, encoding="utf-8"
    )
    assert load([str(tmp_path / "data.yaml")]).config.preprocess.enable_thinking is thinking


def test_invalid_values_of_enable_thinking_are_refused(tmp_path: Path):
    (tmp_path / "data.yaml").write_text(R1_ZERO + "enable_thinking: maybe\n", encoding="utf-8")
    with pytest.raises(MsrlError, match=mentions("enable_thinking=maybe", "true, false, none")):
        load([str(tmp_path / "data.yaml")])


def test_a_misspelt_key_of_a_data_file_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "data.yaml").write_text(
        R1_ZERO.replace("prompt_type", "promt_type"), encoding="utf-8"
    )
    with pytest.raises(
        MsrlError,
        match=mentions("data.yaml:8: promt_type=qwen_r1", "key", "MindSpeed-RL", "'prompt_type'"),
    ):
        load([str(tmp_path / "data.yaml")])


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("data/pile_text_document", {"train": "data/pile"}),
        ("0.3 data/a_text_document 0.7 data/b", {"blend": {"data/a": 0.3, "data/b": 0.7}}),
        ("1,data/a,2,data/b,1,data/a", {"blend": {"data/a": 2.0, "data/b": 2.0}}),
    ],
)
def test_a_pretraining_script_continues_from_text_of_one_dataset_or_several(
    path: str, data: dict[str, object], tmp_path: Path
):
    (tmp_path / "pretrain.sh").write_text(PRETRAIN.format(path), encoding="utf-8")
    tree = plain(
        translate_arguments("mindspeed-llm", [str(tmp_path / "pretrain.sh")]).complete_tree()
    )
    assert tree["data"] == {**data, "handler": "pretrain", "seq_length": 4096}


def test_a_weighted_mixture_of_examples_or_prompts_becomes_a_blend(tmp_path: Path):
    script = "posttrain_gpt.py --stage sft --finetune --load ckpt --lr 1e-5 --global-batch-size 16"
    words = [*script.split(), "--train-iters", "20", "--data-path", "0.3", "a", "0.7", "b"]
    tree = plain(translate_arguments("mindspeed-llm", words).complete_tree())
    assert tree["data"]["blend"] == {"a": 0.3, "b": 0.7} and "train" not in tree["data"]
    text = RL.format(stage="ray_grpo", micro=1, npus=1, more="")
    text = text.replace("lr: 1e-6", "lr: 1e-6, data_path: '1,a,3,b'")
    (tmp_path / "rl.yaml").write_text(text, encoding="utf-8")
    tree = plain(translate_arguments("mindspeed-rl", [str(tmp_path / "rl.yaml")]).complete_tree())
    assert tree["data"]["blend"] == {"a": 1.0, "b": 3.0} and "train" not in tree["data"]
    (tmp_path / "rl.yaml").write_text(text.replace("'1,a,3,b'", "'a,b,c'"), encoding="utf-8")
    with pytest.raises(MsrlError, match=mentions("data_path=a,b,c", "weight", "prefix")):
        translate_arguments("mindspeed-rl", [str(tmp_path / "rl.yaml")])


@pytest.mark.parametrize("flag", ["--is-instruction-dataset", "--stage sft"])
def test_a_fine_tuning_script_reads_examples(flag: str):
    words = PRETRAIN.format("data/alpaca").replace("\\\n", "").split()
    assert plain(translate_arguments("mindspeed-llm", [*words, *flag.split()]).complete_tree())[
        "data"
    ] == {
        "train": "data/alpaca",
        "seq_length": 4096,
    }


@pytest.mark.parametrize(
    ("path", "fragments"),
    [("data/a data/b", ("data/a", "weight")), ("1 data/a data/b", ("data_path=", "pairs"))],
)
def test_datasets_without_weights_are_refused(
    path: str, fragments: tuple[str, ...], tmp_path: Path
):
    (tmp_path / "pretrain.sh").write_text(PRETRAIN.format(path), encoding="utf-8")
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        translate_arguments("mindspeed-llm", [str(tmp_path / "pretrain.sh")])


PREPROCESS = """\
python preprocess_data.py --input in.jsonl --tokenizer-name-or-path hf --output-prefix out \\
    --handler-name AlpacaStyleInstructionHandler --prompt-type {} --prompt-type-path {}
"""


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("qwen", "configs/finetune/templates.json", "qwen"),
        ("qwen_r1", "./configs/finetune/templates.json", "qwen_r1_mindspeed_llm"),
        ("qwen_r1", "own/templates.json", "own/templates.json:qwen_r1"),
        ("mine", "edited/templates.json", "edited/templates.json:mine"),
    ],
)
def test_a_template_of_mindspeed_llm_keeps_its_text(
    tmp_path: Path, name: str, file: str, expected: str
):
    script = tmp_path / "data.sh"
    script.write_text(PREPROCESS.format(name, file), encoding="utf-8")
    tree = plain(translate_arguments("mindspeed-llm", [str(script)]).complete_tree())
    assert tree["preprocess"]["template"] == expected  # type: ignore[index]


def test_rows_of_a_training_script_are_read_by_its_handler_columns_and_template():
    line = (
        "posttrain_gpt.py --stage sft --finetune --load ckpt --data-path rows.jsonl --lr 1e-5 "
        "--global-batch-size 16 --train-iters 20 --prompt-type qwen_r1 --enable-thinking true "
        '--handler-name AlpacaStyleInstructionHandler --map-keys {"prompt":"question"}'
    )
    tree = plain(translate_arguments("mindspeed-llm", line.split()).complete_tree())
    assert tree["preprocess"] == {
        "handler": "AlpacaStyleInstructionHandler",
        "map_keys": {"prompt": "question"},
        "enable_thinking": True,
    }
    assert tree["model"]["template"] == "qwen_r1_mindspeed_llm"


def test_rows_of_a_pretraining_script_keep_their_column_and_end_of_document():
    line = (
        "pretrain_gpt.py --load ckpt --data-path rows.jsonl --lr 1e-5 --global-batch-size 16 "
        "--train-iters 20 --handler-name GeneralPretrainHandler --json-keys content --append-eod"
    )
    tree = plain(translate_arguments("mindspeed-llm", line.split()).complete_tree())
    assert tree["preprocess"] == {
        "handler": "GeneralPretrainHandler",
        "map_keys": {"text": "content"},
        "append_eod": True,
    }
