"""The five guides' own files and command lines: every block of theirs is read, every key told,
every misspelt one caught.
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

MINDSPEED = Path(__file__).resolve().parents[1] / "examples" / "mindspeed"
OURS = re.compile(r"\b(convert_ckpt|preprocess_data|ray_gpt|train_grpo)\.py|\bray start\b")
# Values that are taken whole: what their keys are called is not the original's.
FREE = {"system_envs", "tracker_kwargs", "env_vars"}
ROLL_WORKERS = ("actor_train", "actor_infer", "reference")
ROLL_PARTS = (
    "model_args", "training_args", "data_args", "generating_args", "strategy_args", "infer_batch_size", "device_mapping",
    "num_gpus_per_worker",
)  # fmt: skip


def blocks(name: str) -> list[str]:
    """The fenced blocks of a guide, those that are indented among them."""
    return [block for _, block in re.findall(r"^( *)```\w*\n(.*?)^ *```", guide(name), re.S | re.M)]


def without_ellipsis(text: str) -> str:
    """A block without `...` and the arrows that explain a line."""
    return re.sub(r" +<--.*", "", re.sub(r"^\s*\.\.\.\s*\n", "", text, flags=re.M))


# --- YAML -------------------------------------------------------------------------------------------------------------------------


def r1_zero() -> str:
    (block,) = (block for block in blocks("mindspeed-rl-r1-zero") if block.startswith("defaults:"))
    return without_ellipsis(block)


def roll() -> str:
    """The guide's three blocks as one file; the page has lost their indentation, which follows from
    what is a section of what.
    """
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
    """The same with the guide's example of DeepSpeed's settings."""
    found = re.search(r"^defaults:\n((?:- .*\n)+)actor_train:", guide("roll-parameters"), re.M)
    assert found is not None
    trainer = "    strategy_name: megatron_train # 训练策略:deepspeed_train 或 megatron_train\n    strategy_config:\n"
    before, middle, after = roll().partition(trainer)
    assert middle
    rest = after[after.index("  infer_batch_size") :]
    return f"defaults:\n{found[1]}{before}    strategy_name: deepspeed_train\n    strategy_config: ${{deepspeed_zero2}}\n{rest}"


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
    """A folder with the model files that the examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model").symlink_to(MINDSPEED / "model")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "envs.yaml").write_text(
        "system_envs: {NCCL_DEBUG: INFO}\n", encoding="utf-8"
    )
    return tmp_path / "conf"


def translated(name: str, text: str, folder: Path) -> Translation:
    """The translation, with its mistakes."""
    file = folder / "given.yaml"
    file.write_text(text, encoding="utf-8")
    if name.startswith("roll"):
        from msrl.config.sources import read
        from msrl.importers.roll.files import translate

        return translate(read(file), file)
    found = foreign(str(file))
    assert found is not None
    return found


def keys_of(node: Node, path: str = "") -> Iterator[tuple[str, str, int]]:
    """Every key of a tree: its path, itself and its line."""
    for key, child in (node.value if isinstance(node.value, dict) else {}).items():
        assert child.origin.line is not None
        yield path, canonical(key), child.origin.line
        yield from keys_of(child, f"{path}.{key}" if path else key)


def all_keys(text: str) -> set[tuple[str, int]]:
    """The keys of a file with their lines, but for names that are the user's own."""
    return {
        (key, line)
        for path, key, line in keys_of(parse(text, "given"))
        if path.rpartition(".")[2] not in FREE
    }


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_guides_complete_example_is_told(name: str, folder: Path):
    text = FILES[name]()
    found = translated(name, text, folder)
    assert not found.errors
    told = {(one.entry.key, one.entry.origin.line) for one in found.outcomes}
    sections = set(plain(parse(text, "given"))) | {"actor_rollout", "ref"}
    untold = {(key, line) for key, line in all_keys(text) - told if key not in sections}
    assert not untold and len(told) > 30
    assert parse(native_yaml(found), "native.yaml").value  # what `config import` writes is YAML


def misspelt(line: str, key: str) -> str:
    """A line with the last letter of its key doubled."""
    for spelling in (key, key.replace("_", "-")):
        line = re.sub(rf"(?<![\w-]){spelling}:", f"{spelling}{spelling[-1]}:", line)
    return line


def mistakes_of(name: str, text: str, folder: Path) -> list[str]:
    try:
        return translated(name, text, folder).errors
    except (MsrlError, AssertionError) as error:  # a file that has lost one of its marks
        return [str(error)]


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_guides_complete_example_is_caught_when_it_is_misspelt(
    name: str, folder: Path
):
    lines = FILES[name]().splitlines()
    keys = all_keys("\n".join(lines))
    numbers = Counter(number for _, number in keys)
    named = set(re.findall(r"\$\{(\w+)\}", "\n".join(lines)))
    # One by one: sections, keys that share a line, and those that others refer to.
    apart = {
        (key, number)
        for key, number in keys
        if lines[number - 1].partition("#")[0].rstrip().endswith(":") or numbers[number] > 1
    }
    apart |= {(key, number) for key, number in keys if "${" in lines[number - 1] or key in named}
    for group in (keys - apart, *({one} for one in apart)):
        wrong = {number: misspelt(lines[number - 1], key) for key, number in group}
        found = mistakes_of(
            name, "\n".join(wrong.get(number, line) for number, line in enumerate(lines, 1)), folder
        )
        for key, number in group:
            assert any(f"given.yaml:{number}: " in line and f"'{key}'" in line for line in found), (
                number,
                key,
                found,
            )


