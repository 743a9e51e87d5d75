"""Files and scripts of systems without an importer, which are recognized to say what to do.

Sources: LLaMA-Factory 0.9 (hparams), ms-swift 3 (arguments), TRL 1.0 (scripts and configs), axolotl
(schemas), OpenRLHF (cli), slime (arguments.py), NeMo-RL (examples/configs) and MindSpeed-LLM
c77308a1 (examples/fsdp2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Other:
    """A system: keys that its files all have, one of which they have, and its programs."""

    name: str
    all_keys: frozenset[str]
    any_keys: frozenset[str]
    programs: tuple[str, ...] = ()

    def has(self, keys: frozenset[str]) -> bool:
        return self.all_keys <= keys and bool(self.any_keys & keys)

    @property
    def advice(self) -> str:
        """Action for a file of this system."""
        return (
            f"{self.name} has no importer in msrl. Its rows are read as they are: start from "
            "`msrl train-sft --model MODEL --data ROWS --dry-run` (or train-grpo, train-dpo, "
            "train-rm), and set the keys of docs/configuration.md."
        )


def _other(name: str, all_keys: str, any_keys: str, *programs: str) -> Other:
    return Other(name, frozenset(all_keys.split()), frozenset(any_keys.split()), programs)


OTHERS = (
    _other(
        "LLaMA-Factory",
        "model_name_or_path",
        "stage finetuning_type dataset_dir cutoff_len quantization_bit adapter_name_or_path "
        "template infer_backend",
        "llamafactory-cli", "llamafactory.cli", "lmf",
    ),
    _other("LLaMA-Factory", "model model_class", "train_dataset template sample_backend"),
    _other(
        "axolotl",
        "base_model",
        "datasets sequence_len adapter micro_batch_size rl",
        "axolotl", "axolotl.cli",
    ),
    _other("NeMo-RL", "policy", "grpo sft dpo rm distillation loss_fn", "run_grpo.py", "run_sft.py",
           "run_dpo.py", "run_grpo_math.py"),
    _other("OpenRLHF", "pretrain", "prompt_data actor_num_gpus_per_node micro_train_batch_size",
           "openrlhf.cli"),
    _other("slime", "hf_checkpoint", "rollout_function_path rollout_num_gpus prompt_data",
           "slime"),
    _other("MindSpeed-LLM's FSDP2 backend", "parallel training", "model data"),
    _other(
        "ms-swift",
        "model",
        "tuner_type train_type rlhf_type split_dataset_ratio target_modules lora_rank torch_dtype",
        "swift", "megatron",
    ),
    _other(
        "TRL",
        "model_name_or_path",
        "dataset_name datasets num_generations max_completion_length trust_remote_code "
        "per_device_train_batch_size",
        "trl",
    ),
)  # fmt: skip
_SUBCOMMANDS = ("sft", "rlhf", "pt", "grpo", "dpo", "reward", "rloo", "kto", "train", "infer",
                "export", "deploy", "eval", "app")  # fmt: skip


def other_system(keys: Iterable[str], model: object = "") -> Other | None:
    """Return the system whose files have these top-level keys; None for no known one.

    Files of msrl have a section `model`; files of ms-swift have its name.
    """
    names = frozenset(keys)
    for other in OTHERS:
        if other.has(names) and ("model" not in other.all_keys or isinstance(model, str)):
            return other
    return None


def other_program(commands: Sequence[Sequence[str]]) -> Other | None:
    """Return the system whose program or flags one of the commands has; None for no known one."""
    for words in commands:
        flags = (word.lstrip("-").partition("=")[0] for word in words if word.startswith("--"))
        other = other_system(flag.replace("-", "_") for flag in flags)
        if other is not None and other.name != "OpenRLHF":  # whose flags its forks have
            return other
        for word, following in zip(words, (*words[1:], ""), strict=True):
            name = word.rpartition("/")[2]
            for other in OTHERS:
                if name in other.programs and (name.endswith(".py") or following in _SUBCOMMANDS):
                    return other
                if any(word.startswith(f"{program}.") for program in other.programs):
                    return other
    return None
