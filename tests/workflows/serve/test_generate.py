"""`msrl generate`: accepted and refused input, and completions compared with transformers."""

from __future__ import annotations

import json
import os
import signal
from datetime import datetime

import pytest
import torch

from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.config.schema import Config, GenerateConfig
from msrl.data.tokenizer import load_tokenizer
from msrl.errors import MsrlError
from msrl.models.parallel_layout import ParallelLayout
from msrl.workflows import engine as serving
from msrl.workflows.serve import generate
from support import assert_each_mentions, assert_mentions, mentions, shared_data
from test_cli import msrl
from tiny_qwen2 import make_tokenizer, save_model
from training_runs import Command, children, files_in, make_tmp, shared_memory, wait_for_end

GREEDY = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    save_model(path, tied=False)
    return path


@pytest.fixture(scope="module")
def mcore(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("mcore") / "tp2"
    write_mcore(open_weights(folder), path, McoreTarget(ParallelLayout(2, 2), vocab_multiple=64))
    return path


@pytest.fixture(scope="module")
def renderer(folder):
    return serving.choose_renderer(folder, None)


def rows_file(tmp_path, *rows):
    path = tmp_path / "in.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@torch.no_grad()
def greedy_text(folder, messages, num_tokens=GREEDY):
    """Return the greedy response of transformers to messages with the tokenizer's template."""
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


USER = [{"role": "user", "content": "2+3="}]
DIALOGUE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "and now?"},
]


def test_a_prompt_a_dialogue_and_a_list_under_prompt_are_rendered_by_the_tokenizers_own_template(
    tmp_path, renderer
):
    path = rows_file(tmp_path, {"prompt": "2+3="}, {"messages": DIALOGUE}, {"prompt": DIALOGUE})
    requests = generate.read_requests(GenerateConfig(input=str(path)), renderer)
    expected = [
        make_tokenizer().apply_chat_template(m, add_generation_prompt=True)["input_ids"]
        for m in (USER, DIALOGUE, DIALOGUE)
    ]
    assert [r.token_ids.tolist() for r in requests] == expected


def test_the_system_text_goes_to_rows_that_have_none(tmp_path, renderer):
    path = rows_file(
        tmp_path,
        {"messages": DIALOGUE[1:]},
        {"messages": [{"role": "system", "content": "x"}, *DIALOGUE[1:]]},
    )
    requests = generate.read_requests(GenerateConfig(input=str(path), system="be brief"), renderer)
    assert (
        requests[0].token_ids.tolist()
        == make_tokenizer().apply_chat_template(DIALOGUE, add_generation_prompt=True)["input_ids"]
    )
    assert "be brief" not in make_tokenizer().decode(requests[1].token_ids)


def test_a_raw_prompt_is_used_unchanged_including_control_tokens(renderer):
    (request,) = generate.read_requests(GenerateConfig(prompt="<|im_start|>ab", raw=True), renderer)
    assert request.token_ids.tolist() == [1, *make_tokenizer()("ab")["input_ids"]]


def test_several_prompts_are_requests_with_their_texts(renderer):
    section = GenerateConfig(prompt=("ab", "cd"), raw=True)
    requests = generate.read_requests(section, renderer)
    assert [request.row["prompt"] for request in requests] == ["ab", "cd"]


def test_without_a_chat_template_the_prompt_is_the_text(tmp_path):
    save_model(tmp_path, tied=True, chat_template=False)
    renderer = serving.choose_renderer(tmp_path, None)
    assert renderer.template.name == "empty"
    (request,) = generate.read_requests(GenerateConfig(prompt="ab"), renderer)
    assert request.token_ids.tolist() == make_tokenizer()("ab")["input_ids"]


