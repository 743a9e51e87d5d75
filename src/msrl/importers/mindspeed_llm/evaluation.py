"""Import of the options of evaluation.py: published suites.

Sources: MindSpeed-LLM b626d239 and c77308a1, evaluation.py, features_manager/evaluation and
tasks/evaluation. The original has prompts, examples and rules of answers of its own; msrl has those
of lm-evaluation-harness.
"""

from __future__ import annotations

from msrl.config.sources import Origin, wrap
from msrl.errors import nearest
from msrl.importers.mindspeed_llm.inference import put_engine_layout, put_shape
from msrl.importers.sections import Keys
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus, Translation

# Benchmark of each task of the original; None for one that the harness lacks.
_TASKS = {
    "agieval": "agieval",
    "bbh": "bbh",
    "boolq": "boolq",
    "ceval": "ceval",
    "cmmlu": "cmmlu",
    "gsm8k": "gsm8k",
    "hellaswag": "hellaswag",
    "human_eval": "humaneval",
    "mmlu": "mmlu",
    "mmlu_ppl": "mmlu",
    "needlebench": None,
}


def put_evaluation(translation: Translation, keys: Keys) -> None:
    """Translate the options of an evaluation on published suites."""
    put_engine_layout(translation, keys)
    put_shape(translation, keys)
    _tasks(translation, keys)
    load = keys.get("load")
    if load is not None:
        keys.assign("load", ["evaluate.models"], [load.value])
    if keys.value("no_chat_template") is True:
        keys.assign("no_chat_template", ["evaluate.chat_template"], False)
    _dtype(translation, keys)
    translation.remarks.append(
        f"{translation.name}: the original has prompts, examples and rules of answers of its own; "
        "msrl has those of lm-evaluation-harness, so accuracies differ"
    )


def _tasks(translation: Translation, keys: Keys) -> None:
    """Translate the suites, whose names may be placeholders of the script."""
    del translation
    names: list[str] = []
    for task in as_list(keys.value("task")) if keys.get("task") else []:
        name = _TASKS.get(str(task), "")
        if name is None:
            return keys.add_error("task", f"lm-evaluation-harness has no suite {task}. Remove it.")
        if not name:
            return keys.add_error("task", f"{task} is not a task; {nearest(str(task), _TASKS)}")
        names.append(name)
    return keys.assign("task", ["evaluate.benchmarks"], list(dict.fromkeys(names)))


def _dtype(translation: Translation, keys: Keys) -> None:
    """Translate the type of the weights, which is float32 without bf16 and fp16."""
    if keys.value("fp16") is True:
        translation.remarks.append(
            f"{translation.name}: the original computes in float16; msrl computes in bfloat16"
        )
        translation.set("model.dtype", wrap("bfloat16", keys.origin("fp16")))
        keys.record("fp16", KeyStatus.DROPPED, "msrl does not compute in float16")
    elif keys.value("bf16") is True:
        keys.assign("bf16", ["model.dtype"], "bfloat16")
    else:
        translation.set("model.dtype", wrap("float32", Origin("without --bf16 and --fp16")))
