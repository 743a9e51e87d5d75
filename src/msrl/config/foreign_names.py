"""Names of common settings in other tools, and the keys of msrl with the same meaning.

Sources: the arguments of transformers (TrainingArguments), of TRL's trainers, LLaMA-Factory,
ms-swift, slime, OpenRLHF, MindSpeed-LLM and MindSpeed-RL. A name has several keys where commands
have separate ones. `importers` translates complete files; this table serves messages only.
"""

from __future__ import annotations

_MODEL = ("model.path", "generate.model", "chat.model", "serve.model", "evaluate.models")
_LENGTH = ("data.seq_length", "preprocess.seq_length")
_NEW_TOKENS = (
    "rollout.max_response_tokens", "generate.max_tokens", "chat.max_tokens",
    "eval.max_response_tokens",
)  # fmt: skip
_DTYPE = ("model.dtype", "generate.dtype", "chat.dtype", "serve.dtype", "convert.dtype")

_KEYS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("model_name_or_path", "model_path", "pretrained", "model_id"): _MODEL,
    ("tokenizer_name_or_path", "tokenizer_path"): ("model.tokenizer", "preprocess.tokenizer"),
    ("dataset", "dataset_name", "dataset_path", "train_data", "train_file", "data_path"): (
        "data.train", "preprocess.input", "data.eval",
    ),
    ("val_dataset", "eval_dataset", "validation_file"): ("data.eval",),
    ("dataset_test_split", "val_size", "split_dataset_ratio", "eval_split"): (
        "data.eval_fraction",
    ),
    ("template", "prompt_template", "chat_template"): (
        "model.template", "preprocess.template", "generate.template",
    ),
    ("max_length", "max_seq_length", "max_seq_len", "cutoff_len", "model_max_length"): _LENGTH,
    ("packing", "neat_packing"): ("data.pack", "preprocess.pack"),
    ("max_prompt_length",): ("rollout.max_prompt_tokens",),
    ("max_new_tokens", "max_completion_length", "max_response_length"): _NEW_TOKENS,
    ("num_generations", "group_size", "num_return_sequences", "n_samples_per_prompt", "n"): (
        "rollout.samples_per_prompt", "generate.num_samples", "eval.samples_per_prompt",
    ),
    ("rollout_batch_size", "prompts_per_batch"): ("rollout.prompts_per_step",),
    ("temperature", "rollout_temperature"): (
        "rollout.sampling.temperature", "eval.sampling.temperature", "generate.temperature",
    ),
    ("top_p", "rollout_top_p"): (
        "rollout.sampling.top_p", "eval.sampling.top_p", "generate.top_p",
    ),
    ("top_k", "rollout_top_k"): (
        "rollout.sampling.top_k", "eval.sampling.top_k", "generate.top_k",
    ),
    ("advantage_estimator", "adv_estimator"): ("algo.advantage.estimator",),
    ("kl_coef", "init_kl_coef", "kl_loss_coef"): ("algo.kl.loss.coef", "algo.kl.reward.coef"),
    ("entropy_coef", "entropy_coeff", "entropy_loss_coef"): ("algo.entropy_coef",),
    ("teacher", "teacher_model", "teacher_model_name_or_path"): ("algo.distill.teachers",),
    ("torch_dtype", "bf16", "fp16", "precision", "params_dtype"): _DTYPE,
    ("learning_rate", "actor_lr", "max_lr"): ("train.optimizer.lr",),
    ("lr_scheduler_type", "lr_decay_style", "lr_scheduler"): ("train.optimizer.schedule",),
    ("warmup_steps", "warmup_ratio", "lr_warmup_iters", "lr_warmup_fraction"): (
        "train.optimizer.warmup",
    ),
    ("optim", "optimizer"): ("train.optimizer.name",),
    ("adam_beta1", "adam_beta2"): ("train.optimizer.betas",),
    ("adam_epsilon", "adam_eps"): ("train.optimizer.eps",),
    ("max_grad_norm", "clip_grad"): ("train.optimizer.grad_clip",),
    ("batch_size", "global_batch_size", "train_batch_size", "gradient_accumulation_steps"): (
        "train.global_batch",
    ),
    ("micro_batch_size", "per_device_train_batch_size"): ("train.micro_batch",),
    ("max_steps", "num_steps", "train_iters", "total_steps"): ("train.steps",),
    ("num_epochs", "num_train_epochs", "total_epochs"): ("train.epochs",),
    ("gradient_checkpointing", "recompute_granularity"): ("train.recompute.granularity",),
    ("lora_r", "lora_rank"): ("train.lora.rank",),
    ("lora_alpha",): ("train.lora.alpha",),
    ("lora_dropout",): ("train.lora.dropout",),
    ("lora_target", "lora_target_modules", "target_modules"): ("train.lora.targets",),
    ("adapter_name_or_path", "adapters"): ("train.lora.load", "convert.lora", "serve.lora"),
    ("finetuning_type", "train_type", "tuner_type", "use_peft"): ("train.lora.rank",),
    ("freeze_parameters",): ("train.freeze",),
    ("output_dir", "save_dir", "run_dir"): ("run.dir", "evaluate.output"),
    ("run_name", "experiment_name"): ("run.name",),
    ("save_steps", "save_interval", "save_freq"): ("checkpoint.every_steps",),
    ("save_total_limit",): ("checkpoint.keep",),
    ("resume_from_checkpoint",): ("checkpoint.resume",),
    ("logging_steps", "log_interval"): ("log.every_steps",),
    ("report_to",): ("log.trackers",),
    ("eval_steps", "eval_interval", "test_freq"): ("eval.every_steps",),
    ("beta", "pref_beta"): ("algo.preference.beta", "algo.kl.loss.coef"),
    ("loss_type", "pref_loss", "rlhf_type"): ("algo.preference.loss",),
    ("epsilon", "cliprange"): ("algo.clip.low", "algo.clip.high"),
    ("epsilon_high",): ("algo.clip.high",),
    ("reward_funcs", "reward_functions"): ("reward.sources",),
    ("vllm_gpu_memory_utilization", "gpu_memory_utilization"): ("rollout.engine.memory_fraction",),
    ("vllm_max_model_len", "max_model_len"): ("rollout.engine.max_model_len",),
    ("tensor_parallel_size",): ("train.parallel.tp", "rollout.engine.tp"),
    ("vllm_tensor_parallel_size",): ("rollout.engine.tp",),
    ("pipeline_parallel_size",): ("train.parallel.pp",),
    ("context_parallel_size", "sequence_parallel_size"): ("train.parallel.cp",),
    ("dataset_num_proc", "preprocessing_num_workers"): ("preprocess.workers",),
    ("overwrite_cache", "overwrite_output_dir"): ("preprocess.overwrite", "evaluate.overwrite"),
    ("device", "device_map"): ("cluster.platform",),
}  # fmt: skip
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    name: keys for names, keys in _KEYS.items() for name in names
}
