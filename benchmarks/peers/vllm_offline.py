"""Speed of `vllm.LLM.generate` on a folder of prompts, with the settings of msrl on CPU.

`vllm_offline.py INPUTS TOKENS`; it prints one line of JSON. As in `msrl generate`, the engine
compiles kernels for the first time while it generates.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs")
    parser.add_argument("tokens", type=int)
    args = parser.parse_args()
    lines = Path(args.inputs, "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    dialogues = [json.loads(line)["prompt"] for line in lines]
    engine = LLM(
        f"{args.inputs}/tiny",
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        gpu_memory_utilization=0.4,  # of main memory, which other programs use too
    )
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    start = time.perf_counter()
    outputs = engine.chat(dialogues, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"peer": "vllm", "tokens_per_s": num_tokens / seconds}))


if __name__ == "__main__":
    main()
