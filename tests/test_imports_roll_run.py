"""Imported ROLL files of SFT and DPO train a tiny model for two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_qwen2 import make_model, make_tokenizer
from training_runs import rows, succeed, write_rows

WORKER = """\
  model_args: {dtype: fp32}
  training_args:
    {num_train_epochs: 1, per_device_train_batch_size: 1, gradient_accumulation_steps: 2,
     learning_rate: 1.0e-3, warmup_steps: 1}
  strategy_args: {strategy_name: megatron_train}
  device_mapping: [0]
"""
RUN = "exp_name: tiny\npretrain: hf\nsequence_length: 160\ntrack_with: stdout\n"
FILES = {
    "train-sft": f"{RUN}prompt_key: question\nresponse_key: answer\nsft_train:\n{WORKER}",
    "train-dpo": f"{RUN}max_steps: 2\nchosen_key: chosen\nrejected_key: rejected\n"
    f"actor_train:\n{WORKER}",
}
ROWS = {
    "train-sft": [{"question": f"{i}+1=", "answer": f"{i + 1}"} for i in range(4)],
    "train-dpo": [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "no"} for i in range(4)],
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("command", FILES)
def test_an_imported_file_trains_for_two_steps(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "hf")
    make_model(tied=False).save_pretrained(tmp_path / "hf")
    write_rows(tmp_path / "rows.jsonl", ROWS[command])
    Path("theirs.yaml").write_text(FILES[command], encoding="utf-8")
    log = tmp_path / "log"
    succeed("config", "import", "--from", "roll", "theirs.yaml", "--output", "ours.yaml", log=log)
    changes = ["--set", "data.train=rows.jsonl", "--set", "model.template=null"]
    succeed(command, "-c", "ours.yaml", *changes, log=log)
    steps = [row for row in rows(tmp_path / "runs" / "tiny") if "step" in row]
    assert [row["step"] for row in steps] == [1, 2], steps
