"""A program that compares a compiled engine with transformers: `compiled_engine.py TP FOLDER ...`.

The test runs it in a separate process, because tests disable compilation in theirs. The folders
hold models of one config. The engine loads their weights one after the other. For each, the program
prints the largest difference of log-probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from msrl.config.sections.rollout import EngineConfig
from msrl.platforms import get
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.types import Prompt, SamplingParams
from transformers_logprobs import response_logprobs

SAMPLING = SamplingParams(max_tokens=12, num_samples=3, seed=1, ignore_eos=True)


def main(tp: int, folders: Sequence[Path]) -> None:
    config = EngineConfig(eager=False, tp=tp, max_model_len=128, max_num_seqs=8)
    settings = EngineSettings(folders[0], dtype="float32", engine=config, random_weights=True)
    engine = VllmEngine(settings, get("cpu"))
    numbers = np.random.default_rng(0)
    prompts = [Prompt(i, numbers.integers(0, 250, size)) for i, size in enumerate((5, 33, 70))]
    for version, folder in enumerate(folders):
        engine.load_weights(load_file(folder / "model.safetensors").items())
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        groups = engine.generate(prompts, SAMPLING, version)
        differences = [
            completion.logprobs
            - response_logprobs(model, group.prompt.token_ids, completion.token_ids)
            for group in groups
            for completion in group.completions
        ]
        print(np.abs(np.concatenate(differences)).max(), flush=True)
    engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
