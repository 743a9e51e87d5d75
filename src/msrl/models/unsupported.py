"""Architectures that are refused with the reason.

They are families of MindSpeed-LLM's converter and examples that msrl does not have, and frequent
others.
"""

from __future__ import annotations

_FUSED = "its query, key and value tensors are packed under names that msrl does not read"
_MIXER = "its norms are LayerNorms with biases and its router is a sparse mixer"
_TOWER = "its vision tower is none of those that msrl has (Qwen2-VL to Qwen3.5, InternVL)"
_CODE_TOWER = f"its code comes with its checkpoints, and {_TOWER}"
_GLM_TOWER = "its vision tower ends in a convolution, which msrl does not have"
_CHUNKS = "most of its layers attend within chunks of tokens, and the others have no positions"
_AUDIO = "it reads audio, which msrl does not"
_MAMBA = "it is a state-space model without attention"

UNSUPPORTED = {
    "DeepseekV4ForCausalLM": "its attention compresses keys and values and its residual streams "
    "are mixed (hyper-connections)",
    "LongcatFlashForCausalLM": "its layers have two attention blocks, and experts "
    "without computation",
    "BailingMoeForCausalLM": _FUSED,
    "PhimoeForCausalLM": _MIXER,
    "PhiMoEForCausalLM": _MIXER,
    "PLMForCausalLM": "its feed-forward block has a squared ReLU without a gate",
    "HunYuanForCausalLM": "its layers share keys and values with each other",
    "GemmaForCausalLM": "only its successors Gemma 2 and 3 are",
    "Grok1ModelForCausalLM": "its attention and logits are scaled and limited by constants",
    "BloomForCausalLM": "it has ALiBi positions and LayerNorms with biases",
    "QWenLMHeadModel": "this is the first Qwen, whose code comes with its checkpoints; "
    "Qwen 1.5 and later are",
    "Mamba2ForCausalLM": _MAMBA,
    "MambaForCausalLM": _MAMBA,
    "NemotronHForCausalLM": "most of its layers are state-space models, and the others are either "
    "attention or a feed-forward block with a squared ReLU",
    "DeciLMForCausalLM": "its layers have different numbers of query groups and feed-forward "
    "channels, and some have no attention",
    "MiMoV2FlashForCausalLM": "its layers have different numbers of query groups, and values of "
    "another size than keys",
    "MiniMaxM3ForCausalLM": "its attention chooses blocks of keys",
    "KimiK3ForConditionalGeneration": "most of its layers have linear attention (Kimi Delta "
    "Attention), and its code comes with its checkpoints",
    "Step3p7FlashForCausalLM": "its layers have different numbers of heads, and gates of heads",
    "PanguEmbeddedForCausalLM": "its output projection has a bias, and its code comes with its "
    "checkpoints",
    "Glm4vForConditionalGeneration": _GLM_TOWER,
    "Glm4vMoeForConditionalGeneration": _GLM_TOWER,
    "Llama4ForConditionalGeneration": _CHUNKS,
    "Llama4ForCausalLM": _CHUNKS,
    "MllamaForConditionalGeneration": "its images are read by cross-attention",
    "Gemma3nForConditionalGeneration": "each of its layers has another embedding of the tokens",
    "Gemma4ForConditionalGeneration": "only its predecessors Gemma 2 and 3 are",
    "InternVLChatModel": "its code comes with its checkpoints. Those of the same models that are "
    "named *-hf or *-HF are",
    "InternS1ForConditionalGeneration": _TOWER,
    "KimiVLForConditionalGeneration": _CODE_TOWER,
    "KimiK25ForConditionalGeneration": _CODE_TOWER,
    "MiniCPMV": _CODE_TOWER,
    "LlavaForConditionalGeneration": _TOWER,
    "LlavaNextForConditionalGeneration": _TOWER,
    "LlavaOnevisionForConditionalGeneration": _TOWER,
    "PaliGemmaForConditionalGeneration": _TOWER,
    "Idefics3ForConditionalGeneration": _TOWER,
    "SmolVLMForConditionalGeneration": _TOWER,
    "Qwen2_5OmniModel": _AUDIO,
    "Qwen2_5OmniForConditionalGeneration": _AUDIO,
    "Qwen2_5OmniThinkerForConditionalGeneration": _AUDIO,
    "Qwen3OmniMoeForConditionalGeneration": _AUDIO,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _AUDIO,
    "Qwen2AudioForConditionalGeneration": _AUDIO,
    "VoxtralForConditionalGeneration": _AUDIO,
}