def test_every_wrong_row_is_reported_with_its_line(tmp_path, renderer):
    rows = (
        {"prompt": "good"},
        {"text": "no prompt"},
        {"prompt": 3},
        {"messages": [{"role": "boss", "content": "x"}]},
        {"messages": DIALOGUE[:3]},
        {"prompt": "x", "completions": []},
        {"prompt": "x", "messages": USER},
        [1],
    )
    path = rows_file(tmp_path, *rows)
    with pytest.raises(MsrlError) as caught:
        generate.read_requests(GenerateConfig(input=str(path)), renderer)
    assert_each_mentions(
        str(caught.value).splitlines(),
        (f"{path}:2", "prompt", "messages", "text"),
        (f"{path}:3", "prompt", "role", "content"),
        (f"{path}:4", "message 1", "system, user, assistant, tool"),
        (f"{path}:5", "message", "assistant", "user"),
        (f"{path}:6", "completions", "column"),
        (f"{path}:7", "prompt", "messages, prompt"),
        (f"{path}:8", "JSON object", "list"),
    )


@pytest.mark.slow
def test_tools_and_their_calls_are_rendered_by_the_models_template(tmp_path):
    folder = shared_data("tokenizers", "qwen2.5-0.5b-instruct")
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "x",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    renderer = serving.choose_renderer(folder, None)
    rows = (
        {"messages": messages, "tools": tools},
        {"messages": USER, "tools": None},
        {"prompt": "2+3=", "tools": "saws"},
        {"prompt": USER, "tools": tools},
        {"prompt": "2+3=", "tools": tools},
    )
    path = rows_file(tmp_path, *rows)
    requests = generate.read_requests(GenerateConfig(input=str(path)), renderer)
    hf = load_tokenizer(folder)
    conversations = ((messages, tools), (USER, None), (USER, None), (USER, tools), (USER, tools))
    expected = [
        hf.apply_chat_template(m, tools=t, add_generation_prompt=True)["input_ids"]
        for m, t in conversations
    ]
    assert [r.token_ids.tolist() for r in requests] == expected
    for row, message in (
        ({"messages": USER, "tools": "saws"}, (":1", "tools", "JSON")),
        ({"prompt": USER, "tools": "saws"}, (":1", "tools", "JSON")),
        ({"messages": [{**USER[0], "tool_calls": 1}]}, (":1", "message 1", "tool_calls", "int")),
    ):
        with pytest.raises(MsrlError, match=mentions(*message)):
            generate.read_requests(GenerateConfig(input=str(rows_file(tmp_path, row))), renderer)


def test_an_input_without_rows_is_refused(tmp_path, renderer):
    with pytest.raises(MsrlError, match=mentions("no rows")):
        generate.read_requests(GenerateConfig(input=str(rows_file(tmp_path))), renderer)


def test_prompts_that_leave_no_room_for_a_response_are_refused_by_row(tmp_path, renderer):
    path = rows_file(tmp_path, *[{"prompt": "x" * n} for n in (10, 500, 600)])
    requests = generate.read_requests(GenerateConfig(input=str(path), raw=True), renderer)
    with pytest.raises(MsrlError) as caught:
        generate.check_lengths(requests, 500)
    assert_each_mentions(
        [line.split(" tokens")[0] for line in str(caught.value).splitlines()],
        (f"{path}:2", "500"),
        (f"{path}:3", "600"),
    )


def test_only_twenty_wrong_rows_are_listed():
    with pytest.raises(MsrlError) as caught:
        generate._refuse([f"row {n}" for n in range(25)])
    assert_each_mentions(str(caught.value).splitlines()[-2:], ("row 19",), ("5 more",))


def test_an_existing_output_is_not_changed(tmp_path, folder):
    path = tmp_path / "out.jsonl"
    path.write_text("mine")
    with pytest.raises(MsrlError, match=mentions(path, "exists")):
        generate.run(
            Config(generate=GenerateConfig(model=str(folder), prompt="x", output=str(path)))
        )
    assert path.read_text() == "mine"


def test_an_output_that_cannot_be_created_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "out.jsonl"
    with pytest.raises(MsrlError, match=mentions("generate.output=", "out.jsonl", "file")):
        generate.run(
            Config(
                generate=GenerateConfig(model=str(tmp_path / "none"), prompt="x", output=str(path))
            )
        )


