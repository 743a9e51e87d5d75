"""Loader: layers, defaults, references, and all errors at once with their location."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from msrl.cli.configuration import load_configuration as load
from msrl.config import sources
from msrl.config.loader import Flag, InvalidConfigError
from msrl.config.schema import Config, RewardSource
from msrl.config.sections.general import LogConfig
from msrl.config.show import to_yaml
from msrl.config.sources import merge, packaged_names, parse, plain, scalar
from msrl.config.unsupported import NOT_YET, NOT_YET_VALUES
from msrl.errors import MAX_ERRORS, ManyErrors, MsrlError
from support import assert_each_mentions, assert_mentions, mentions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty working directory, so that messages contain short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.name


def mistakes(*files: str, sets: tuple[str, ...] = (), flags: tuple[Flag, ...] = ()) -> list[str]:
    with pytest.raises(MsrlError) as caught:
        load(files, sets, flags)
    return str(caught.value).splitlines()


def test_without_any_source_the_defaults_are_used():
    resolved = load()
    assert resolved.config == Config()
    assert str(resolved.origins["train.optimizer.lr"]) == "default"
    assert not resolved.is_set("train")


def test_later_layers_win_key_by_key(folder: Path):
    write(folder / "a.yaml", "train:\n  steps: 5\n  micro_batch: 2\nrun: {name: first}\n")
    write(folder / "b.yaml", "train:\n  steps: 7\n")
    resolved = load(
        ["a.yaml", "b.yaml"], ["run.name=third"], [Flag("train.micro_batch", 4, "--micro-batch")]
    )
    assert (
        resolved.config.train.steps,
        resolved.config.train.micro_batch,
        resolved.config.run.name,
    ) == (7, 4, "third")
    origins = {
        key: str(resolved.origins[key])
        for key in ("train.steps", "train.micro_batch", "run.name", "run.seed")
    }
    assert origins == {
        "train.steps": "b.yaml:2",
        "train.micro_batch": "--micro-batch",
        "run.name": "--set",
        "run.seed": "default",
    }


def test_defaults_are_merged_before_the_file_that_lists_them(folder: Path):
    write(folder / "base" / "model.yaml", "model: {path: base, dtype: float32}\n")
    write(folder / "base" / "both.yaml", "defaults: [model.yaml]\nmodel: {tokenizer: tok}\n")
    write(folder / "main.yaml", "defaults: [sft, base/both.yaml]\nmodel: {path: mine}\n")
    config = load(["main.yaml"]).config
    assert (config.model.path, config.model.dtype, config.model.tokenizer) == (
        "mine",
        "float32",
        "tok",
    )
    assert config.train.optimizer.schedule == "cosine", "from the packaged file sft"


def test_defaults_that_include_their_own_file_are_refused(folder: Path):
    write(folder / "a.yaml", "defaults: [b.yaml]\n")
    write(folder / "b.yaml", "defaults: [a.yaml]\n")
    assert_each_mentions(mistakes("a.yaml"), ("b.yaml:1: defaults: a.yaml", "itself"))


@pytest.mark.parametrize("listed", [1, 2])
def test_defaults_of_too_many_files_are_refused(tmp_path: Path, listed: int):
    """Files that list another one twice multiply."""
    for number in range(sources._MAX_FILES):
        names = ", ".join([f"{number + 1}.yaml"] * listed)
        (tmp_path / f"{number}.yaml").write_text(f"defaults: [{names}]\n")
    (tmp_path / f"{sources._MAX_FILES}.yaml").write_text("run: {name: x}\n")
    first = tmp_path / "0.yaml"
    with pytest.raises(MsrlError, match=mentions(first, "defaults", sources._MAX_FILES)):
        load([str(first)])
    assert load([str(tmp_path / "99.yaml")]).config.run.name == "x"


def test_the_error_about_a_missing_default_names_the_file_that_lists_it(folder: Path):
    write(folder / "a.yaml", "run: {name: x}\ndefaults:\n  - gone.yaml\n")
    (line,) = mistakes("a.yaml")
    assert_mentions(line, "a.yaml:3: defaults: gone.yaml", "file", "packaged")


def test_a_list_replaces_a_list_and_its_items_can_be_set(folder: Path):
    write(
        folder / "a.yaml",
        "reward:\n  sources:\n    - {verifier: acc}\n    - {verifier: format, weight: 0.5}\n",
    )
    config = load(["a.yaml"], ["reward.sources.1.weight=0.1"]).config
    assert [(source.verifier, source.weight) for source in config.reward.sources] == [
        ("acc", 1.0),
        ("format", 0.1),
    ]
    assert load(["a.yaml"], ["reward.sources=[{verifier: acc}]"]).config.reward.sources[1:] == ()
    assert_each_mentions(
        mistakes("a.yaml", sets=("reward.sources.2.weight=1",)), ("--set", "item 2", "2 items")
    )


def test_an_empty_section_keeps_what_is_under_it(folder: Path):
    write(folder / "a.yaml", "train:\n  steps: 5\n  optimizer:\n")
    assert load(["a.yaml"]).config.train.optimizer == Config().train.optimizer


def test_null_resets_the_values_of_earlier_layers(folder: Path):
    write(folder / "a.yaml", "data: {blend: {a: 1.0, b: 2.0}}\neval: {every_steps: 5}\n")
    write(folder / "b.yaml", "data: {blend: null}\neval: ~\n")
    for resolved in (load(["a.yaml", "b.yaml"]), load(["a.yaml"], ["data.blend=null", "eval="])):
        assert resolved.config.data.blend == {} and resolved.config.eval == Config().eval
        assert not resolved.is_set("data.blend") and not resolved.is_set("eval")
    assert load(["a.yaml", "b.yaml"], ["data.blend.c=1.0"]).config.data.blend == {"c": 1.0}
    assert plain(merge(parse("a: {b: {c: 1}}", "1"), parse("a: {b: null}", "2"))) == {
        "a": {"b": None}
    }, "where there is no default"
    preset = load(sets=["algo.preset=dapo", "algo.clip.high=0.5", "algo.clip=null"]).config
    assert preset.algo.clip == load(sets=["algo.preset=dapo"]).config.algo.clip, (
        "the preset's, not the schema's"
    )


def test_names_of_a_mapping_may_contain_dots():
    columns = "preprocess.map_keys={prompt: ask, extra.tag: topic.name}"
    resolved = load([], [columns, "data.blend={data/v1.0: 0.7}"])
    assert resolved.value("preprocess.map_keys.extra.tag") == "topic.name"
    assert resolved.shown("data.blend.data/v1.0") == 0.7
    assert resolved.is_changed("preprocess.map_keys.extra.tag")


def test_errors_about_wrong_values_show_the_required_form():
    sets = (
        "data.blend=[[1.0, a]]",
        "cluster={nodes:2}",
        "reward.sources=[{verifier: acc, options: x}]",
        "train.freeze=[*]",
        "train.freeze=[*bias]",
        "run.seed=4294967296",
    )
    assert_each_mentions(
        mistakes(sets=sets),
        ("--set: train.freeze=[*]", "YAML", "'*.bias'"),
        ("--set: train.freeze=[*bias]", "YAML", "alias", "'*.bias'"),
        ("--set: run.seed=4294967296", 4294967295),
        ("--set: data.blend=[[1.0, a]]", "mapping", "{PREFIX: 0.7, OTHER_PREFIX: 0.3}"),
        ("--set: cluster.nodes:2=null", "colon"),
        ("--set: reward.sources.0.options=x", "mapping", "{NAME: VALUE}"),
    )


def test_references_take_values_types_and_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("WHO", "2024")
    write(
        folder / "a.yaml",
        "run: {name: 'try-${env:WHO}-${train.steps}', dir: '${env:WHO}', "
        "seed: '${rollout.samples_per_prompt}'}\n"
        "train:\n  steps: ${env:STEPS}\n  optimizer: {lr: 1e-4, min_lr: '${train.optimizer.lr}'}\n"
        "checkpoint: {load: 'a$${b}'}\n",
    )
    config = load(["a.yaml"]).config
    assert (config.run.name, config.run.dir, config.run.seed) == ("try-2024-12", "2024", 8)
    assert (config.train.steps, config.train.optimizer.min_lr, config.checkpoint.load) == (
        12,
        1e-4,
        "a${b}",
    )


def test_a_token_in_a_header_is_checked_and_never_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", "s3cret")
    headers = "{Authorization: 'Bearer ${env:TOKEN}', X-Key: '${env:TOKEN}', X-Run: '${run.name}'}"
    write(
        folder / "a.yaml",
        f"run: {{name: r}}\nreward:\n  sources:\n"
        f"    - {{url: 'http://a', options: {{headers: {headers}}}}}\n",
    )
    config = load(["a.yaml"]).config
    (source,) = config.reward.sources
    assert source.options["headers"] == {
        "Authorization": "Bearer ${env:TOKEN}",
        "X-Key": "${env:TOKEN}",
        "X-Run": "r",
    }
    assert "s3cret" not in to_yaml(config)
    write(folder / "b.yaml", to_yaml(config))
    assert load(["b.yaml"]).config == config
    monkeypatch.delenv("TOKEN")
    messages = [line for line in mistakes("a.yaml") if "${env:TOKEN}" in line]
    assert any("environment variable" in line and "Export" in line for line in messages)
    assert not any("write its value" in line for line in messages)


def test_missing_and_cyclic_references_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    write(
        folder / "a.yaml",
        "run:\n  dir: ${env:NOT_THERE}\n  name: ${run.dirr}\n"
        "model:\n  path: ${model.tokenizer}\n  tokenizer: ${model.path}\n"
        "data:\n  train: ${train}\n  eval: 'x${run.name'\n",
    )
    assert_each_mentions(
        mistakes("a.yaml"),
        ("a.yaml:2: run.dir=${env:NOT_THERE}: ${env:NOT_THERE}", "environment variable"),
        ("a.yaml:3: run.name=${run.dirr}: ${run.dirr}", "key", "'run.dir'"),
        ("a.yaml:5: model.path=${model.tokenizer}", "model.path -> model.tokenizer -> model.path"),
        (
            "a.yaml:6: model.tokenizer=${model.path}",
            "model.tokenizer -> model.path -> model.tokenizer",
        ),
        ("a.yaml:8: data.train=${train}: ${train}", "section"),
        ("a.yaml:9: data.eval=x${run.name", "closed"),
    )


def test_all_errors_of_a_configuration_are_reported_at_once(folder: Path):
    write(
        folder / "grpo.yaml",
        "rollout:\n"
        "  samples_per_promt: 8\n"
        "  engine: {name: megatron, max_num_seqs: lots}\n"
        "  max_running_requests: 3\n"
        "train:\n"
        "  tp: 2\n"
        "  steps: yes\n"
        "  micro_batch: 2.0\n"
        "  optimizer:\n"
        "    lr: 0\n"
        "    warmup: 1.5\n"
        "    betas: [0.9]\n"
        "model: {dtype: bfloat}\n"
        "reward:\n"
        "  sources:\n"
        "    - {verifer: acc}\n"
        "    - acc\n"
        "log: 3\n",
    )
    assert_each_mentions(
        mistakes(
            "grpo.yaml",
            sets=("train.parallel.sp=1", "steps"),
            flags=(Flag("convert.tp", 0, "--tp"),),
        ),
        ("--set steps", "key=value"),
        ("--set: train.parallel.sp=1", "true or false"),
        ("--tp: convert.tp=0", 1),
        ("grpo.yaml:2: rollout.samples_per_promt=8", "key", "'samples_per_prompt'"),
        ("grpo.yaml:3: rollout.engine.name=megatron", "version"),
        ("grpo.yaml:3: rollout.engine.max_num_seqs=lots", "number"),
        ("grpo.yaml:4: rollout.max_running_requests=3", "version"),
        ("grpo.yaml:6: train.tp=2", "key", "'train.parallel.tp'"),
        ("grpo.yaml:7: train.steps=yes", "number"),
        ("grpo.yaml:8: train.micro_batch=2.0", "number"),
        ("grpo.yaml:10: train.optimizer.lr=0", "above 0"),
        ("grpo.yaml:11: train.optimizer.warmup=1.5", "number", "1"),
        ("grpo.yaml:12: train.optimizer.betas.1", "missing"),
        ("grpo.yaml:13: model.dtype=bfloat", "float32", "'bfloat16'"),
        ("grpo.yaml:16: reward.sources.0.verifer=acc", "key", "'verifier'"),
        ("grpo.yaml:17: reward.sources.1=acc", "section", ", ".join(RewardSource.model_fields)),
        ("grpo.yaml:18: log=3", "section", ", ".join(LogConfig.model_fields)),
    )


@pytest.mark.parametrize(
    "item", ["nmae{}: 1", "x{}: '${{run.nme}} {}'"], ids=["keys", "references"]
)
def test_many_errors_are_listed_up_to_a_limit(tmp_path: Path, item: str):
    """Suggestions, which compare a name with all keys, are made for listed errors only."""
    file, count = tmp_path / "a.yaml", MAX_ERRORS + 7
    lines = [f"  {item.format(number, 'x' * 500)}" for number in range(count)]
    file.write_text("\n".join(["run:", *lines]))
    with pytest.raises(ManyErrors) as caught:
        load([str(file)])
    *first, last = str(caught.value).splitlines()
    assert len(caught.value.messages) == count and len(first) == MAX_ERRORS
    assert_each_mentions(first, *((f"a.yaml:{n + 2}: run.{item[0]}",) for n in range(MAX_ERRORS)))
    assert "did you mean" in first[0] and max(map(len, first)) < 300
    assert "did you mean" not in caught.value.messages[-1]
    assert_mentions(last, "7", "more")


def test_several_texts_and_errors_of_one_section_are_found_together(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("cluster: {env: {A: 1, B: 002, C: no}}\n")
    config = load([str(file)]).config
    assert dict(config.cluster.env) == {"A": "1", "B": "002", "C": "no"}
    with pytest.raises(InvalidConfigError) as caught:
        load([str(file)], ["run.nme=x", "run.seed=x", "train.stps=1", "run.name=y"])
    valid = caught.value.valid_part
    assert valid is not None and len(caught.value.messages) == 3
    assert (valid.config.run.name, valid.config.run.seed) == ("y", Config().run.seed)


def test_a_duplicate_key_is_refused_with_both_lines(folder: Path):
    write(folder / "a.yaml", "train:\n  steps: 1\n  micro_batch: 1\n  steps: 2\n")
    assert_each_mentions(mistakes("a.yaml"), ("a.yaml:4: steps", "twice", "line 2"))


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("train:\n  steps: [1\n", ("a.yaml:3", "YAML", "']'")),
        ("train:\n\tsteps: 1\n", ("a.yaml:2", "YAML", "'\\t'")),
        ("- a\n", ("a.yaml:1", "sections")),
        (
            "run: {name: !!python/name:os.system x}\n",
            ("a.yaml:1", "python/name:os.system", "tags"),
        ),
        ("run: &a\n  <<: {name: x}\n", ("a.yaml:2", "<<", "merge")),
        ("run: &a\n  name: *a\n", ("a.yaml:2", "anchor")),
        ("defaults: sft\n", ("a.yaml:1: defaults", "list", "grpo, sft")),
    ],
)
def test_files_without_a_configuration_are_refused_with_the_line(
    folder: Path, text: str, fragments: tuple[str, ...]
):
    write(folder / "a.yaml", text)
    assert_each_mentions(mistakes("a.yaml"), fragments)


def test_files_that_cannot_be_read_are_named(folder: Path):
    (folder / "latin.yaml").write_bytes(b"run: {name: \xe9}\n")
    (folder / "empty.yaml").write_text("", encoding="utf-8")
    assert_each_mentions(
        mistakes("latin.yaml", "grpp", "."),
        ("latin.yaml", "UTF-8"),
        ("grpp", "file", "'grpo'"),
        ("folder", "configuration"),
    )
    assert load(["empty.yaml"]).config == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1.5E3", 1500.0), (".5", 0.5), ("010", 10), ("0x10", 16), ("1_000", 1000),
     ("no", "no"), ("on", "on"), ("TRUE", True), ("tRUE", "tRUE"), ("~", None), ("12:30", "12:30"),
     ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("-", "-"), ("+3", 3)],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object):
    got = scalar(text)
    assert got == value and type(got) is type(value)


def test_quoted_numbers_are_text_and_plain_ones_become_text_for_text_keys(folder: Path):
    write(
        folder / "a.yaml",
        "run: {name: 007}\ncluster: {env: {OMP_NUM_THREADS: 2, FLAG: true}}\ntrain: {steps: '3'}\n",
    )
    assert_each_mentions(mistakes("a.yaml"), ("a.yaml:3: train.steps=3",))
    config = load(["a.yaml"], ["train.steps=3"]).config
    assert config.run.name == "007"
    assert config.cluster.env == {"OMP_NUM_THREADS": "2", "FLAG": "true"}


def test_a_yaml_written_back_loads_as_the_same_configuration(folder: Path):
    write(
        folder / "a.yaml",
        "run: {name: 'no: \"x\" # y'}\n"
        "reward: {sources: [{verifier: acc, options: {a b: [1, null]}}]}\n"
        "train: {optimizer: {lr: 3e-7}}\n",
    )
    resolved = load(["a.yaml"])
    for text in (to_yaml(resolved.config), to_yaml(resolved.config, resolved.origins)):
        assert load([write(folder / "b.yaml", text)]).config == resolved.config
        assert Config.model_validate(yaml.safe_load(text)) == resolved.config, (
            "other parsers read the same"
        )
    assert "lr: 3.0e-07" in to_yaml(resolved.config)
    assert "# a.yaml:3" in to_yaml(resolved.config, resolved.origins)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        load().config.train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_every_packaged_configuration_loads():
    assert packaged_names() == ("grpo", "sft")
    for name in packaged_names():
        load([name])


LISTS = {"reward.sources": "[{verifier: acc}]", "algo.distill.teachers": "[{model: teacher}]"}


def in_first_item(key: str) -> str:
    """Return a key below a list as a key of the first item of the list."""
    name = next((name for name in LISTS if key.startswith(f"{name}.")), None)
    return key if name is None else key.replace(f"{name}.", f"{name}.0.")


def test_every_unsupported_key_is_refused():
    lists = [f"{name}={value}" for name, value in LISTS.items()]
    for key in NOT_YET:
        path = in_first_item(key)
        (line,) = mistakes(sets=(*lists, f"{path}=1"))
        assert_mentions(line, f"--set: {path}=1", "version")
    for key, values in NOT_YET_VALUES.items():
        for value in (
            values if key != "algo.advantage.estimator" else ()
        ):  # checked with the command
            path = in_first_item(key)
            sets = (f"{path}={[value] if key == 'log.trackers' else value}",)
            (line,) = mistakes(sets=(*lists, *sets) if path != key else sets)
            assert_mentions(line, path, "version")


def test_muon_is_refused_with_the_reason():
    key = "train.optimizer.name"
    (line,) = mistakes(sets=(f"{key}=muon",))
    assert_mentions(line, f"{key}=muon", "emerging_optimizers", "adamw")
    assert load(sets=[f"{key}=adamw"]).config.train.optimizer.name == "adamw"


def test_parse_reports_every_bad_key_of_a_file():
    with pytest.raises(ManyErrors) as caught:
        parse("a: 1\na: 2\n[b]: 3\nc: !x 4\n", "f.yaml")
    assert_each_mentions(
        caught.value.messages,
        ("f.yaml:2: a", "twice", "line 1"),
        ("f.yaml:3", "key", "text"),
        ("f.yaml:4: !x", "tags"),
    )
    assert plain(parse("a: &x [1]\nb: *x", "f.yaml")) == {"a": [1], "b": [1]}
