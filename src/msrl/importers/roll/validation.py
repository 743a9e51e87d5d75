"""Translation of ROLL's validation to `eval`.

If validation names data, ROLL evaluates before step 0 and then every eval_steps steps. A score of 1
counts as correct. Source: ROLL 8eb27cc2, roll/pipeline/rlvr (rlvr_pipeline.py, rlvr_config.py) and
roll/configs/base_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from msrl.config.sources import wrap
from msrl.importers.megatron import convert_value
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus, Translation

_LENGTHS = ("val_sequence_length", "val_prompt_length")


def put_validation(translation: Translation, top: Keys, sections: Mapping[str, Keys]) -> bool:
    """Translate validation and return True if the run evaluates.

    `top` holds the keys of the pipeline, `sections` the keys of the section validation.
    """
    data = sections["data_args"]
    is_off = top.value("eval_steps") in (0, -1)
    if is_off or data.get("file_name") is None:
        for key in _LENGTHS if is_off else ("eval_steps", *_LENGTHS):
            top.record(
                key,
                KeyStatus.DEAD,
                "read only if eval_steps and validation.data_args.file_name enable evaluation",
            )
        return False
    data.record(
        "file_name",
        KeyStatus.SAME,
        "preprocess the rows with `msrl preprocess`, then use --set data.eval=PREFIX",
    )
    for name in ("image_max_pixels", "image_min_pixels"):
        text = "preprocess the held-out rows with this limit"
        data.record(name, KeyStatus.DROPPED, text)
    for entry in data:
        translation.record(
            entry,
            KeyStatus.DEAD,
            "the original reads the columns and the template of actor_train.data_args",
        )
    top.assign(
        "eval_steps", ["eval.every_steps"], top.value("eval_steps"), why="and before the first step"
    )
    translation.set("eval.at_start", wrap(True, top.origin("validation")))
    _lengths(translation, top)
    _sampling(translation, sections["generating_args"])
    return True


def _lengths(translation: Translation, top: Keys) -> None:
    """Translate the length keys, which must be set together; they default to training."""
    entries = [
        entry for key in _LENGTHS if (entry := top.get(key)) is not None and entry.value is not None
    ]
    numbers = [top.number(key) for key in _LENGTHS]
    if len(entries) == 1:
        return translation.add_error(
            entries[0], f"must be set together with the other key. Set {' and '.join(_LENGTHS)}."
        )
    for entry in entries:
        if numbers[0] is not None and numbers[1] is not None:
            why = " minus ".join(_LENGTHS)
            translation.assign(
                entry, ["eval.max_response_tokens"], numbers[0] - numbers[1], why=why
            )
    return None


def _sampling(translation: Translation, sampling: Keys) -> None:
    """Translate the sampling of validation, which has its own defaults, independent of training."""
    sampling.put("temperature", "eval.sampling.temperature")
    sampling.put("num_return_sequences", "eval.samples_per_prompt")
    if sampling.value("temperature") == 0:
        for key in ("top_p", "top_k"):
            sampling.record(key, KeyStatus.SAME, "greedy decoding takes the most likely token")
    else:
        sampling.put("top_p", "eval.sampling.top_p")
        sampling.assign("top_k", ["eval.sampling.top_k"], convert_value(sampling, "top_k", "top_k"))
    if sampling.get("stop_strings") and sampling.value("stop_strings") is not None:
        sampling.assign(
            "stop_strings",
            ["eval.sampling.stop"],
            convert_value(sampling, "stop_strings", "text_list"),
        )
    sampling.record(
        "max_new_tokens",
        KeyStatus.DEAD,
        "the original overwrites it with val_sequence_length minus val_prompt_length",
    )
    for entry in sampling:
        row = translation.row(entry)
        if row.refuse:
            translation.apply(entry)
        translation.record(entry, KeyStatus.SAME, row.same)