def test_rows_that_cannot_be_written_as_json_are_refused_before_generation(tmp_path, renderer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "in.parquet"
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "x", "when": datetime(2026, 1, 1), "image": b"\xff"}]),
        path,
    )
    with pytest.raises(MsrlError, match=mentions("in.parquet", "row 1", "'when'", "JSON")):
        generate.read_requests(GenerateConfig(input=str(path)), renderer)
    with pytest.raises(MsrlError, match=mentions("in.jsonl:1", "'score'", "JSON")):
        generate.read_requests(
            GenerateConfig(input=str(rows_file(tmp_path, {"prompt": "x", "score": float("nan")}))),
            renderer,
        )
    for rows in (
        GenerateConfig(prompt="x\udce4"),
        GenerateConfig(input=str(rows_file(tmp_path, {"prompt": "x", "id": "\ud83d"}))),
    ):
        with pytest.raises(MsrlError, match=mentions("column", "JSON", "surrogates")):
            generate.read_requests(rows, renderer)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(MsrlError, match=mentions("none", "folder")):
        generate.run(Config(generate=GenerateConfig(model=str(tmp_path / "none"), prompt="x")))


def episodes(folder, path, **changes):
    section = {"model": str(folder), "input": str(path), "max_tokens": 100, **changes}
    lake = {"name": "frozen_lake", "options": {"size": 3}, "max_turns": 3, "max_turn_tokens": 8}
    return Config.model_validate({"generate": section, "environment": lake})


@pytest.mark.slow
def test_rows_of_an_environment_need_no_prompt_and_reach_it_as_text(folder, tmp_path):
    rows = [{"id": 1, "answer": 4}, {"prompt": "hi", "level": "hard"}]
    setup = generate.prepare(episodes(folder, rows_file(tmp_path, *rows)))
    first, second = setup.prompts
    assert not len(first.token_ids) and (first.answer, first.extra) == ("4", {"id": "1"})
    assert len(second.token_ids) and second.extra == {"level": "hard"}
    assert setup.engine.engine.max_model_len == 512  # the most that the model has
    retry = {"name": "retry", "options": {"verifier": "acc"}}
    changed = {"environment": retry, "generate": setup_values(folder, tmp_path)}
    with pytest.raises(MsrlError, match=mentions("environment", "row 0", "prompt")):
        generate.prepare(Config.model_validate(changed))


def setup_values(folder, tmp_path):
    return {"model": str(folder), "input": str(tmp_path / "in.jsonl")}


@pytest.mark.full
@pytest.mark.slow
def test_episodes_are_generated_with_their_messages_and_a_summary(folder, tmp_path, capsys):
    path = rows_file(tmp_path, {"id": 1}, {"id": 2})
    config = episodes(folder, path, num_samples=2, temperature=1.0)
    generate.run(config)
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [row["id"] for row in rows] == [1, 2]
    for completion in rows[0]["completions"] + rows[1]["completions"]:
        assert completion["turns"] <= 3 and completion["success"] in (True, False, None)
        roles = [message["role"] for message in completion["messages"]]
        assert roles[:2] == ["user", "assistant"] and completion["fault"] is None
    assert_mentions(captured.err, "4 episodes", "turns")
    generate.run(config)
    assert capsys.readouterr().out == captured.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.full), "mcore"])
def test_a_file_of_prompts_becomes_a_file_of_completions(kind, request, folder, tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    path = rows_file(tmp_path, {"prompt": "2+3=", "id": "ü"}, {"messages": DIALOGUE})
    section = GenerateConfig(
        model=str(request.getfixturevalue(kind)),
        input=str(path),
        output=str(out),
        max_tokens=GREEDY,
    )
    generate.run(Config(generate=section))
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["completions"][0]["text"] for row in rows] == [
        greedy_text(folder, USER),
        greedy_text(folder, DIALOGUE),
    ]
    assert rows[0]["id"] == "ü"
    assert rows[1]["messages"] == DIALOGUE
    assert set(rows[0]["completions"][0]) == {"text", "finish_reason", "num_tokens"}
    assert [p.name for p in out.parent.iterdir()] == ["out.jsonl"]


