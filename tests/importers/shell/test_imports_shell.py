"""Shell scripts as they are shipped: variables, branches, launchers and placeholders."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.report import full
from msrl.importers.shell import flags, parse_script
from msrl.importers.translation import KeyStatus, Translation
from support import assert_mentions, mentions

PROGRAM = "python prog.py"


def words(script: str, name: str = "examples/run.sh") -> list[str]:
    """Return the words after the program of the last command."""
    return [word.text for word in parse_script(script, name).commands[-1]][2:]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=x\nprog $A ${A}y \"$A z\" '$A'", ["x", "xy", "x z", "$A"]),
        ("prog ${1:-usual} ${B:-} ${B-c} ${HOME:+set}", ["usual", "c", "set"]),
        ("A=\nprog a $A $NOBODY_SETS_THIS b", ["a", "b"]),
        ('A="--x 1 \\\n --y 2"\nprog $A', ["--x", "1", "--y", "2"]),
        ("N=2\nM=8\nprog $(($N*M)) $((N + 1)) $((M/3))", ["16", "3", "2"]),
        ("A=(a 'b c' d)\nprog \"${A[@]}\" ${A[1]}", ["a", "b c", "d", "b", "c"]),
        ("A=(x)\nA+=(y)\nprog ${A[@]}", ["x", "y"]),
        (
            "P=/a/b.tar.gz\nprog ${P##*/} ${P%.gz} ${P//a/o}",
            ["b.tar.gz", "/a/b.tar", "/o/b.tor.gz"],
        ),
        ("prog $(dirname $0) `basename a/b.sh .sh` $(cd x/../y && pwd)", ["examples", "b", "y"]),
        ("prog $(basename $(dirname $0))_$(echo on)", ["examples_on"]),
        ("export A=1 B=2\nprog $A $B", ["1", "2"]),
        ("prog --x 1 \\  \n  --y 2 \\", ["--x", "1", "--y", "2"]),
        ('prog $([ -n "" ] && echo on) $([ -z "" ] && echo off)', ["off"]),
    ],
)
def test_words_are_expanded_as_bash_does(script: str, expected: list[str]) -> None:
    assert words(script.replace("prog", PROGRAM)) == expected


def test_the_time_of_a_script_is_that_of_its_import() -> None:
    (word,) = words(f"T=$(date +%Y)\n{PROGRAM} run-$T")
    assert word == f"run-{time.strftime('%Y')}"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ('-z "$1"', "usual"),
        ('-n "$1"', "other"),
        ('"$MODE" = fast', "usual"),
        ('"$MODE" != fast', "other"),
        ('"$MODE" == "slow"', "other"),
    ],
)
def test_a_branch_that_cannot_run_sets_nothing(condition: str, expected: str) -> None:
    script = f"MODE=fast\nif [ {condition} ]; then\n  A=usual\nelse\n  A=other\nfi\n{PROGRAM} $A"
    assert words(script) == [expected]


def test_commands_of_branches_with_an_unknown_condition_are_read() -> None:
    script = "if [ $(hostname) = $X ]; then\n  ray start --head\nelse\n  ray start --address=a\nfi"
    assert [command[-1].text for command in parse_script(script, "s.sh").commands] == [
        "--head",
        "--address=a",
    ]


@pytest.mark.parametrize(
    "value", ["$(curl http://x)", "${A^^}", "$((1.5 * 2))", "$NOBODY_SETS_THIS", "$(ls | wc -l)"]
)
def test_a_value_that_only_a_run_knows_is_named_with_its_line(value: str) -> None:
    (command,) = parse_script(f"\n{PROGRAM} --load {value}", "s.sh").commands
    with pytest.raises(MsrlError) as caught:
        flags(command, "s.sh")
    assert_mentions(str(caught.value), "s.sh:2: ", value.strip("$(){}").split()[0])


def convert(system: str, text: str, folder: Path) -> Translation:
    file = folder / "given.sh"
    file.write_text(text, encoding="utf-8")
    return translate_arguments(system, [str(file)])


def native_tree(translation: Translation) -> Any:
    return plain(parse(native_yaml(translation), "native.yaml"))


CONVERT = "python convert_ckpt_v2.py --load-model-type hf --save-model-type mg --save-dir out "


def test_of_a_repeated_flag_the_last_value_counts(tmp_path: Path) -> None:
    translation = convert("mindspeed-llm", f"{CONVERT} --load-dir a --load-dir b", tmp_path)
    assert native_tree(translation)["convert"]["load"] == "b"
    (first,) = [o for o in translation.key_results if o.entry.value == "a"]
    assert_mentions(first.text, "overrides")


def test_placeholders_stay_whole_and_are_reported(tmp_path: Path) -> None:
    text = f'LOAD="your model path"\n{CONVERT} --load-dir $LOAD'
    translation = convert("mindspeed-llm", text, tmp_path)
    assert native_tree(translation)["convert"]["load"] == "your model path"
    (key_result,) = [o for o in translation.key_results if o.entry.key == "load_dir"]
    assert_mentions(key_result.text, "placeholder")


@pytest.mark.parametrize("value", ["$NOT_SET", "${NOT_SET}", '"$NOT_SET"', "a$NOT_SET", "$OTHER"])
def test_a_variable_assigned_from_an_unset_one_has_no_value(value: str) -> None:
    script = f"OTHER=$NOT_SET\nNODES={value}\nexport NODES\n{PROGRAM} --load=$NODES $NODES"
    (command,) = parse_script(script, "s.sh").commands
    load = command[2]
    assert load.text.startswith("--load=")
    assert_mentions(load.problem, "$NOT_SET is not set")


@pytest.mark.parametrize(
    "text",
    [
        "NODES=$((NOT_SET * 8))",
        "((NODES = NOT_SET + 1))",
        'let "NODES = 1 + NOT_SET"',
        "NODES=8; ((NODES += NOT_SET))",
        "LIST=(8 16); NODES=${LIST[NOT_SET]}",
        "OTHER=NOT_SET; NODES=$((OTHER + 1))",
    ],
)
def test_a_calculation_with_an_unset_variable_has_no_value(text: str) -> None:
    (command,) = parse_script(f"{text}\n{PROGRAM} --load $NODES", "s.sh").commands
    assert_mentions(command[3].problem, "$NOT_SET is not set")


def test_counters_and_conditions_start_from_zero_as_in_bash() -> None:
    script = parse_script(
        f"((N++)); ((M += 2)); if ((NOT_SET > 2)); then K=1; else K=3; fi\n{PROGRAM} --n $N$M$K",
        "s.sh",
    )
    assert [word.text for word in script.commands[0][2:]] == ["--n", "123"]
    assert "NOT_SET" in script.scope.empty


def test_an_argument_that_is_not_given_is_reported_unless_it_has_a_default() -> None:
    text = f'if [ -z "$3" ]; then A=1; fi\n{PROGRAM} --n out/$1 --m ${{2:-4}}'
    assert parse_script(text, "s.sh").scope.empty == {"$1": 2}
    assert parse_script(text, "s.sh", ["a"]).scope.empty == {}


def test_an_unset_list_is_reported() -> None:
    script = parse_script(f'{PROGRAM} --n 1 "${{FLAGS[@]}}"', "s.sh")
    assert script.scope.empty == {"${FLAGS[@]}": 1}


def test_an_empty_variable_is_reported(tmp_path: Path) -> None:
    translation = convert("mindspeed-llm", f"{CONVERT} --load-dir a $MOE_ARGS", tmp_path)
    assert [o.entry.key for o in translation.key_results if o.entry.section == "variable"] == [
        "$MOE_ARGS"
    ]


def test_a_script_has_the_variables_of_the_files_that_it_includes(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "env.sh").write_text("LOAD=${LOAD:-a}\nreturn 0\nLOAD=never\n")
    text = f'source "$(dirname "$0")/common/env.sh"\n. ./other.sh\n{CONVERT} --load-dir $LOAD'
    translation = convert("mindspeed-llm", text, tmp_path)
    assert native_tree(translation)["convert"]["load"] == "a"
    included, missing = [o for o in translation.key_results if o.entry.key == "source"]
    assert (included.status, missing.status) == (KeyStatus.APPLIED, KeyStatus.DROPPED)
    assert_mentions(included.text, "env.sh")
    assert_mentions(missing.text, "not read")


def test_variables_of_an_included_file_are_exported_with_allexport(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HCCL_BUFFSIZE=256\n")
    text = "set -a\nsource .env\nset +a\nA=1\n" + TUNE
    translation = convert("mindspeed-llm", text, tmp_path)
    assert native_tree(translation)["cluster"]["env"] == {"HCCL_BUFFSIZE": "256"}


TUNE = (
    "env HCCL_BUFFSIZE=256 torchrun posttrain_gpt.py --stage sft --finetune --load c --lr 1e-5 "
    "--data-path d --global-batch-size 16 --train-iters 20"
)


def test_variables_of_env_reach_the_workers(tmp_path: Path) -> None:
    tree = native_tree(convert("mindspeed-llm", TUNE, tmp_path))
    assert tree["cluster"]["env"] == {"HCCL_BUFFSIZE": "256"}


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        (f"{CONVERT} \\\n # --note x \\\n --load-dir a", "given.sh:2", "comment"),
        (f"{CONVERT} \\ \n --load-dir a", "given.sh:1", "blank"),
        (f"A=1\r\n{CONVERT} \\\r\n --load-dir a\r\n", "given.sh:1", "Windows"),
    ],
)
def test_a_line_that_bash_reads_otherwise_is_reported(
    text: str, line: str, word: str, tmp_path: Path
) -> None:
    file = tmp_path / "given.sh"
    file.write_bytes(text.encode())
    translation = translate_arguments("mindspeed-llm", [str(file)])
    assert native_tree(translation)["convert"]["load"] == "a"
    (note,) = translation.notes
    assert_mentions(note, line, word)
    assert note in "\n".join(full(translation))


def test_comments_and_line_ends_that_change_nothing_are_not_reported(tmp_path: Path) -> None:
    text = (
        f"A=(\n --load-dir a \\\n # comment\n --params-dtype bf16\n)\n{CONVERT} ${{A[@]}} \\ \n\n"
    )
    translation = convert("mindspeed-llm", text, tmp_path)
    assert native_tree(translation)["convert"]["load"] == "a"
    assert translation.notes == []


def test_a_byte_order_mark_is_no_part_of_the_first_command(tmp_path: Path) -> None:
    translation = convert("mindspeed-llm", f"\ufeffA=b\n{CONVERT} --load-dir $A", tmp_path)
    assert native_tree(translation)["convert"]["load"] == "b"


@pytest.mark.parametrize("braces", ["{" * 4000 + "}" * 4000, "{" * 8000, "{a,b}" * 1500])
def test_a_word_with_thousands_of_braces_is_refused_in_no_time(braces: str) -> None:
    with pytest.raises(MsrlError, match=mentions("run.sh", "nested")):
        words(f"{PROGRAM} {braces}")
    quoted = "{" * 200
    expected = ["ax1", "ax2", "bx1", "bx2", quoted]
    assert words(f"{PROGRAM} {{a,b}}x{{1..2}} '{quoted}'") == expected


def test_braces_for_more_than_a_thousand_words_are_refused_instead_of_cut() -> None:
    assert len(words(f"{PROGRAM} {{1..1000}}")) == 1000
    for braces in ("{1..1001}", "{a,b}{1..501}", "{1..900000000000000000}", "{{1..999},a,b,c}"):
        with pytest.raises(MsrlError, match=mentions("run.sh:2", "1,000 words")):
            words(f"\n{PROGRAM} {braces}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "loop",
    [
        "for i in {1..3600}; do A=a; B=$B,; done",
        "for ((i = 0; i < 3600; i++)); do A=a; B=$B,; done",
        "i=0\nwhile [ $i -lt 3600 ]; do A=a; B=$B,; i=$((i + 1)); done",
    ],
)
def test_variables_that_a_loop_of_more_than_a_thousand_repeats_changes_are_not_known(
    loop: str,
) -> None:
    command = parse_script(f"B=\n{loop}\n{PROGRAM} $A $B $i", "run.sh").commands[-1]
    same, *changed = [word.problem for word in command][2:]
    assert not same and len(changed) == 2 and all(changed)
    assert words(f"{loop.replace('3600', '900')}\n{PROGRAM} $A") == ["a"]


def test_a_script_with_too_many_commands_is_refused_instead_of_cut() -> None:
    loop = "for i in {1..300}; do for j in {1..300}; do :; done; done"
    with pytest.raises(MsrlError, match=mentions("run.sh", "20,000 commands")):
        words(f"{loop}\n{PROGRAM} a")


def test_a_variable_with_a_default_is_not_reported_as_empty(tmp_path: Path) -> None:
    text = f"A_X=${{A_X:-a}}\nB_X=$B_X\n{CONVERT} --load-dir $A_X$B_X"
    translation = convert("mindspeed-llm", text, tmp_path)
    assert native_tree(translation)["convert"]["load"] == "a"
    assert [o.entry.key for o in translation.key_results if o.entry.section == "variable"] == [
        "B_X"
    ]


@pytest.mark.parametrize("digits", ["9" * 6000, "²"], ids=["6000 digits", "superscript"])
@pytest.mark.parametrize(
    "line", ["echo ${N}", "echo $(seq N)", "echo {1..N}", "shift N", "echo $(printf '%Ns' a)"]
)
def test_numbers_without_a_value_end_no_import_with_a_traceback(line: str, digits: str) -> None:
    script = line.replace("N", digits)
    try:
        parse_script(f"set -- a b\n{script}\nrun --a 1\n", "run.sh")
    except MsrlError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("line", ["echo $(date +\0)", "source a\0b", "echo a\0b"])
def test_a_script_with_null_characters_is_refused(line: str) -> None:
    with pytest.raises(MsrlError, match=mentions("run.sh", "null characters")):
        parse_script(f"{line}\n", "run.sh")


LAUNCH = """\
export HCCL_IF_BASE_PORT=24703
YAML=${1:-"grpo"}
CURRENT_IP=$(ifconfig $SOCKET | grep inet | awk '{print $NF}')
if [ "$MASTER_ADDR" = "$CURRENT_IP" ]; then
  ray start --head --port 6766 --node-ip-address=$CURRENT_IP --resources='{"NPU": '$N'}'
  while true; do
      count=$(ray status | jq .npus)
      if [ "$count" -eq 1 ]; then
          python cli/train_grpo.py --config-name $YAML 2>&1 | tee logs/training.log
          break
      fi
  done
