"""Translation of the stages dpo, simpo, orm and prm of posttrain_gpt.py.

Sources: MindSpeed-LLM b626d239 and c77308a1 (losses, and `ref_model`), MindSpeed-RL 870967ac.
Their losses are means over pairs, and `pref_ftx` multiplies the mean over the tokens of a chosen
answer, as in msrl.
"""

from __future__ import annotations

from msrl.importers.megatron import is_resumed, loaded_adapters
from msrl.importers.sections import Keys, same_path
from msrl.importers.status import KeyStatus
from msrl.importers.table import as_list
from msrl.importers.translation import SourceKey, Translation

STAGES = ("dpo", "simpo", "orm", "prm")
_PAIRWISE = ("dpo", "simpo", "orm")
_DPO = ("dpo_loss_type", "dpo_beta", "dpo_label_smoothing", "ref_model", "refer_model_iter")
_SIMPO = ("simpo_loss_type", "simpo_beta", "simpo_label_smoothing", "gamma_beta_ratio")
_SIMPO_BETA, _SIMPO_RATIO = 2.5, 1.4  # defaults of the original
_SECTION = "algo.preference"


def put_preference(translation: Translation, keys: Keys, stage: SourceKey | None) -> None:
    """Translate the keys that the stages of preference data read."""
    name = None if stage is None else str(stage.value)
    if name == "dpo":
        _put_dpo(keys)
    elif name == "simpo":
        _put_simpo(keys)
    elif name == "orm":
        keys.assign("stage", ["algo.reward_model.kind"], "outcome")
        text = "a checkpoint without a score head gets one of zeros"
        keys.record("load_checkpoint_loosely", KeyStatus.SAME, text)
    elif name == "prm":
        _put_prm(keys)
    if name != "prm":
        keys.record("reward_tokens", KeyStatus.OFF, "read by stage prm only")
    is_preference = name in ("dpo", "simpo")
    if is_preference:
        keys.assign("pref_ftx", [f"{_SECTION}.sft_coef"], keys.real("pref_ftx", 0.0))
    if name in _PAIRWISE:
        keys.record("is_pairwise_dataset", KeyStatus.APPLIED, "the stage reads pairs")
        keys.record("is_instruction_dataset", KeyStatus.SAME, "the stage reads pairs")
    unread = {"dpo": _SIMPO, "simpo": _DPO}.get(str(name), (*_DPO, *_SIMPO))
    for key in (*unread, *(() if is_preference else ("pref_ftx",))):
        keys.record(key, KeyStatus.OFF, "read by other stages only")


def _put_prm(keys: Keys) -> None:
    """Translate the labels of stage prm. The original trains on no step without them."""
    keys.assign("stage", ["algo.reward_model.kind"], "process")
    tokens = keys.value("reward_tokens")
    if tokens is None:
        keys.add_error("reward_tokens", "missing: name the tokens that label steps, as in `+ -`")
    else:
        texts = [str(token) for token in as_list(tokens)]
        keys.assign("reward_tokens", ["algo.reward_model.reward_tokens"], texts)
    keys.record("is_instruction_dataset", KeyStatus.SAME, "the stage reads labeled steps")


def _put_dpo(keys: Keys) -> None:
    """Translate the loss and the reference of stage dpo."""
    kind = keys.value("dpo_loss_type") or "sigmoid"
    if kind not in ("sigmoid", "hinge", "ipo"):
        keys.add_error("dpo_loss_type", "must be sigmoid, hinge or ipo")
    keys.assign("stage", [f"{_SECTION}.loss"], "ipo" if kind == "ipo" else "dpo")
    _put_form(keys, "dpo_loss_type", kind)
    keys.assign("dpo_beta", [f"{_SECTION}.beta"], keys.real("dpo_beta", 0.1))
    if kind == "sigmoid":
        _put_smoothing(keys, "dpo_label_smoothing")
    else:
        keys.record("dpo_label_smoothing", KeyStatus.OFF, "read with dpo_loss_type: sigmoid only")
    _put_reference(keys)


def _put_reference(keys: Keys) -> None:
    """Translate the reference of adapters that start from earlier ones.

    With `finetune`, the original's reference has these adapters too (`is_load_refer`). In msrl,
    it has them unless `cluster.roles.reference.load` is set or the training is resumed.
    """
    load, model = keys.get("load"), keys.get("ref_model")
    if load is None or loaded_adapters(keys) is None:
        return
    if keys.value("finetune") is False:
        if model is None and not is_resumed(keys):
            why = "the reference of lora_load without finetune"
            keys.assign("load", ["cluster.roles.reference.load"], load.value, why=why)
    elif model is not None and same_path(model.value, load.value):
        text = "the reference is the model with the adapters from which the training starts"
        keys.record("ref_model", KeyStatus.SAME, text)
    elif model is not None and model.value is not None:
        text = "the original adds the adapters of lora_load to the reference, msrl does not"
        keys.translation.report_difference(model, text)


def _put_simpo(keys: Keys) -> None:
    """Translate the loss of stage simpo. The original's gamma is a multiple of beta."""
    kind = keys.value("simpo_loss_type") or "sigmoid"
    if kind not in ("sigmoid", "hinge"):
        keys.add_error("simpo_loss_type", "must be sigmoid or hinge")
    keys.assign("stage", [f"{_SECTION}.loss"], "simpo")
    _put_form(keys, "simpo_loss_type", kind)
    beta = keys.real("simpo_beta", _SIMPO_BETA)
    keys.assign("simpo_beta", [f"{_SECTION}.beta"], beta)
    gamma = beta * keys.real("gamma_beta_ratio", _SIMPO_RATIO)
    why = "gamma_beta_ratio * simpo_beta"
    keys.assign("gamma_beta_ratio", [f"{_SECTION}.options.gamma"], gamma, why=why)
    if kind == "sigmoid":
        _put_smoothing(keys, "simpo_label_smoothing")
    else:
        text = "read with simpo_loss_type: sigmoid only"
        keys.record("simpo_label_smoothing", KeyStatus.OFF, text)


def _put_form(keys: Keys, key: str, kind: object) -> None:
    """Translate the kind of a loss, of which only the hinge is an option of another loss."""
    if kind == "hinge":
        keys.assign(key, [f"{_SECTION}.options.form"], "hinge")
    else:
        keys.record(key, KeyStatus.APPLIED, f"part of {_SECTION}.loss")


def _put_smoothing(keys: Keys, key: str) -> None:
    """Translate label smoothing, unless it is 0."""
    smoothing = keys.real(key, 0.0)
    if smoothing:
        keys.assign(key, [f"{_SECTION}.options.label_smoothing"], smoothing)
    else:
        keys.record(key, KeyStatus.OFF, "0 switches it off")
