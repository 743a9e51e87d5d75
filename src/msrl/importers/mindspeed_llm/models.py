"""Models that MindSpeed-LLM names on a command line and msrl has no family for.

Source: MindSpeed-LLM c77308a1, configs/checkpoint/model_cfg.json and tasks/models/spec.
"""

from __future__ import annotations

from msrl.importers.sections import Keys
from msrl.importers.table import as_list
from msrl.importers.translation import Translation
from msrl.models.unsupported import UNSUPPORTED

_CONVERTED = {
    "bloom": "BloomForCausalLM",
    "bloom_3b": "BloomForCausalLM",
    "deepseek4": "DeepseekV4ForCausalLM",
    "deepseek4_base": "DeepseekV4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "grok": "Grok1ModelForCausalLM",
    "hunyuan": "HunYuanForCausalLM",
    "longcat": "LongcatFlashForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "phi3.5-moe": "PhimoeForCausalLM",
    "plm": "PLMForCausalLM",
    "qwen": "QWenLMHeadModel",
}
_LAYERS = {
    "deepseek4_spec": "deepseek4",
    "grok_spec": "grok",
    "hunyuan_spec": "hunyuan",
    "longcat_spec": "longcat",
    "mamba_spec": "mamba2",
    "phi35_moe_spec": "phi3.5-moe",
    "plm_spec": "plm",
}


def refuse_model(translation: Translation, keys: Keys) -> None:
    """Refuse a command on a model without a family, with that error alone."""
    for key in ("model_type_hf", "spec"):
        entry = keys.get(key)
        value = "" if entry is None or entry.value is None else str(as_list(entry.value)[0])
        model = _LAYERS.get(value.rpartition(".")[2], value)
        if entry is not None and model in _CONVERTED:
            reason = UNSUPPORTED[_CONVERTED[model]]
            translation.add_error(entry, f"not supported: the model {model}: {reason}")
            return translation.refuse_as_one()
    return None