@pytest.mark.slow
@pytest.mark.full
def test_an_engine_that_loses_a_process_ends_the_command_with_one_message(folder, tmp_path):
    out, tmp = tmp_path / "out.jsonl", make_tmp()
    path = rows_file(tmp_path, *({"prompt": f"{i}"} for i in range(2000)))
    options = ["--input", str(path), "--output", str(out), "--max-tokens", "100", "--tp", "2"]
    arguments = ("generate", "--model", str(folder), "--platform", "cpu", *options)
    command = Command(*arguments, log=tmp_path / "log", tmp=tmp)
    command.when(lambda: "generating" in command.output())
    started = children(command.process.pid)
    segments = shared_memory(started)
    os.kill(next(pid for pid, line in started.items() if "Worker_TP1" in line), signal.SIGKILL)
    assert command.wait() == 1 and not out.exists()
    assert_mentions(command.output(), "engine", "VLLM::Worker", "killed", "same command")
    assert "Traceback" not in command.output() and "ERROR" not in command.output()
    wait_for_end(started)
    assert not [segment for segment in segments if segment.exists()]
    assert files_in(tmp) == []


@pytest.mark.full
@pytest.mark.slow
def test_the_completion_of_one_prompt_is_printed(folder, capsys):
    generate.run(
        Config(generate=GenerateConfig(model=str(folder), prompt="2+3=", max_tokens=GREEDY))
    )
    captured = capsys.readouterr()
    assert captured.out == greedy_text(folder, USER) + "\n"
    assert f"1 completions, {GREEDY} tokens" in captured.err
    assert_mentions(captured.err, "limit")


@pytest.mark.full
@pytest.mark.slow
def test_samples_differ_and_end_before_a_stop_text(folder, capsys):
    letter = greedy_text(folder, USER)[3]
    section = GenerateConfig(
        model=str(folder),
        prompt="2+3=",
        max_tokens=64,
        num_samples=16,
        temperature=1.5,
        seed=1,
        stop=(letter,),
    )
    generate.run(Config(generate=section))
    first = capsys.readouterr().out
    assert letter not in first.replace("[", "").replace("]", "")
    assert first.count("\n\n[") >= 15
    generate.run(Config(generate=section))
    assert capsys.readouterr().out == first


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """Return an adapter in PEFT format, and the folder of the model with it merged by PEFT."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("adapter")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(path / "peft")
    adapted.merge_and_unload().save_pretrained(path / "merged")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(path / "merged")
    return path


def test_an_adapter_is_merged_into_the_weights_that_the_engine_receives(folder, adapter):
    source = serving.open_model(str(folder), "generate.model", str(adapter / "peft"))
    assert serving.needs_weight_transfer(source, str(folder), str(adapter / "peft"))
    expected = dict(
        serving.hf_weights(serving.open_model(str(adapter / "merged"), "generate.model"))
    )
    for name, weight in serving.hf_weights(source):
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)
    base = dict(serving.hf_weights(serving.open_model(str(folder), "generate.model")))
    assert any(not torch.equal(base[name], weight) for name, weight in serving.hf_weights(source))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_missing_adapter_is_refused_by_a_dry_run(command, folder, capsys):
    prompt = ["--prompt", "a"] if command == "generate" else []
    key = f"{command}.lora=gone"
    arguments = [command, "--model", str(folder), *prompt, "--set", key, "--dry-run"]
    assert msrl(*arguments) == 2
    assert_mentions(capsys.readouterr().err, key, "not found")


@pytest.mark.full
@pytest.mark.slow
def test_a_model_with_an_adapter_answers_as_the_merged_one(folder, adapter, capsys):
    section = GenerateConfig(
        model=str(folder), lora=str(adapter / "peft"), prompt="2+3=", max_tokens=GREEDY
    )
    generate.run(Config(generate=section))
    answer = capsys.readouterr().out
    assert answer == greedy_text(adapter / "merged", USER) + "\n"
    assert answer != greedy_text(folder, USER) + "\n"
