"""Architectures that are refused with the reason.

They are families of MindSpeed-LLM's converter and examples that msrl does not have, and frequent
others.
"""

from __future__ import annotations

_MUP = "its residuals, embeddings and logits are scaled by constants"
_FUSED = "its query, key and value tensors are packed under names that msrl does not read"
_MIXER = "its norms are LayerNorms with biases and its router is a sparse mixer"
_VISION_EXPERTS = "its language model is a mixture of experts within a vision-language model"

UNSUPPORTED = {
    "DeepseekV4ForCausalLM": "its attention compresses keys and values and its residual streams "
    "are mixed (hyper-connections)",
    "LongcatFlashForCausalLM": "its layers have two attention blocks, and experts "
    "without computation",
    "BailingMoeForCausalLM": _FUSED,
    "Phi3ForCausalLM": _FUSED,
    "PhimoeForCausalLM": _MIXER,
    "PhiMoEForCausalLM": _MIXER,
    "PLMForCausalLM": "its feed-forward block has a squared ReLU without a gate",
    "HunYuanForCausalLM": "its layers share keys and values with each other",
    "MiniCPMForCausalLM": _MUP,
    "MiniCPM3ForCausalLM": _MUP,
    "GemmaForCausalLM": "only its successors Gemma 2 and 3 are",
    "Grok1ModelForCausalLM": "its attention and logits are scaled and limited by constants",
    "BloomForCausalLM": "it has ALiBi positions and LayerNorms with biases",
    "QWenLMHeadModel": "this is the first Qwen, whose code comes with its checkpoints; "
    "Qwen 1.5 and later are",
    "Mamba2ForCausalLM": "it is a state-space model without attention",
    "MambaForCausalLM": "it is a state-space model without attention",
    "Glm4vMoeForConditionalGeneration": _VISION_EXPERTS,
    "Llama4ForConditionalGeneration": _VISION_EXPERTS,
    "InternVLChatModel": "its language model has no separate config.json",
}