else
  ray start --address="$MASTER_ADDR:6766"
fi
"""


def test_a_launch_script_includes_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "grpo.yaml").write_text(
        "megatron_training: {stage: ray_grpo, global_batch_size: 8, train_iters: 2}\n"
        "actor_config: {lr: 1e-6, micro_batch_size: 1, load: ckpt}\n"
        "rl_config: {n_samples_per_prompt: 4, mini_batch_size: 8, actor_resource: {num_npus: 8}}\n"
    )
    (tmp_path / "examples").mkdir()
    translation = convert("mindspeed-rl", LAUNCH, tmp_path / "examples")
    tree = native_tree(translation)
    assert tree["cluster"]["env"] == {"HCCL_IF_BASE_PORT": "24703"}
    assert tree["rollout"]["prompts_per_step"] == 8
    statuses = {o.entry.key: o.status for o in translation.key_results}
    assert statuses["config_name"] is KeyStatus.APPLIED
    assert statuses["node_ip_address"] is KeyStatus.PLACEMENT


def test_a_launch_script_without_its_file_says_how_to_run_it(tmp_path: Path) -> None:
    with pytest.raises(MsrlError) as caught:
        convert("mindspeed-rl", LAUNCH, tmp_path)
    assert_mentions(caught.value, "config_name=grpo", "msrl train-grpo --config-name NAME")


@pytest.mark.parametrize(
    ("program", "feature"),
    [
        ("train_fsdp2.py config.yaml", "FSDP2"),
        ("train_prm.py --config-name x", "reward models"),
    ],
)
def test_programs_without_a_counterpart_are_refused_with_the_reason(
    program: str, feature: str, tmp_path: Path
) -> None:
    with pytest.raises(MsrlError) as caught:
        convert("mindspeed-llm", f"torchrun --nnodes 1 {program}", tmp_path)
    first, second = str(caught.value).splitlines()
    assert_mentions(first, "nothing to import")
    assert_mentions(second, program.split()[0], "not imported", feature)
