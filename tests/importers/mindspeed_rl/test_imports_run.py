"""Training with a MindSpeed-RL file from a MindSpeed checkpoint, which has no config.json."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from msrl.cli.configuration import load_configuration as load
from support import ROOT, assert_mentions
from tiny_qwen2 import make_model, make_tokenizer
from training_runs import rows, succeed, write_rows

EXAMPLES = ROOT / "examples"
FILE = """\
defaults: [{model: [tiny]}]
megatron_training:
  {model: tiny, stage: ray_grpo, bf16: false, tokenizer_name_or_path: hf, data_path: data,
   global_batch_size: 4, train_iters: 2}
actor_config:
  {micro_batch_size: 1, lr: 1e-3, lr_decay_style: constant, finetune: true, load: ckpt,
   save: saved, no_load_optim: true, no_load_rng: true}
rl_config:
  n_samples_per_prompt: 4
  mini_batch_size: 2
  max_prompt_length: 160
  verifier_function: [acc, format]
  verifier_weight: [1.0, 0.1]
  actor_resource: {num_npus: 1}
generate_config:
  infer_tensor_parallel_size: 1
  max_model_len: 256
  sampling_config: {max_tokens: 16, temperature: 0.9, top_k: -1}
"""


def test_the_quickstart_as_a_mindspeed_file_is_the_same_training():
    native = load([str(EXAMPLES / "quickstart" / "grpo.yaml")]).config
    theirs = load([str(EXAMPLES / "mindspeed" / "grpo_quickstart.yaml")]).config
    assert native.reward == theirs.reward
    mode = {"mode": "seq-mean-token-mean"}  # micro-batches of one sample
    aggregate = native.algo.aggregate.model_copy(update=mode)
    assert native.algo.model_copy(update={"aggregate": aggregate}) == theirs.algo
    warmup = {
        "warmup": native.train.optimizer.warmup / 30,
        "warmup_from_zero": True,
    }  # updates in msrl, a fraction of them in MindSpeed
    updates = {"samples_per_update": 256}  # one update per step
    expected = native.train.model_copy(
        update={
            "optimizer": native.train.optimizer.model_copy(update=warmup),
            "updates": native.train.updates.model_copy(update=updates),
        }
    )
    assert expected == theirs.train
    engine = native.rollout.engine.model_copy(update={"max_model_len": 24 + 44})
    assert native.rollout.model_copy(update={"engine": engine}) == theirs.rollout
    assert (native.run.seed, native.data.train, native.data.shuffle) == (
        theirs.run.seed,
        theirs.data.train,
        theirs.data.shuffle,
    )


def test_the_quickstart_with_ppo_as_a_mindspeed_file_trains_a_critic():
    theirs = load([str(EXAMPLES / "mindspeed" / "ppo_quickstart.yaml")]).config
    algo, critic = theirs.algo, theirs.cluster.roles.critic
    assert (
        algo.advantage.estimator,
        algo.advantage.lam,
        algo.advantage.whiten,
        algo.value.clip,
    ) == ("gae", 0.95, True, 0.5)
    assert (algo.kl.reward.coef, algo.kl.reward.estimator, algo.kl.loss.coef) == (0.001, "k1", 0.0)
    assert (critic.optimizer.lr, critic.optimizer.schedule, critic.load) == (
        2e-4,
        "constant",
        "runs/sft/checkpoints",
    )
    native = load([str(EXAMPLES / "quickstart" / "grpo.yaml")]).config
    assert theirs.reward == native.reward and theirs.train.parallel == native.train.parallel


@pytest.mark.full
@pytest.mark.slow
def test_a_file_of_mindspeed_trains_from_mindspeeds_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "hf")
    make_model(tied=False).save_pretrained(tmp_path / "hf")
    problems = str(
        write_rows(
            tmp_path / "rows.jsonl",
            [{"question": f"{i}%3=", "answer": f"so #### {i % 3}"} for i in range(20)],
        )
    )
    log = tmp_path / "log"
    succeed("convert-ckpt", "hf2mcore", "--load", "hf", "--save", "ckpt", "--no-verify", log=log)
    shutil.rmtree(tmp_path / "ckpt" / "hf")
    arguments = [
        "--input",
        problems,
        "--tokenizer",
        "hf",
        "--handler",
        "gsm8k",
        "--template",
        "qwen",
        "--output-prefix",
        "data",
    ]
    succeed("preprocess", *arguments, log=log)
    (tmp_path / "grpo.yaml").write_text(FILE, encoding="utf-8")
    output = succeed("train-grpo", "-c", "grpo.yaml", "--platform", "cpu", log=log)
    assert_mentions(output.splitlines()[0], "grpo.yaml", "MindSpeed-RL", "grpo")
    assert [row["step"] for row in rows(tmp_path / "runs" / "grpo")] == [1, 2]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text(
        encoding="utf-8"
    ).strip() == "2"
