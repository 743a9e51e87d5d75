"""Files and command lines of the five guides: every key is reported, every misspelled key is
refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from guides import GUIDES, guide
from msrl.config.sources import Node, parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.shell import parse_script
from msrl.importers.systems import foreign
from msrl.importers.table import canonical
from msrl.importers.translation import Translation
from support import ROOT, assert_mentions

MINDSPEED = ROOT / "examples" / "mindspeed"
OURS = re.compile(r"\b(convert_ckpt|preprocess_data|ray_gpt|train_grpo)\.py|\bray start\b")
# Values that are taken whole: what their keys are called is not the original's.
FREE = {"system_envs", "tracker_kwargs", "env_vars"}
ROLL_WORKERS = ("actor_train", "actor_infer", "reference")
ROLL_PARTS = (
    "model_args", "training_args", "data_args", "generating_args", "strategy_args",
    "infer_batch_size", "device_mapping",
    "num_gpus_per_worker",
)  # fmt: skip


def blocks(name: str) -> list[str]:
    """Return the fenced blocks of a guide, including indented ones."""
    return [block for _, block in re.findall(r"^( *)```\w*\n(.*?)^ *```", guide(name), re.S | re.M)]


def without_ellipsis(text: str) -> str:
    """Return a block without `...` and explanatory arrows."""
    return re.sub(r" +<--.*", "", re.sub(r"^\s*\.\.\.\s*\n", "", text, flags=re.M))


# --- YAML


def r1_zero() -> str:
    (block,) = (block for block in blocks("mindspeed-rl-r1-zero") if block.startswith("defaults:"))
    return without_ellipsis(block)


def roll() -> str:
    """Return the three blocks of the guide as one file, with the indentation that the page lost."""
    text = guide("roll-parameters")
    pipeline, workers = (
        re.search(rf"^{first}.*?(?=^\s*•|^\S*基本信息)", text, re.S | re.M)
        for first in ("exp_name:", "actor_train:")
    )
    assert pipeline is not None and workers is not None
    lines: list[str] = []
    inner = 0
    for line in without_ellipsis(pipeline[0] + "\n" + workers[0]).splitlines():
        key = line.partition(":")[0]
        if key in (*ROLL_WORKERS, "system_envs", "tracker_kwargs"):
            depth, inner = 0, 1
        elif key in ROLL_PARTS:
            depth, inner = 1, 2
        elif key == "strategy_config":
            depth, inner = 2, 3
        else:
            depth = inner = inner if line else 0
        lines.append("  " * depth + line)
    return "\n".join(line for line in lines if line.strip()) + "\n"


def roll_with_deepspeed() -> str:
    """Return the file with the guide's example of DeepSpeed settings."""
    defaults = re.search(r"^defaults:\n((?:- .*\n)+)actor_train:", guide("roll-parameters"), re.M)
    assert defaults is not None
    trainer = (
        "    strategy_name: megatron_train # 训练策略:deepspeed_train 或 megatron_train\n    "
        "strategy_config:\n"
    )
    before, middle, after = roll().partition(trainer)
    assert middle
    remainder = after[after.index("  infer_batch_size") :]
    return (
        f"defaults:\n{defaults[1]}{before}    strategy_name: deepspeed_train\n    strategy_config: "
        f"${{deepspeed_zero2}}\n{remainder}"
    )


FILES = {
    "mindspeed-rl-grpo-parameters": lambda: (MINDSPEED / "grpo_qwen25_7b_A3.yaml").read_text(
        encoding="utf-8"
    ),
    "mindspeed-rl-r1-zero": r1_zero,
    "mindspeed-llm-full-pipeline": lambda: (MINDSPEED / "grpo_llama32_1b.yaml").read_text(
        encoding="utf-8"
    ),
    "roll-parameters": roll,
    "roll-parameters with deepspeed": roll_with_deepspeed,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the model files of the examples."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model").symlink_to(MINDSPEED / "model")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "envs.yaml").write_text(
        "system_envs: {NCCL_DEBUG: INFO}\n", encoding="utf-8"
    )
    return tmp_path / "conf"


def translate(name: str, text: str, folder: Path) -> Translation:
    """Return the translation, which includes its errors."""
    file = folder / "given.yaml"
    file.write_text(text, encoding="utf-8")
    if name.startswith("roll"):
        from msrl.config.sources import read
        from msrl.importers.roll.files import translate

        return translate(read(file), file)
    translation = foreign(str(file))
    assert translation is not None
    return translation


