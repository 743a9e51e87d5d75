"""ROLL's validation as `eval`: how held-out prompts are answered, and when.

It evaluates before step 0 and every eval_steps after it, where validation names data, and counts scores of 1 as right.
Source: ROLL 8eb27cc2, roll/pipeline/rlvr (rlvr_pipeline.py, rlvr_config.py) and roll/configs/base_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from msrl.config.sources import wrap
from msrl.importers.megatron import converted
from msrl.importers.sections import Keys
from msrl.importers.translation import Fate, Translation

_LENGTHS = ("val_sequence_length", "val_prompt_length")


def put_validation(translation: Translation, top: Keys, parts: Mapping[str, Keys]) -> bool:
    """The keys of `eval`, from the parts of the section validation and what the pipeline says of it; whether there are evaluations."""
    data = parts["data_args"]
    is_off = top.value("eval_steps") in (0, -1)
    if is_off or data.get("file_name") is None:
        for key in _LENGTHS if is_off else ("eval_steps", *_LENGTHS):
            top.say(key, Fate.DEAD, "read where eval_steps and validation.data_args.file_name ask for evaluations only")
        return False
    data.say("file_name", Fate.SAME, "rows are preprocessed first: `msrl preprocess`, then --set data.eval=PREFIX")
    for given in data:
        translation.say(given, Fate.DEAD, "the columns and the template of actor_train.data_args are read")
    top.take("eval_steps", ["eval.every_steps"], top.value("eval_steps"), why="and before the first step")
    translation.set("eval.at_start", wrap(True, top.origin("validation")))
    _lengths(translation, top)
    _sampling(translation, parts["generating_args"])
    return True


def _lengths(translation: Translation, top: Keys) -> None:
    """Two keys that are given both or not at all; without them answers are as long as in training."""
    given = [one for key in _LENGTHS if (one := top.get(key)) is not None and one.value is not None]
    numbers = [top.number(key) for key in _LENGTHS]
    if len(given) == 1:
        return translation.mistake(given[0], f"stands alone; give {' and '.join(_LENGTHS)} both")
    for one in given:
        if numbers[0] is not None and numbers[1] is not None:
            why = " minus ".join(_LENGTHS)
            translation.take(one, ["eval.max_response_tokens"], numbers[0] - numbers[1], why=why)
    return None


def _sampling(translation: Translation, sampling: Keys) -> None:
    """Validation samples by itself: what it leaves open has the original's defaults, not what training says."""
    sampling.take("temperature", ["eval.sampling.temperature"], sampling.value("temperature"))
    sampling.take("num_return_sequences", ["eval.samples_per_prompt"], sampling.value("num_return_sequences"))
    if sampling.value("temperature") == 0:
        for key in ("top_p", "top_k"):
            sampling.say(key, Fate.SAME, "greedy answers take the likeliest token")
    else:
        sampling.take("top_p", ["eval.sampling.top_p"], sampling.value("top_p"))
        sampling.take("top_k", ["eval.sampling.top_k"], converted(sampling, "top_k", "top_k"))
    if sampling.get("stop_strings") and sampling.value("stop_strings") is not None:
        sampling.take("stop_strings", ["eval.sampling.stop"], converted(sampling, "stop_strings", "text_list"))
    sampling.say("max_new_tokens", Fate.DEAD, "val_sequence_length minus val_prompt_length is written over it")
    for given in sampling:
        translation.say(given, Fate.SAME, translation.row(given).same)
