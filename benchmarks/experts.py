"""Time of the experts of a mixture layer on one rank, forward and backward.

1,024 routed tokens of 32 experts, 256 channels, 128 channels per expert, in float32. `grouped`
experts run in grouped products as in training. With `sequential` ones, Megatron's SequentialMLP
calls one module per expert. Both run alternately, so that they meet the same load of the machine.
The last line of the output is JSON with the median seconds of the mode in the argument.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOKENS, EXPERTS, CHANNELS, ROUNDS = 1024, 32, 256, 200
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": CHANNELS,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"s": statistics.median(seconds(Path(folder))[sys.argv[1]])}))


def seconds(folder: Path) -> dict[str, list[float]]:
    """Return the seconds of forward and backward passes by mode."""
    import torch
    from megatron.core.transformer.moe.experts import SequentialMLP

    experts = _experts(folder)
    modes = {"grouped": type(experts).forward, "sequential": SequentialMLP.forward}
    counts = torch.randint(EXPERTS, (TOKENS,)).bincount(minlength=EXPERTS)
    inputs = torch.randn(TOKENS, CHANNELS, requires_grad=True)
    weights = torch.rand(TOKENS, requires_grad=True)
    grad = torch.randn_like(inputs)
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(ROUNDS):
        for mode, forward in modes.items():
            start = time.perf_counter()
            forward(experts, inputs, counts, weights)[0].backward(grad)
            times[mode].append(time.perf_counter() - start)
            for tensor in (inputs, weights, *experts.parameters()):
                tensor.grad = None
    return times


def _experts(folder: Path) -> Any:
    """Return the experts of the layer with random weights, on the only rank of a group."""
    from msrl.platforms import get

    platform = get("cpu")
    platform.prepare()
    import torch

    from msrl.models.families import shape_from_config
    from msrl.models.hf_config import HfConfig
    from msrl.trainer import groups
    from msrl.trainer.model.build import build_model
    from msrl.trainer.settings import Layout

    groups.initialize(
        platform,
        rank=0,
        world_size=1,
        init_method=f"file://{folder}/rendezvous",
        layout=Layout(),
        seed=0,
        timeout_s=60.0,
    )
    shape = shape_from_config(HfConfig(MODEL, "benchmark"))
    device = torch.device("cpu")
    model: Any = build_model(shape, Layout(), torch.float32, device, shape.vocab_size)
    experts = model.decoder.layers[0].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    return experts


if __name__ == "__main__":
    main()
