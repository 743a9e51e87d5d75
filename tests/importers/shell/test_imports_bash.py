"""Shell scripts: the commands that msrl reads are those that bash runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from msrl.cli.app import app
from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.report import full
from msrl.importers.shell import parse_script
from support import assert_mentions

SCRIPTS = {
    "bad name": 'export 1x=2 "a b=c" TP=3 || A=4\nprog --tp $TP --a $A',
    "and true": 'TP=\n[ -z "$TP" ] && TP=2\nprog --tp $TP',
    "or assign": 'TP=4\n[ -n "$TP" ] || TP=1\nprog --tp $TP',
    "colon default": ": ${TP:=4}\nprog --tp $TP",
    "unset if": 'ARGS="--a 1"\nif [ "$DEBUG_X" = 1 ]; then ARGS="$ARGS --b 2"; fi\nprog $ARGS',
    "unset else": 'if [ "$MODE_X" = big ]; then\n TP=8\nelse\n TP=1\nfi\nprog --tp $TP',
    "if not": 'X=1\nif [ ! "$X" = 1 ]; then A=2; else A=3; fi\nprog --a $A',
    "if and": 'X=1;Y=2\nif [ "$X" = 1 ] && [ "$Y" = 3 ]; then A=2; else A=3; fi\nprog --a $A',
    "if gt": "X=5\nif [ $X -gt 3 ]; then A=2; else A=3; fi\nprog --a $A",
    "if arith": "X=5\nif (( X > 3 )); then A=2; else A=3; fi\nprog --a $A",
    "nested if": "X=a\nY=c\nif [ $X = b ]; then\n if [ $Y = c ]; then A=1; fi\nelse\n"
    " if [ $Y = d ]; then A=2; else A=4; fi\nfi\nprog --a $A",
    "case q": 'MODE="qwen"\ncase "$MODE" in\n  "llama"|"qwen")\n    A=1\n    ;;\n'
    "  *)\n    A=3\n    ;;\nesac\nprog --a $A",
    "case glob": "MODE=qwen7b\ncase $MODE in qwen*) A=1;; *) A=2;; esac\nprog --a $A",
    "for": "for TP in 1 2 4; do\n prog --tp $TP\ndone",
    "for acc": 'ARGS=""\nfor F in a b; do\n ARGS="$ARGS --$F 1"\ndone\nprog $ARGS',
    "while": "N=0\nwhile [ $N -lt 2 ]; do N=$((N+1)); done\nprog --n $N",
    "function": "run() {\n prog --tp $1 --pp $2\n}\nrun 4 2",
    "function2": 'function run {\n local tp=$1\n prog --tp $tp "${@:2}"\n}\nrun 4 --pp 2',
    "function sets": "defaults() {\n TP=8\n}\nTP=2\nprog --tp $TP",
    "function called sets": "defaults() {\n TP=8\n}\nTP=2\ndefaults\nprog --tp $TP",
    "heredoc": "cat > /dev/null <<EOF\nTP=9\nit's\nEOF\nTP=2\nprog --tp $TP",
    "heredoc q": "TP=2\ncat > /dev/null <<'EOF'\nTP=9\nprog --tp 100\nEOF\nprog --tp $TP",
    "herestring": 'TP=2\ncat <<< "TP=3" > /dev/null\nprog --tp $TP',
    "array": 'ARGS=(\n --tp 4 # tensor\n --name "a b"\n)\nprog "${ARGS[@]}"',
    "array append": "ARGS=(--tp 4)\nARGS+=(--pp 2)\nprog ${ARGS[@]}",
    "array cond": "ARGS=(--tp 4)\nFLASH=1\n[[ $FLASH == 1 ]] && ARGS+=(--flash)\n"
    "[[ $FLASH == 0 ]] && ARGS+=(--noflash)\nprog ${ARGS[@]}",
    "array index": "S=(1 2 4)\nprog --tp ${S[1]} --n ${#S[@]}",
    "array comment paren": 'ARGS=(\n --tp 4 # (tensor)\n --pp 2\n)\nprog "${ARGS[@]}"',
    "single in double": 'A="it\'s"\nprog --a "$A"',
    "ansi c": "prog --a $'x\\ty'",
    "concat": "A=7\nprog --a \"x\"$A'z'${A}B",
    "escaped dollar": "A=7\nprog --a \"\\$A\" --b '$A'",
    "substr": "A=abcdef\nprog --a ${A:1:3}",
    "length": "A=abcdef\nprog --a ${#A}",
    "upper": "A=abc\nprog --a ${A^^}",
    "indirect": "B=5\nA=B\nprog --a ${!A}",
    "repl": "A=a/b/c\nprog --a ${A//\\//_} --b ${A##*/} --c ${A%/*} --d ${A#a/}",
    "repl anchor": "A=abca\nprog --a ${A/#a/x} --b ${A/%a/x} --c ${A/b*/x}",
    "arith": "A=3\nB=4\n"
    "prog --a $((A*B)) --b $(( $A + ${B} )) --c $((A>B?A:B)) --d $((2**5)) --e"
    " $((7/2)) --f $((7%4)) --g $((-7/2))",
    "arith cmp": "A=3\nprog --a $((A>2)) --b $((A==3 && 1))",
    "arith assign": "A=3\n((A+=2))\nprog --a $A",
    "let": "A=3\nlet B=A*2\nprog --a $B",
    "expr": "A=3\nB=`expr $A \\* 2`\nprog --a $B",
    "expr2": "A=3\nB=$(expr $A + 2)\nprog --a $B",
    "env prefix shadow": "A=1\nA=2 prog --a $A",
    "export q": 'export A="x y"\nprog --a "$A"',
    "unset": "A=1\nunset A\nprog --a ${A:-9}",
    "default empty": 'A=\nprog --a ${A:-9} --b "${A-8}" --c ${B_X-7} --d ${A:+6}x',
    "default nested": "prog --a ${A_X:-${B_X:-5}}",
    "default q": 'prog --a "${A_X:-"x y"}"',
    "pos": 'A=${1:-5}\nB=$2\nprog --a $A --b "$B" --c $#',
    "cont blank": "prog --a 1 \\\n\n--b 2",
    "eval": 'CMD="prog --a 1"\neval $CMD',
    "cmd var": 'CMD="prog --a 1"\n$CMD --b 2',
    "bash c": 'bash -c "prog --a 1"',
    "subshell": "(A=5; prog --a $A)",
    "subshell scope": "A=1\n(A=5)\nprog --a $A",
    "group": "{ A=5; prog --a $A; }",
    "exit early": "A=1\nprog --a $A\nexit 0\nprog --a 2",
    "false and": "false && prog --a 1\nprog --a 2",
    "true or": "true || A=5\nA=${A:-1}\nprog --a $A",
    "brace": "prog --a {1,2} --b x{1..3}",
    "tilde": "prog --a ~/x",
    "local export": "export A\nA=4\nprog --a $A",
    "readonly": "readonly A=4\ndeclare -r B=5\ntypeset C=6\ndeclare -x D=7\n"
    "local_=1\nprog --a $A --b $B --c $C --d $D",
    "declare i": "declare -i N=4\nprog --a $N",
    "ifs": "A=1,2\nB=${A//,/ }\nprog --a $B",
    "set dashdash": "set -- 4 2\nprog --tp $1 --pp $2",
    "shift": "set -- 4 2\nshift\nprog --tp $1",
    "bracket and": "X=1;Y=2\nif [[ $X == 1 && $Y == 3 ]]; then A=1; else A=2; fi\nprog --a $A",
    "bracket o": "X=1\nif [ $X = 2 -o $X = 1 ]; then A=1; else A=2; fi\nprog --a $A",
    "regex": "X=qwen7b\nif [[ $X =~ ^qwen ]]; then A=1; else A=2; fi\nprog --a $A",
    "pattern": "X=qwen7b\nif [[ $X == qwen* ]]; then A=1; else A=2; fi\nprog --a $A",
    "bare test": "X=\nif [ $X ]; then A=1; else A=2; fi\nprog --a $A",
    "quoted test": 'X=yes\nif [ "$X" ]; then A=1; else A=2; fi\nprog --a $A',
    "bool var": "X=true\nif $X; then A=1; else A=2; fi\nprog --a $A",
    "echo prog": "echo prog --a 1\nprog --a 2",
    "nested sub": "A=$(basename $(dirname /a/b/c))\nprog --a $A",
    "while getopts": 'while getopts "t:" o; do case $o in t) TP=$OPTARG;; esac; done\n'
    "TP=${TP:-3}\nprog --tp $TP",
    "while case": "TP=2\nwhile [[ $# -gt 0 ]]; do\n case $1 in\n"
    '  --tp) TP="$2"; shift 2;;\n  *) shift;;\n esac\ndone\n'
    "prog --tp $TP",
    "not set u": "prog --a 1 $UNSET_X --b 2",
    "split inside": 'A="1 2"\nprog x$A y${A}z "$A"q',
    "split blanks": 'A=" 1 2 "\nprog x$A y${A}z',
    "split at continuation": 'A="--a 1"\nB=(--b 2)\nprog ${A}\\\n${B[@]}\\\n --c 3',
    "list inside": 'A=(--x "1 2" 3)\nprog pre"${A[@]}"post pre${A[@]}post "${A[*]}"',
    "append text": 'A=1\nA+=2\nB="--a 1"\nB+=" --b 2"\nprog --a $A $B',
    "array name": 'A=("a b" c)\nprog "${A[0]}" "${A}" ${#A[0]} $A ${#A[@]}',
    "arith parens": "A=$(( (1024 + 2048) * 1 ))\nprog $A $(((1+2)*(3+4))) $((-(3)))",
    "arith C": "A=007\nprog $((16#ff)) $((010)) $((1<<3)) $((7&3)) $((1,2)) $((~0)) $((10#$A+1))",
    "arith steps": "x=5\nprog $((x++)) $x $((++x)) $((x--)) $x $((0 && x++)) $x",
    "arith old": "A=3\nB=$[A+2]\nprog $B",
    "suffix": "A=abc.def.gh\nprog ${A%%.*} ${A##*.} ${A%.*} ${A#*.}",
    "case falls": "case 7b in\n (7b) L=32 ;&\n 14b) L=48 ;;\n *) L=1 ;;\nesac\nprog $L",
    "case variable": "B=7b\ncase 7b in $B) L=1 ;; *) L=2 ;; esac\nprog $L",
    "translated": 'prog $"x y"',
    "braces": "prog {a,b}{1,2} {1..5..2} {01..03} x{,y} \"{a,b}\" '{1..3}'",
    "for C": "for ((i=0;i<3;i++)); do prog $i; done",
    "positional words": 'set -- a "b c"\nprog "$*" $# "$@" $1 end ${2} ${@:1:1} ${!#}',
    "printf": "printf -v A \"%s-%d\" x 5\nprog $A $(printf '%03d' 7)",
    "printf list": 'A=(1 2)\nprintf -v B "%s," "${A[@]}"\nprog ${B%,}',
    "exec": "exec prog --a 1\nprog 2",
    "return outside": "return 0 2>/dev/null\nprog b",
    "own separators": 'A=a,b,c\nIFS=","\nB=(1 2)\nprog $A "${B[*]}"',
    "quotes in text": "A=\"--x '1 2'\"\nprog $A",
    "json in text": 'A="--m {\\"a\\":\\"b\\"}"\nprog $A',
    "eval quotes": "C=\"prog --a 1 --b 'x y'\"\neval $C",
    "bash c arguments": "A=1\nbash -c 'A=2; prog $0 $1' a b\nprog $A",
    "default quotes": "prog \"${B_X:-'q'}\" ${B_X:-'q r'} ${B_X:-\"x y\" z}",
    "default of empty": 'f() { prog ${1:-d} ${2-e}; }\nf ""\nf x y',
    "substr without start": "A=abc\nprog ${A: -1} ${A::2}",
    "comment in backticks": "prog --a 1 `# comment` --b $(: comment) 2",
    "local": "A=1\nf() { local A=2; g; }\ng() { prog $A; }\nf\nprog $A",
    "prefix of a function": "A=1\nf() { prog $A; }\nA=2 f\nprog $A",
    "appends to itself": 'for i in $(seq 0 2); do ACC_X="$ACC_X$i,"; done\nprog ${ACC_X%,}',
    "seq": "prog $(seq -s, 0 3) $(seq 5 -2 1)",
    "env": "env -u B_X A=1 prog --a 1",
    "comment in array": 'A=(\n --a 1 # one\n # --b 2\n --c 3\n)\nprog "${A[@]}"',
    "text of flags": 'A="\n --a 1 \\\n --b 2\n"\nB="\n --c 3\n"\nprog $A \\\n $B',
    "getopts": "while getopts t: o; do TP=$OPTARG; done\nprog --tp ${TP:-3}",
}
# The value is known only to a run, so that the importer must refuse the word.
UNKNOWN = {
    "file": "if [ -f /x ]; then A=1; else A=2; fi\nprog --a $A",
    "output": '[ "$(hostname)" = a ] && A=2\nprog --a $A',
    "input": "read -r A <<EOF\n1\nEOF\nprog --a $A",
    "lines": 'mapfile -t A </x\nprog "${A[@]}"',
    "lines of readarray": "readarray A </x\nprog --a ${A[0]}",
    "names as indices": "declare -A M=([a]=1)\nprog --a ${M[a]}",
    "loop": "N=$(nproc)\nfor ((i=0; i<N; i++)); do\n  prog --a $i\ndone",
    "element": "A[0]=3\nprog --a ${A[0]}",
    "case": "case $(uname) in a) A=1;; *) A=2;; esac\nprog --a $A",
    "program": "if grep x y; then A=1; fi\nprog --a $A",
    "default": "if grep x y; then A=1; fi\nprog --a ${A:-5}",
    "match": "[[ abc =~ ^a(.)c$ ]]\nprog --a ${BASH_REMATCH[1]}",
    "random": "prog --a $RANDOM",
    "process": "prog --a x_$$",
    "item": "A=(1 2)\nunset 'A[0]'\nprog --a ${A[0]}",
}


def read_commands(text: str) -> list[list[str]]:
    commands = parse_script(text, "run.sh").commands
    assert not [word.problem for words in commands for word in words if word.problem]
    return [[word.text for word in words[1:]] for words in commands if words[0].text == "prog"]


@pytest.mark.sample(60)
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_are_those_that_bash_runs(name: str, tmp_path: Path) -> None:
    program = tmp_path / "prog"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" >>out\nprintf "\\n" >>out\n')
    program.chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment, timeout=60, check=False,
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    lines = (tmp_path / "out").read_text().split("\n")[:-1]
    assert read_commands(SCRIPTS[name]) == [line.split("\0")[:-1] for line in lines]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_value_that_depends_on_a_run_is_not_guessed(name: str) -> None:
    commands = parse_script(UNKNOWN[name], "run.sh").commands
    values = [words[-1] for words in commands if words[0].text == "prog"]
    assert values and all(word.problem for word in values)


@pytest.mark.parametrize(
    ("text", "word"), [("if true; then\n  a", "fi"), ("f() {\n  a", "}"), ("a\nfi", "fi")]
)
def test_a_block_that_is_not_closed_is_refused(text: str, word: str) -> None:
    with pytest.raises(MsrlError) as caught:
        parse_script(text, "run.sh")
    assert_mentions(str(caught.value), "run.sh:", word)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "while true; do f; done; f() { f; f; }; f",
        "for i in {1..999}; do for j in {1..999}; do :; done; done",
        "A=$((9**9**9))",
        "A=$((((((((2**64)**64)**64)**64)**64)**64)))",
        "A=$((2<<64))\nB=$((A<<64))\nC=$(((10**64)**64*10**64*10**64*10**64*10**64))",
        "A=9\n" + "(( A *= A ))\n" * 60,
        "A=x\n" + "A=$A$A\n" * 60,
        'eval "$(eval eval)"' * 500,
        "$(" * 3000,
        "if [ x ]; then " * 300,
    ],
)
def test_hostile_scripts_end_soon(text: str) -> None:
    try:
        parse_script(text, "run.sh")
    except MsrlError as error:
        assert "run.sh" in str(error)


LINE_FEED = r"$'x\nseed: 7\ncluster: {env: {A: b}}\x1b[2J'"


def test_a_value_of_a_script_cannot_add_keys_to_the_configuration(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    flags = f"--pretrain m --prompt_data d --ckpt_path {LINE_FEED} --n_samples_per_prompt 4"
    script.write_text(f"torchrun train_colocate.py {flags} --advantage_estimator group_norm\n")
    translation = translate_arguments("lightrft", [str(script)])
    tree = plain(parse(native_yaml(translation), "native.yaml"))
    assert "seed" not in tree and "cluster" not in tree
    assert not [line for line in full(translation) if "\n" in line]


def test_a_key_of_a_file_cannot_add_keys_to_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "megatron_training: {stage: ray_grpo, global_batch_size: 8, train_iters: 2}\n"
        "actor_config: {lr: 1e-6, micro_batch_size: 1, load: ckpt}\n"
        "rl_config: {n_samples_per_prompt: 4, mini_batch_size: 8, actor_resource: {num_npus: 8}}\n"
        'runtime_env: {env_vars: {"A: 1\\nseed": "7"}}\n'
    )
    try:
        translation = translate_arguments("mindspeed-rl", [str(file)])
    except MsrlError:
        return
    assert "seed" not in plain(parse(native_yaml(translation), "native.yaml"))


def test_the_report_of_an_import_has_no_escape_sequences(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python convert_ckpt_v2.py --load-model-type hf --save-model-type mg "
        "--load-dir $'a\\e[31mb' --save-dir out\n"
    )
    arguments = ["config", "import", "--from", "mindspeed-llm", str(script)]
    result = CliRunner().invoke(app, arguments, color=True)
    assert "load_dir" in result.output and "\x1b" not in result.output


def test_two_different_trainings_of_a_script_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    command = "python convert_ckpt_v2.py --load-model-type hf --save-model-type mg --load-dir a"
    script.write_text(f"for TP in 1 2; do\n {command} --save-dir out$TP\ndone\n")
    with pytest.raises(MsrlError) as caught:
        translate_arguments("mindspeed-llm", [str(script)])
    assert_mentions(str(caught.value), "run.sh", "2", "convert")


def test_foreign_files_have_the_meaning_of_yaml_1_1() -> None:
    text = (
        "base: &base {lr: 1e-6, tp: 010}\n"
        "actor: {<<: *base, eager: yes, fuse: Off, name: 'no', tp: 4}\n"
        "critic: {<<: [*base], t: 1:30, n: 1_000}\n"
    )
    assert plain(parse(text, "a.yaml", is_old=True)) == {
        "base": {"lr": 1e-6, "tp": 8},
        "actor": {"lr": 1e-6, "tp": 4, "eager": True, "fuse": False, "name": "no"},
        "critic": {"lr": 1e-6, "tp": 8, "t": 90, "n": 1000},
    }
