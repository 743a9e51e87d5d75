"""A small file or command line of every system, and another value for each key of its table (verl's
are in its own tests), for `test_imports_changes.py`.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from msrl.config.sources import Origin, plain, read, wrap
from msrl.importers.lightrft import command_line as lightrft
from msrl.importers.mindspeed import scripts as mindspeed_llm
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.roll import files as roll
from msrl.importers.shell import Word
from msrl.importers.translation import Translation
from msrl.importers.verl import files as verl
from support import ROOT

EXAMPLES = ROOT / "examples" / "mindspeed"
GONE: Any = ...  # a removed key
Changes = dict[str, Any]
Case = tuple[Changes, Any]  # keys set in both files, and the other value

# --- ROLL

ROLL: dict[str, Any] = {
    "rollout_batch_size": 64, "prompt_length": 1024, "response_length": 2048,
    "num_return_sequences_in_group": 8, "adv_estimator": "grpo",
    "pretrain": "model", "num_gpus_per_node": 16,
    "actor_train": {
        "model_args": {}, "data_args": {}, "device_mapping": "list(range(0,16))",
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
    },
    "actor_infer": {
        "generating_args": {}, "device_mapping": "list(range(0,16))",
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
    },
    "rewards": {"math": {"worker_cls": "roll.MathRuleRewardWorker", "tag_included": ["math"]}},
}  # fmt: skip
_WORKER = {
    "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "device_mapping": "list(range(0,4))",
}  # fmt: skip
ROLL_KINDS: dict[str, Changes] = {  # files by the section of the keys that only they have
    "sft": {"sequence_length": 512, "pretrain": "base", "sft_train": _WORKER},
    "dpo": {
        "sequence_length": 512, "pretrain": "base", "max_steps": 20, "actor_train": _WORKER,
        "chosen_key": "chosen", "rejected_key": "rejected",
    },
    "distill": {
        "sequence_length": 512, "student_pretrain": "small", "teacher_pretrain": "large",
        "student": _WORKER, "teacher": {"device_mapping": "list(range(0,4))"},
    },
}  # fmt: skip
JUDGE: Changes = {"rewards.math.worker_cls": "roll.LLMJudgeRewardWorker"}
AGENTIC: Changes = {
    "train_env_manager": {
        "num_env_groups": 8, "group_size": 8, "tags": ["Lake"], "num_groups_partition": [8],
    },
    "custom_envs": {
        "Lake": {
            "env_type": "frozen_lake", "max_steps": 5, "max_tokens_per_step": 50, "env_config": {},
        },
        "Room": {"env_type": "sokoban", "env_config": {}},
    },
}  # fmt: skip
MATH: Changes = {
    **AGENTIC,
    "custom_envs": {"Lake": {"env_type": "roll_math", "env_config": {}}},
}
ROOM: Changes = {**AGENTIC, "train_env_manager.tags": ["Room"]}
# Of v0.1.0, whose templates show a state.
EARLY: Changes = {**AGENTIC, "custom_envs.Lake.agent_template": "{state}"}
TAGS: Changes = {
    **AGENTIC,
    "train_env_manager.tags": ["Lake", "Room"],
    "train_env_manager.num_groups_partition": [4, 4],
}
GIGPO: Changes = {**AGENTIC, "adv_estimator": "gigpo"}
FILTER: Changes = {
    "query_filter_config": {
        "type": "mean_filter",
        "filter_args": {"threshold_down": 0.1, "threshold_up": 0.9},
    }
}
NORM: Changes = {**AGENTIC, "reward_normalization": {"grouping": "batch", "method": "mean_std"}}
HELD_OUT: Changes = {
    "validation": {"data_args": {"file_name": ["held.jsonl"]}},
    "val_prompt_length": 1024,
    "val_sequence_length": 4096,
}
GAE, KL, DIFFICULT = (
    {"adv_estimator": "gae"},
    {"add_token_level_kl": True},
    {"difficulty_mask": True},
)
RANGE, LORA = {"use_pg_clip_range": True}, {"actor_train.model_args.lora_target": "k_proj"}
OF_INFER = {
    "gpu_memory_utilization", "mem_fraction_static", "max_model_len", "enforce_eager",
    "max_num_batched_tokens", "max_num_seqs",
    "enable_prefix_caching", "tensor_parallel_size",
}  # fmt: skip
ROLL_CASES: dict[str, Case] = {
    "top.system_envs": ({}, {"NCCL_DEBUG": "INFO"}), "top.track_with": ({}, "stdout"),
    "top.profiler_timeline": ({}, True),
    "top.tracker_kwargs": ({"track_with": "wandb"}, {"project": "math"}),
    "top.num_gpus_per_node": ({}, 8),
    "top.resume_from_checkpoint": ({}, True),
    "top.checkpoint_config": ({}, {"output_dir": "elsewhere"}),
    "top.sequence_length": ({}, 4096), "top.query_filter_config": ({}, {"type": "std_filter"}),
    "top.train_infer_correction": ({}, {"is_weight": {"enabled": True}}),
    "top.render_save_dir": (AGENTIC, "there"),
    "top.is_use_additional_prompts": (FILTER, True),
    "top.max_additional_running_prompts": ({**FILTER, "is_use_additional_prompts": True}, 7),
    "top.eval_steps": (HELD_OUT, 7), "top.val_sequence_length": (HELD_OUT, 3072),
    "top.val_prompt_length": (HELD_OUT, 512),
    "top.async_generation_ratio": ({}, 2), "top.max_grad_norm": ({}, 0), "top.lambd": (GAE, 0.9),
    "top.gamma": ({}, 0.9),
    "top.pg_clip": ({}, 0.1), "top.use_pg_clip_range": ({"pg_clip": 0.1}, True),
    "top.pg_clip_low": (RANGE, 0.1),
    "top.pg_clip_high": (RANGE, 0.3),
    "top.reward_pretrain": (GAE, "rm"),
    "top.value_clip": (GAE, 0.3), "top.kl_penalty": (KL, "mse"), "top.init_kl_coef": (KL, 0.1),
    "top.target_kl": (KL, 0.1),
    "top.kl_horizon": ({**KL, "target_kl": 0.1}, 7), "top.add_token_level_kl": ({}, True),
    "top.use_kl_loss": ({"kl_loss_coef": 0.1}, True),
    "top.kl_loss_coef": ({"use_kl_loss": True}, 0.1), "top.adv_estimator": ({}, "reinforce"),
    "top.critic_warmup": (GAE, 3),
    "top.norm_mean_type": ({"adv_estimator": "reinforce"}, "batch"),
    "top.norm_std_type": ({"adv_estimator": "reinforce"}, "batch"),
    "top.rl_loss_coef": ({}, 0.5), "top.dual_clip_loss": ({}, True),
    "top.loss_agg_mode": ({}, "seq-mean-token-sum-norm"),
    "top.importance_sampling": ({}, "seq"), "top.difficulty_mask": ({}, True),
    "top.difficulty_low_threshold": (DIFFICULT, 0.1),
    "top.difficulty_high_threshold": (DIFFICULT, 0.9),
    "top.rewards": ({}, {"code": {"worker_cls": "roll.CodeSandboxRewardWorker"}}),
    "top.ratio_type": (AGENTIC, "sequence"), "top.step_reward_gamma": (GIGPO, 0.9),
    "top.step_reward_weight": (GIGPO, 0.5), "top.episode_reward_weight": (GIGPO, 0.5),
    "top.max_actions_per_traj": (AGENTIC, 9),
    "top.env_manager_cls": ({}, "Manager"), "top.train_env_manager": ({}, {"num_env_groups": 4}),
    "top.val_env_manager": (AGENTIC, {"group_size": 4}),
    "top.custom_envs": (AGENTIC, {"Lake": {"env_type": "sokoban", "env_config": {}}}),
    "top.reward_normalization": (AGENTIC, {"grouping": "batch", "method": "mean"}),
    "top.max_tokens_per_step": (AGENTIC, 7), "top.use_turn_scores": (AGENTIC, True),
    "top.reward_norm_alpha": (AGENTIC, 0.5),
    "worker.device_mapping": ({}, [0, 1, 2, 3]), "worker.num_gpus_per_worker": ({}, 4),
    "worker.model_update_frequency": ({}, 2),
    "worker.pg_variant": ({"actor_train.worker_cls": "x.ActorPGWorker"}, "topr"),
    "reward.judge_model_type": (JUDGE, "inference"),
    "reward.judge_model_name": (JUDGE, "other"),
    "reward.judge_api_url": (JUDGE, "https://other.example/v1"),
    "reward.judge_api_key": (JUDGE, "secret-of-the-judge"),
    "worker.system_envs": ({}, {"A": "b"}), "worker.router_replay": ({}, {"mode": "R2"}),
    "model_args.dtype": ({}, "fp32"),
    "model_args.ulysses_size": ({}, 2),
    "model_args.disable_gradient_checkpointing": (
        {"actor_train.strategy_args.strategy_name": "fsdp2_train"}, False,
    ), "model_args.lora_alpha": (LORA, 7),
    "model_args.lora_target": (LORA, ["q_proj"]), "model_args.lora_rank": (LORA, 7),
    "model_args.lora_dropout": (LORA, 0.1),
    "training_args.warmup_ratio": ({}, 0.1),
    "training_args.lr_scheduler_type": ({}, "cosine_with_min_lr"),
    "training_args.adam_beta1": ({}, 0.8),
    "training_args.adam_beta2": ({}, 0.8), "data_args.template": ({}, "qwen_r1"),
    "generating_args.top_k": ({}, 0),
    "generating_args.stop_strings": ({}, ["END"]),
    "strategy_config.tensor_model_parallel_size": ({}, 2),
    "strategy_config.pipeline_model_parallel_size": ({}, 2),
    "strategy_config.expert_model_parallel_size": ({}, 2),
    "strategy_config.context_parallel_size": ({}, 2),
    "strategy_config.recompute_granularity": ({}, "full"),
    "strategy_config.recompute_method": ({}, "block"),
    "strategy_config.moe_layer_recompute": ({}, True),
    "strategy_config.enforce_eager": ({}, True),
    "strategy_config.recompute_modules": (
        {"actor_train.strategy_args.strategy_config.recompute_granularity": "selective"}, ["mlp"],
    ),
    "strategy_config.bf16": ({}, False),
    "strategy_config.sequence_parallel": (
        {"actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2}, True,
    ),
    "strategy_config.enable_prefix_caching": ({}, False),
    "strategy_config.tensor_parallel_size": ({}, 4),
    "env_manager.group_size": (AGENTIC, 4), "env_manager.tags": (AGENTIC, ["Room"]),
    "env_manager.num_groups_partition": (TAGS, [6, 2]),
    "env_manager.n_groups": ({**TAGS, "train_env_manager.num_groups_partition": GONE}, [6, 2]),
    "env_manager.generating_args": (AGENTIC, {"max_new_tokens": 20}),
    "custom_env.env_type": (AGENTIC, "sokoban"), "custom_env.max_steps": (AGENTIC, 9),
    "custom_env.max_tokens_per_step": (AGENTIC, 20),
    "custom_env.tool_wrapper": (MATH, {"tool_configs": [{"tool_id": "python_code"}]}),
    "custom_env.env_config": (AGENTIC, {"size": 6}), "env_config.size": (AGENTIC, 6),
    "env_config.p": (AGENTIC, 0.5), "env_config.is_slippery": (AGENTIC, False),
    "env_config.max_steps": (AGENTIC, 9), "env_config.format_penalty": (AGENTIC, -0.5),
    "env_config.env_instruction": (AGENTIC, "Go!"), "env_config.dim_room": (ROOM, [6, 6]),
    "env_config.num_boxes": (ROOM, 2),
    "env_manager.format_penalty": (EARLY, -0.25),
    "reward_normalization.grouping": (NORM, "traj_group_id"),
    "reward_normalization.method": (NORM, "mean"),
    "reward_normalization.norm_mean_type": (AGENTIC, "batch"),
    "reward_normalization.norm_std_type": (AGENTIC, "batch"),
    "reward.tag_included": ({}, ["other"]),
    "reward.query_filter_config": ({}, {"type": "std_filter"}),
}  # fmt: skip


def roll_key_path(section: str, key: str) -> str:
    """Return the path of a key in a ROLL file."""
    if section in ("top", *ROLL_KINDS):
        return key
    if section in ("env_manager", "reward_normalization"):
        return f"{'train_env_manager' if section == 'env_manager' else section}.{key}"
    if section == "reward":
        return f"rewards.math.{key}"
    if section == "custom_env":
        return f"custom_envs.Lake.{key}"
    if section == "env_config":
        name = "Room" if key in ("dim_room", "num_boxes") else "Lake"
        return f"custom_envs.{name}.env_config.{key}"
    worker = (
        "actor_infer"
        if section == "generating_args" or key in OF_INFER or key == "num_gpus_per_worker"
        else "actor_train"
    )
    subsection = {"worker": "", "strategy_config": "strategy_args.strategy_config."}.get(
        section, f"{section}."
    )
    return f"{worker}.{subsection}{key}"


# --- LightRFT

LIGHTRFT: Changes = {
    "pretrain": "model", "prompt_data": "x", "rollout_batch_size": 64, "n_samples_per_prompt": 8,
    "train_batch_size": 128,
    "advantage_estimator": "group_norm",
}  # fmt: skip
WITH_GAE, RUNNING, LONG = (
    {"advantage_estimator": "gae"},
    {"reward_running_norm": True},
    {"overlong_buffer": True},
)
WITH_LORA = {"lora_rank": 8}
LIGHTRFT_CASES: dict[str, Case] = {
    "flags.reward_pretrain": ({}, "rm"), "flags.remote_rm_url": ({}, "http://localhost:1"),
    "flags.critic_learning_rate": (WITH_GAE, 0.1),
    "flags.lr_warmup_ratio": ({}, 0.1), "flags.max_norm": ({}, 0),
    "flags.adam_betas": ({}, "0.8 0.9"), "flags.gamma": ({}, 0.9),
    "flags.advantage_estimator": ({}, "gspo"), "flags.kl_estimator": ({}, "k2"),
    "flags.init_kl_coef": ({}, 0.1),
    "flags.use_kl_loss": ({}, True),
    "flags.kl_target": ({}, 0.1), "flags.kl_horizon": ({"kl_target": 0.1}, 7),
    "flags.clip_range": ({}, 0.1), "flags.eps_clip": ({}, 0.1),
    "flags.clip_range_higher": ({}, 0.3), "flags.value_clip": (WITH_GAE, 0.3),
    "flags.lambd": (WITH_GAE, 0.9), "flags.top_k": ({}, 7),
    "flags.bf16": ({}, True), "flags.gradient_checkpointing": ({}, True), "flags.sp_size": ({}, 2),
    "flags.engine_type": ({}, "vllm"),
    "flags.enable_engine_sleep": ({}, True), "flags.disable_engine_sleep": ({}, True),
    "flags.use_tensorboard": ({}, "logs"),
    **{f"flags.wandb_{name}": ({"use_wandb": "key"}, "other") for name in
       ("org", "group", "project")},
    "flags.use_wandb": ({}, "project"), "flags.save_path": ({}, "there"),
    "flags.load_checkpoint": ({}, True),
    "flags.advantage_clip": ({}, 2.0),
    "flags.critic_pretrain": (WITH_GAE, "critic"),
    "flags.max_eval_samples": ({"eval_steps": 5}, 7),
    "flags.advantages_norm": ({"advantage_estimator": "reinforce++"}, True),
    "flags.reward_clip": ({}, 2.0), "flags.reward_running_norm": ({}, True),
    "flags.reward_running_norm_minus_mean": (RUNNING, True),
    "flags.mixed_mm_data": ({}, True), "flags.images_key": ({}, "image"),
    "flags.limit_mm_image_per_prompt": ({}, 2),
    "flags.overlong_buffer": ({}, True), "flags.overlong_buffer_len": (LONG, 7),
    "flags.overlong_buffer_penalty_factor": (LONG, 0.5),
    "flags.dynamic_sampling": ({}, True), "flags.use_cpg_loss": ({}, True),
    "flags.freezing_actor_steps": (WITH_GAE, 3),
    "flags.lora_alpha": (WITH_LORA, 7), "flags.lora_dropout": (WITH_LORA, 0.1),
    "flags.target_modules": (WITH_LORA, "q_proj"),
    "flags.save_trajectories": ({"save_trajectories": False}, True), "flags.plot_every": ({}, 7),
    "flags.eval_steps": ({}, 7),
    "flags.wandb_run_name": ({}, "named"), "flags.max_ckpt_mem": ({}, 7),
}  # fmt: skip

# --- MindSpeed-LLM

COMMANDS: dict[str, tuple[str, Changes]] = {
    "convert": ("convert_ckpt.py", {"load_dir": "a", "save_dir": "b"}),
    "preprocess": (
        "preprocess_data.py",
        {"input": "a", "output_prefix": "b", "handler_name": "AlpacaStyleInstructionHandler"},
    ),
    "train": (
        "posttrain_gpt.py",
        {
            "stage": "sft",
            "data_path": "data",
            "load": "ckpt",
            "finetune": True,
            "global_batch_size": 8,
            "lr": 1e-3,
        },
    ),
    "inference": ("inference.py", {"task": "chat", "load": "ckpt"}),
    "evaluation": ("evaluation.py", {"task": "mmlu", "load": "ckpt"}),
}
LAUNCHERS = ("torchrun", "msrun")
BACK: Changes = {"load_model_type": "mg", "save_model_type": "mg"}
RESUMES: Changes = {"finetune": GONE}
ADAPTED: Changes = {"lora_target_modules": "linear_qkv"}
BALANCED, BIASED = {"moe_aux_loss_coeff": 0.1}, {"moe_router_enable_expert_bias": True}
EVALUATED: Changes = {"eval_interval": 10, "eval_iters": 5}
DPO: Changes = {"stage": "dpo"}
SIMPO: Changes = {"stage": "simpo"}
STEPS: Changes = {
    "handler_name": "AlpacaStyleProcessRewardHandler",
    "placeholder_token": "x", "reward_tokens": "+ -",
}  # fmt: skip
PRM: Changes = {"stage": "prm", "reward_tokens": "+ -"}
PROFILED: Changes = {"profile": True, "profile_step_start": 1, "profile_step_end": 3}
LLM_CASES: dict[str, Case] = {
    "train.distributed_timeout_minutes": ({}, 30),
    "train.dpo_loss_type": (DPO, "ipo"), "train.dpo_beta": (DPO, 0.37),
    "train.dpo_label_smoothing": (DPO, 0.1), "train.pref_ftx": (DPO, 0.37),
    "train.ref_model": (DPO, "reference"), "train.simpo_loss_type": (SIMPO, "hinge"),
    "train.simpo_beta": (SIMPO, 0.37), "train.simpo_label_smoothing": (SIMPO, 0.1),
    "train.gamma_beta_ratio": (SIMPO, 0.37),
    "train.profile": ({**PROFILED, "profile": GONE}, True),
    "train.profile_step_start": (PROFILED, 2), "train.profile_step_end": (PROFILED, 4),
    "train.profile_ranks": (PROFILED, "-1"),
    "convert.load_model_type": ({"save_model_type": "mg"}, "mg"),
    "convert.save_model_type": ({"load_model_type": "mg"}, "hf"),
    "convert.num_layer_list": ({}, "1,3"), "convert.noop_layers": ({}, "0,3"),
    "convert.params_dtype": ({}, "fp16"),
    "convert.transformer_impl": ({}, "transformer_engine"), "convert.save_to_legacy": (BACK, True),
    "preprocess.map_keys": ({}, '{"prompt": "question"}'),
    "preprocess.placeholder_token": (STEPS, "other"), "preprocess.reward_tokens": (STEPS, "1 0"),
    "train.reward_tokens": (PRM, "1 0"), "train.optimizer": ({}, "muon"),
    "preprocess.json_keys": ({}, "content"), "preprocess.enable_thinking": ({}, True),
    "preprocess.neat_pack": ({}, True),
    "train.map_keys": ({}, '{"prompt": "question"}'), "train.json_keys": ({}, "content"),
    "train.enable_thinking": ({}, True),
    "train.finetune": ({"finetune": GONE}, True), "train.no_load_optim": (RESUMES, True),
    "train.no_load_rng": ({**RESUMES, "no_load_optim": True}, True), "train.split": ({}, "90,10,0"),
    **{f"train.wandb_{name}": ({"wandb_project": "math"}, "other") for name in
       ("entity", "save_dir")},
    "train.lr_decay_style": ({}, "cosine"),
    "train.lr_warmup_fraction": ({}, 0.1), "train.clip_grad": ({}, 0),
    "train.adam_beta1": ({}, 0.8), "train.adam_beta2": ({}, 0.8),
    "train.num_layer_list": ({}, "1,3"), "train.noop_layers": ({}, "0,3"),
    "train.sequence_parallel": ({"tensor_model_parallel_size": 2}, True),
    "train.context_parallel_algo": ({}, "megatron_cp_algo"),
    "train.ulysses_degree_in_cp": ({"context_parallel_algo": "hybrid_cp_algo"}, 2),
    "train.recompute_granularity": ({}, "full"),
    "train.recompute_method": ({}, "block"),
    "train.loss_chunk_size": ({"loss_compute_mode": "chunk"}, 7),
    "train.bf16": ({}, True), "train.lora_r": (ADAPTED, 7), "train.lora_alpha": (ADAPTED, 7),
    "train.lora_load": (ADAPTED, "earlier"),
    "train.lora_target_modules": ({}, "linear_qkv"), "train.no_shuffle": ({}, True),
    "train.eval_interval": (EVALUATED, 20), "train.eval_iters": (EVALUATED, 7),
    "train.calculate_per_token_loss": ({}, True),
    "msrun.worker_num": ({"local_worker_num": 1}, 2),
    "msrun.local_worker_num": ({"worker_num": 8}, 4),
    "inference.enable_thinking": ({"prompt_type": "qwen3"}, True),
    "inference.hf_chat_template": ({}, True), "inference.lora_load": (ADAPTED, "other"),
    "inference.bf16": ({}, True), "inference.fp16": ({}, True),
    "inference.history_turns": ({"hf_chat_template": True}, 7),
    "inference.add_eos_token": ({}, "</s>"),
    "inference.top_k": ({}, 0),
    "evaluation.task": ({}, "gsm8k"), "evaluation.no_chat_template": ({}, True),
    "evaluation.bf16": ({}, True), "evaluation.fp16": ({}, True),
    "inference.temperature": ({}, 0.2), "inference.task": ({}, "greedy"),
    "train.moe_router_load_balancing_type": (BALANCED, "seq_aux_loss"),
    "train.seq_aux": (BALANCED, True),
    "train.moe_router_enable_expert_bias": ({}, True),
    "train.moe_router_bias_update_rate": (BIASED, 0.1),
    "train.indexer_loss_coeff": ({"enable_dsa_indexer": True}, 0.1),
}  # fmt: skip
RAY_PPO: Changes = {"training.stage": "ray_ppo", "algorithm.adv_estimator": "gae"}
RAY_CASES: dict[str, Case] = {
    "actor_rollout.ppo_mini_batch_size": ({}, 4), "actor_rollout.shuffle_minibatch": ({}, True),
    "actor_rollout.num_gpus_for_train": ({}, 4),
    "actor_rollout.kl_coef": ({"algorithm.kl_ctrl": GONE}, 0.1),
    "actor_rollout.top_k": ({}, 0), "algorithm.adv_estimator": ({}, "rloo"),
    "algorithm.kl_ctrl": ({}, {"type": "fixed", "kl_coef": 0.1}),
    "algorithm.verifier_function": ({}, ["base_acc"]), "algorithm.verifier_weight": ({}, [0.5]),
    "algorithm.advantage_whiten": ({}, False),
    "kl_ctrl.kl_coef": ({}, 0.1), "reward.load": ({"reward.verifier": GONE}, "rm"),
    "reward.verifier": ({"reward.load": "rm"}, GONE),
    "actor_rollout.num_gpus_for_infer": ({}, 4), "resource_pool.ref": ({}, [2]),
    "resource_pool.critic": (RAY_PPO, [2]),
    "resource_pool.reward": ({"reward.verifier": GONE, "reward.load": "rm"}, [2]),
    "ref.load": ({}, "elsewhere"), "algorithm.lam": (RAY_PPO, 0.9),
    "critic.cliprange_value": (RAY_PPO, 0.3),
    "critic.load": (RAY_PPO, "elsewhere"),
}  # fmt: skip
RAY_SECTIONS = {
    "actor_rollout": "actor_rollout_ref.actor_rollout", "ref": "actor_rollout_ref.ref",
    "kl_ctrl": "algorithm.kl_ctrl",
}  # fmt: skip

# --- MindSpeed-RL's roles and environment (see test_imports_mindspeed_rl.py for the other sections)

PPO: Changes = {"megatron_training.stage": "ray_ppo", "rl_config.adv_estimator": "gae"}
PROFILE: Changes = {
    f"profiler_config.integrated.{key}": value
    for key, value in {"profile": True, "profile_step_start": 2, "profile_step_end": 5}.items()
}
RL_CASES: dict[str, Case] = {
    "ref_config.load": ({}, "elsewhere"),
    "reward_config.load": ({"rl_config.rule_reward": False}, "rm"), "critic_config.lr": (PPO, 0.1),
    "critic_config.load": (PPO, "elsewhere"), "resource.num_npus": ({}, 8),
    "profiler.profile": ({}, True), "profiler.profile_step_start": (PROFILE, 3),
    "profiler.profile_step_end": (PROFILE, 9), "profiler.profile_ranks": (PROFILE, [1]),
}  # fmt: skip
RL_SECTIONS = {
    "top": "", "megatron": "megatron_training.",
    "sampling_config": "generate_config.sampling_config.",
    "resource": "rl_config.actor_resource.", "runtime_env": "",
    "profiler": "profiler_config.integrated.",
}  # fmt: skip


VERL: Changes = {
    "data": {"train_files": "train.parquet"},
    "actor_rollout_ref": {"model": {"path": "model"}, "rollout": {"name": "vllm"}},
}


def edit(tree: Changes, changes: Changes) -> Changes:
    """Return a copy of a tree with keys (`a.b.c`) set or removed."""
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *sections, key = path.split(".")
        target = tree
        for section in sections:
            target = target.setdefault(section, {})
        target.pop(key, None)
        if value is not GONE:
            target[key] = copy.deepcopy(value)
    return tree


def translate_yaml(module: Any, tree: Changes, file: Path) -> Translation:
    translated = module.translate(wrap(tree, Origin(str(file))), file)
    translated.refuse_misspelled()
    return translated


@cache
def _example(name: str) -> Changes:
    return plain(read(EXAMPLES / f"{name}.yaml"))


def _words(flags: Changes) -> list[str]:
    words: list[str] = []
    for key, value in flags.items():
        words += (
            []
            if value is False
            else [
                f"--{key}",
                *(
                    []
                    if value is True
                    else str(value).split()
                    if key == "adam_betas"
                    else [str(value)]
                ),
            ]
        )
    return words


def translate_flags(
    module: Any,
    program: str,
    flags: Changes,
    launcher: Changes | None = None,
    launched_by: str = "torchrun",
) -> Translation:
    words = [
        *([launched_by, *_words(launcher)] if launcher is not None else []),
        program,
        *_words(flags),
    ]
    return module.translate_words([Word(text, None) for text in words], "command line")


def translation(system: str, section: str, changes: Changes, folder: Path) -> Translation:
    """Return the translation of the base file of a system with changes."""
    file = folder / "given.yaml"
    if system in ("roll", "verl"):
        module, tree = (verl, VERL) if system == "verl" else (roll, ROLL_KINDS.get(section, ROLL))
        return translate_yaml(module, edit(tree, changes), file)
    if system == "lightrft":
        launcher = changes if section == "torchrun" else None
        flags = edit(LIGHTRFT, {} if launcher else changes)
        return translate_flags(lightrft, "train.py", flags, launcher=launcher)
    if section == "runtime_env":
        (folder / "envs").mkdir(exist_ok=True)
        (folder / "envs" / "runtime_env.yaml").write_text(
            yaml.safe_dump({"env_vars": changes}), encoding="utf-8"
        )
        changes = {}
    if system == "mindspeed_rl":
        tree = edit(_example("grpo_r1_zero_qwen25_7b"), changes)
        return translate_yaml(mindspeed_rl, tree, file)
    if section in COMMANDS:
        program, flags = COMMANDS[section]
        return translate_flags(mindspeed_llm, program, edit(flags, changes))
    if section in LAUNCHERS:
        program, flags = COMMANDS["train"]
        return translate_flags(mindspeed_llm, program, flags, launcher=changes, launched_by=section)
    return translate_yaml(mindspeed_ray, edit(_example("grpo_llama32_1b"), changes), file)


CASES = {
    "roll": ROLL_CASES,
    "lightrft": LIGHTRFT_CASES,
    "mindspeed_llm": {**LLM_CASES, **RAY_CASES},
    "mindspeed_rl": RL_CASES,
}


def key_path(system: str, section: str, key: str) -> str:
    """Return the path of a key in the base file."""
    if system == "roll":
        return roll_key_path(section, key)
    if system == "mindspeed_rl":
        return RL_SECTIONS.get(section, f"{section}.") + key
    if system == "verl":
        return key if section == "top" else f"{section}.{key}"
    if system == "mindspeed_llm" and section not in (*COMMANDS, *LAUNCHERS, "top"):
        return f"{RAY_SECTIONS.get(section, section)}.{key}"
    return key