def test_parts_of_files_in_the_guides_have_no_unknown_keys(folder: Path):
    parts = [
        block
        for name in GUIDES
        for block in blocks(name)
        if re.search(r"^\s*(actor_rollout_ref|actor_resource):", block, re.M)
    ]
    assert len(parts) == 3 + 1  # one of them the complete example
    for part in parts:
        text = without_ellipsis(part)
        indent = len(text) - len(text.lstrip())
        text = "\n".join(line[indent:] for line in text.splitlines())
        if text.startswith("actor_resource"):
            text = "rl_config:\n" + "\n".join(f"  {line}" for line in text.splitlines())
        found = translated("mindspeed", text, folder)
        assert not [line for line in found.errors if "key" in line.split(": ")[-1]]


# --- command lines ----------------------------------------------------------------------------------------------------------------


def commands(name: str) -> list[str]:
    return [block for block in blocks(name) if OURS.search(block)]


def test_every_command_line_of_the_guides_is_read_flag_by_flag(tmp_path: Path):
    count = 0
    for name in GUIDES:
        for block in commands(name):
            file = tmp_path / "given.sh"
            file.write_text(block, encoding="utf-8")
            system = "mindspeed-rl" if name.startswith("mindspeed-rl") else "mindspeed-llm"
            found = translate_arguments(system, [str(file)])
            text = re.sub(r"#.*", "", block)
            flags = {canonical(flag) for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
            flags |= set(re.findall(r"^export (\w+)=", text, re.M))
            assert {one.entry.key for one in found.outcomes} == flags, block
            count += 1
    assert count == 13


def test_what_follows_a_pipe_or_a_redirection_is_no_value():
    script = "cd x && python cli/train_grpo.py --config-name r1_zero.yaml 2>&1 | tee a.log; TP=2; echo '|' \"a;b\" > out --x &\n# | y\n"
    assert [[word.text for word in words] for words in parse_script(script, "s").commands] == [
        ["cd", "x"], ["python", "cli/train_grpo.py", "--config-name", "r1_zero.yaml"], ["tee", "a.log"], ["echo", "|", "a;b", "--x"],
    ]  # fmt: skip


def flags_of(line: str) -> list[str]:
    return re.findall(r"(?<![\w-])--([a-z][\w-]*)", re.sub(r"#.*", "", line))


def assert_misspelt_flags_are_caught(system: str, block: str, file: Path) -> None:
    """All flags of a block with their last letters doubled: each is named with its line and its
    right name.
    """
    lines = block.splitlines()
    file.write_text(
        re.sub(r"(?<![\w-])--([a-z][\w-]*)", lambda flag: flag[0] + flag[0][-1], block),
        encoding="utf-8",
    )
    with pytest.raises(MsrlError) as caught:
        translate_arguments(system, [str(file)])
    found = str(caught.value).splitlines()
    for number, line in enumerate(lines, 1):
        for flag in flags_of(line):
            assert any(
                f"given.sh:{number}: " in one and f"'{canonical(flag)}'" in one for one in found
            ), (line, found)


@pytest.mark.parametrize("name", ["mindspeed-rl-r1-zero", "mindspeed-llm-full-pipeline"])
def test_every_flag_of_a_guides_command_line_is_caught_when_it_is_misspelt(
    name: str, tmp_path: Path
):
    for block in commands(name):
        assert_misspelt_flags_are_caught("mindspeed-llm", block, tmp_path / "given.sh")


def test_lightrfts_examples_fragments_and_variables_are_read(tmp_path: Path):
    file = tmp_path / "given.sh"
    found = blocks("lightrft-parameters")
    assert len(found) == 5
    fragments = [block for block in found if block.lstrip().startswith("--")]
    variables = next(block for block in found if "export NCCL_DEBUG" in block)
    for text in [*fragments, *(block + "\n" + variables for block in found if "python" in block)]:
        file.write_text(text, encoding="utf-8")
        told = {one.entry.key for one in translate_arguments("lightrft", [str(file)]).outcomes}
        assert told == set(re.findall(r"(?<!\w)--(\w+)", text)) | set(
            re.findall(r"^export (\w+)=", text, re.M)
        )


def test_every_flag_of_lightrfts_examples_is_caught_when_it_is_misspelt(tmp_path: Path):
    for block in (block for block in blocks("lightrft-parameters") if "python" in block):
        assert_misspelt_flags_are_caught("lightrft", block, tmp_path / "given.sh")