def tree_keys(node: Node, path: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield (path, key, line) for every key of a tree."""
    for key, child in (node.value if isinstance(node.value, dict) else {}).items():
        assert child.origin.line is not None
        yield path, canonical(key), child.origin.line
        yield from tree_keys(child, f"{path}.{key}" if path else key)


def all_keys(text: str) -> set[tuple[str, int]]:
    """Return the keys of a file with their lines, without user-defined names."""
    return {
        (key, line)
        for path, key, line in tree_keys(parse(text, "given"))
        if path.rpartition(".")[2] not in FREE
    }


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_guides_complete_example_is_reported(name: str, folder: Path):
    text = FILES[name]()
    translation = translate(name, text, folder)
    assert not translation.errors
    recorded = {
        (key_result.entry.key, key_result.entry.origin.line)
        for key_result in translation.key_results
    }
    sections = set(plain(parse(text, "given"))) | {"actor_rollout", "ref"}
    unrecorded = {(key, line) for key, line in all_keys(text) - recorded if key not in sections}
    assert not unrecorded and len(recorded) > 30
    assert parse(
        native_yaml(translation), "native.yaml"
    ).value  # what `config import` writes is YAML


def misspell(line: str, key: str) -> str:
    """Return a line with the last letter of its key doubled."""
    for spelling in (key, key.replace("_", "-")):
        line = re.sub(rf"(?<![\w-]){spelling}:", f"{spelling}{spelling[-1]}:", line)
    return line


def collect_errors(name: str, text: str, folder: Path) -> list[str]:
    try:
        return translate(name, text, folder).errors
    except (MsrlError, AssertionError) as error:  # the file is no longer recognized
        return [str(error)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_guides_complete_example_is_caught_when_it_is_misspelt(
    name: str, folder: Path
):
    lines = FILES[name]().splitlines()
    keys = all_keys("\n".join(lines))
    numbers = Counter(number for _, number in keys)
    named = set(re.findall(r"\$\{(\w+)\}", "\n".join(lines)))
    # Keys that are not misspelt together: sections, keys that share a line, keys of references.
    apart = {
        (key, number)
        for key, number in keys
        if lines[number - 1].partition("#")[0].rstrip().endswith(":") or numbers[number] > 1
    }
    apart |= {(key, number) for key, number in keys if "${" in lines[number - 1] or key in named}
    for group in (keys - apart, *({key} for key in keys)):
        wrong = {number: misspell(lines[number - 1], key) for key, number in group}
        errors = collect_errors(
            name, "\n".join(wrong.get(number, line) for number, line in enumerate(lines, 1)), folder
        )
        for key, number in group:
            assert any(
                f"given.yaml:{number}: " in line and f"'{key}'" in line for line in errors
            ), (
                number,
                key,
                errors,
            )


def test_file_fragments_in_the_guides_have_no_unknown_keys(folder: Path):
    fragments = [
        block
        for name in GUIDES
        for block in blocks(name)
        if re.search(r"^\s*(actor_rollout_ref|actor_resource):", block, re.M)
    ]
    assert len(fragments) == 3 + 1  # the complete example is one of them
    for fragment in fragments:
        text = without_ellipsis(fragment)
        indent = len(text) - len(text.lstrip())
        text = "\n".join(line[indent:] for line in text.splitlines())
        if text.startswith("actor_resource"):
            text = "rl_config:\n" + "\n".join(f"  {line}" for line in text.splitlines())
        translation = translate("mindspeed", text, folder)
        assert not [line for line in translation.errors if "key" in line.split(": ")[-1]]


# --- command lines


def commands(name: str) -> list[str]:
    return [block for block in blocks(name) if OURS.search(block)]


def test_every_command_line_of_the_guides_is_read_flag_by_flag(tmp_path: Path):
    count = 0
    for name in GUIDES:
        for block in commands(name):
            file = tmp_path / "given.sh"
            file.write_text(block, encoding="utf-8")
            system = "mindspeed-rl" if name.startswith("mindspeed-rl") else "mindspeed-llm"
            text = re.sub(r"#.*", "", block)
            flags = {canonical(flag) for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
            count += 1
            try:
                translation = translate_arguments(system, [str(file)])
            except MsrlError as error:  # it only starts Ray, or names a file that is not here
                assert_mentions(error, "nothing to import", *(f"{flag}=" for flag in flags))
                continue
            flags |= set(re.findall(r"^export (\w+)=", text, re.M))
            flags |= set(re.findall(r"^source", text, re.M))
            assert {key_result.entry.key for key_result in translation.key_results} == flags, block
    assert count == 13


def test_pipes_and_redirections_are_not_values():
    script = (
        "cd x && python cli/train_grpo.py --config-name r1_zero.yaml 2>&1 | tee a.log; "
        "TP=2; tool '|' \"a;b\" > out --x &\n# | y\n"
    )
    assert [[word.text for word in words] for words in parse_script(script, "s").commands] == [
        ["cd", "x"], ["python", "cli/train_grpo.py", "--config-name", "r1_zero.yaml"],
        ["tee", "a.log"], ["tool", "|", "a;b", "--x"],
    ]  # fmt: skip


def line_flags(line: str) -> list[str]:
    return re.findall(r"(?<![\w-])--([a-z][\w-]*)", re.sub(r"#.*", "", line))


def assert_misspelt_flags_are_caught(system: str, block: str, file: Path) -> None:
    """Assert that each misspelled flag is reported with its line and its correct name."""
    lines = block.splitlines()
    file.write_text(
        re.sub(r"(?<![\w-])--([a-z][\w-]*)", lambda flag: flag[0] + flag[0][-1], block),
        encoding="utf-8",
    )
    with pytest.raises(MsrlError) as caught:
        translate_arguments(system, [str(file)])
    errors = str(caught.value).splitlines()
    for number, line in enumerate(lines, 1):
        for flag in line_flags(line):
            assert any(
                f"given.sh:{number}: " in error and f"'{canonical(flag)}'" in error
                for error in errors
            ), (line, errors)


@pytest.mark.parametrize("name", ["mindspeed-rl-r1-zero", "mindspeed-llm-full-pipeline"])
def test_every_flag_of_a_guides_command_line_is_caught_when_it_is_misspelt(
    name: str, tmp_path: Path
):
    for block in commands(name):
        assert_misspelt_flags_are_caught("mindspeed-llm", block, tmp_path / "given.sh")


def test_lightrfts_examples_fragments_and_variables_are_read(tmp_path: Path):
    file = tmp_path / "given.sh"
    texts = blocks("lightrft-parameters")
    assert len(texts) == 5
    fragments = [block for block in texts if block.lstrip().startswith("--")]
    variables = next(block for block in texts if "export NCCL_DEBUG" in block)
    for text in [*fragments, *(block + "\n" + variables for block in texts if "python" in block)]:
        file.write_text(text, encoding="utf-8")
        recorded = {
            key_result.entry.key
            for key_result in translate_arguments("lightrft", [str(file)]).key_results
        }
        assert recorded == set(re.findall(r"(?<!\w)--(\w+)", text)) | set(
            re.findall(r"^export (\w+)=", text, re.M)
        )


def test_every_flag_of_lightrfts_examples_is_caught_when_it_is_misspelt(tmp_path: Path):
    for block in (block for block in blocks("lightrft-parameters") if "python" in block):
        assert_misspelt_flags_are_caught("lightrft", block, tmp_path / "given.sh")


@pytest.mark.parametrize(("value", "is_named"), [("'1'", True), ("'0'", False)])
def test_a_roll_file_of_modelscope_names_the_variable_that_selects_the_hub(
    value: str, is_named: bool, folder: Path
):
    text = roll().replace("USE_MODELSCOPE: '1'", f"USE_MODELSCOPE: {value}")
    results = translate("roll", text, folder).key_results
    (variables,) = (result for result in results if result.entry.key == "system_envs")
    assert ("MSRL_HUB=modelscope" in variables.text) == is_named


DATASET = "input: a.json\ntokenizer_name_or_path: b\noutput_prefix: c\nprompt_type: qwen_r1\n"
SCRIPTS = {
    "preprocess_data.sh": 'python "$(dirname "$0")"/../cli/preprocess_data.py $1\n',
    "master.sh": "NAME=${1:-other}\npython cli/train_grpo.py --config-name $NAME\n",
}


@pytest.mark.parametrize("shell", [(), ("bash",)])
def test_the_scripts_of_the_guides_are_imported_with_their_arguments(
    shell: tuple[str, ...], folder: Path
):
    datasets = folder.parent / "configs" / "datasets"
    datasets.mkdir(parents=True)
    (datasets / "r1_zero.yaml").write_text(DATASET, encoding="utf-8")
    (datasets.parent / "r1_zero.yaml").write_text(r1_zero(), encoding="utf-8")
    (datasets.parent / "model").symlink_to(MINDSPEED / "model")
    keys: set[str] = set()
    for name, text in SCRIPTS.items():
        script = folder.parent / "examples" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(text, encoding="utf-8")
        words = [*shell, str(script), "r1_zero.yaml"]
        translation = translate_arguments("mindspeed-rl", words)
        keys |= {key_result.entry.key for key_result in translation.key_results}
    assert {"prompt_type", "global_batch_size", "verifier_function"} <= keys


def test_preprocessing_without_arguments_is_refused_with_the_way_to_pass_them(tmp_path: Path):
    script = tmp_path / "preprocess_data.sh"
    script.write_text("\npython preprocess_data.py $1\n", encoding="utf-8")
    with pytest.raises(MsrlError, match=r"preprocess_data.sh:2: .* no arguments.*SCRIPT NAME"):
        translate_arguments("mindspeed-rl", [str(script)])


def test_a_preprocessing_script_without_its_file_names_the_option_that_reads_it(tmp_path: Path):
    script = tmp_path / "preprocess_data.sh"
    script.write_text("python preprocess_data.py absent\n", encoding="utf-8")
    results = translate_arguments("mindspeed-rl", [str(script)]).key_results
    assert any("msrl preprocess -c FILE" in result.text for result in results)
