"""Import of ROLL's files for SFT, DPO and distillation, which share the keys of a run.

Source: ROLL 8eb27cc2, roll/pipeline/sft, roll/pipeline/dpo, roll/pipeline/distill and, for
distillation on the policy's own samples, roll/configs/base_config.py (`is_pure_opd`).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, cast

from msrl.config.sources import Node, plain, wrap
from msrl.errors import did_you_mean
from msrl.importers.megatron import convert_value
from msrl.importers.roll.devices import Devices
from msrl.importers.roll.images import put_frozen_encoders
from msrl.importers.roll.run import put_run, put_variables
from msrl.importers.roll.training import put_data, put_engine_dtype, put_training_args
from msrl.importers.roll.worker import SECTIONS, Worker
from msrl.importers.sections import Keys
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_TRAINERS = {  # kind of file by the section of its trained model
    "sft_train": "sft",
    "student": "distill",
    "student_train": "distill",
}
_RUN_KEYS = (  # of all pipelines
    "defaults", "hydra", "exp_name", "seed", "rpc_timeout", "output_dir", "logging_dir",
    "system_envs", "track_with", "tracker_kwargs", "global_template", "num_gpus_per_node",
    "num_nodes", "local_rank", "save_steps", "logging_steps", "eval_steps", "max_ckpt_to_keep",
    "resume_from_checkpoint", "checkpoint_config", "sequence_length", "max_grad_norm", "pretrain",
    "profiler_timeline", "profiler_memory", "profiler_output_dir", "model_download_type",
    "is_offload_states", "is_offload_optimizer_states_in_train_step", "offload_nccl",
)  # fmt: skip
_SAMPLING_KEYS = (  # of distillation on samples of the policy
    "max_steps", "rollout_batch_size", "num_return_sequences_in_group", "prompt_length",
    "response_length", "max_running_requests", "rollout_dump_dir", "model_name",
)  # fmt: skip
_DIVERGENCES = {
    "forward_kl": "forward_kl",
    "reverse_kl": "reverse_kl",
    "js_divergence": "jensen_shannon",
}
_READ = "read by other pipelines only"
_TEMPLATE_TEXT = (
    "the original also scores what its template puts after the end of an answer, such as a line "
    "feed; rows of `msrl preprocess` end with the end of the answer"
)


def is_supervised(tree: Node) -> bool:
    """Return True for files of SFT, DPO and distillation."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    is_dpo = "chosen_key" in entries or "rejected_key" in entries
    return is_dpo or any(name in entries for name in _TRAINERS)


def add_misspelt_kinds(translation: Translation, tree: Node) -> None:
    """Add errors for keys near those by which files of SFT and distillation are known."""
    for key, node in (tree.value if isinstance(tree.value, dict) else {}).items():
        if close := get_close_matches(key, _TRAINERS, n=1, cutoff=0.9):
            text = f"unknown key of ROLL; {did_you_mean(close)}"
            translation.errors.append(f"{node.origin}: {key}: {text}")


def translate_supervised(translation: Translation, tree: Node) -> Translation:
    """Return the translation of a file of SFT, DPO or distillation."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    trainer = next((name for name in _TRAINERS if name in entries), "actor_train")
    return _SupervisedFile(translation, tree, trainer).translate()


class _SupervisedFile:
    def __init__(self, translation: Translation, tree: Node, trainer: str) -> None:
        self.translation, self.trainer = translation, trainer
        self.kind = _TRAINERS.get(trainer, "dpo")
        self.samples = trainer == "student_train"
        translation.mode = translation.algorithm = self.kind
        keys = [*_RUN_KEYS, *(_SAMPLING_KEYS if self.samples else ())]
        keys += ["max_steps"] if self.kind == "dpo" else []
        entries = list(translation.entries(tree, self.kind, "", also=("top",)))
        self.own = Keys(translation, self.kind, [e for e in entries if e.section == self.kind])
        self.top = Keys(translation, "top", [e for e in entries if e.section == "top"])
        self.top.discard([entry.key for entry in self.top if entry.key not in keys], _READ)
        self.keys = keys
        self.worker = Worker.of(self.own, trainer)
        self.engine = Worker.of(self.own, "student_infer")

    def translate(self) -> Translation:
        devices = Devices.from_keys(self.top, self.worker, self.engine)
        if self.samples:
            devices.apply()
        else:
            devices.put_training()
        put_run(self.top)
        args, model = self.worker.sections["training_args"], self.worker.sections["model_args"]
        self._put_batch(args, devices)
        put_frozen_encoders(model)
        put_training_args(args, model)
        put_data(self.worker.sections["data_args"])
        {"sft": self._put_sft, "dpo": self._put_dpo, "distill": self._put_distillation}[self.kind]()
        if self.kind == "dpo":
            self._put_reference(devices)
        self._put_evaluation()
        self._record_workers(args, model)
        self.own.apply_remaining()
        self.top.apply_remaining()
        self._put_defaults(args)
        return self.translation

    def _put_batch(self, args: Keys, devices: Devices) -> None:
        """Set the size of an update. An update of DPO counts pairs, as in the original."""
        micro, steps = (
            args.number("per_device_train_batch_size"),
            args.number("gradient_accumulation_steps"),
        )
        if micro is None or steps is None or devices.data_parallel is None:
            return None
        size = micro * steps * devices.data_parallel
        if self.own.get("train_batch_size") is not None:
            return self._put_pairs(args, micro, size)
        why = f"{micro} * {steps} * data parallel {devices.data_parallel}"
        native = "train.global_batch" if self.kind != "distill" else "rollout.prompts_per_step"
        if self.samples:
            native = "train.updates.samples_per_update"
        return args.assign("gradient_accumulation_steps", [native], size, why=why)

    def _put_pairs(self, args: Keys, micro: int, answers: int) -> None:
        """Set the sizes of v0.1.0, whose updates count answers, two of each pair."""
        key, pairs = "train_batch_size", answers // 2
        total, steps = self.own.number(key), self.top.number("max_steps")
        if total is None or steps is None:
            return None
        if answers % 2 or total % pairs:
            text = f"must be a multiple of the {pairs} pairs of an update"
            return self.own.add_error(key, text)
        args.assign("per_device_train_batch_size", ["train.micro_batch"], max(1, micro // 2))
        why = f"{answers} answers"
        args.assign("gradient_accumulation_steps", ["train.global_batch"], pairs, why=why)
        updates = total // pairs
        why = f"{updates} updates per step"
        self.top.assign("max_steps", ["train.steps"], steps * updates, why=why)
        return self.own.record(key, KeyStatus.APPLIED, why)

    def _put_epochs(self) -> None:
        """Set the number of epochs, with all rows in their order."""
        args = self.worker.sections["training_args"]
        epochs = args.value("num_train_epochs")
        number = int(epochs) if isinstance(epochs, int | float) else epochs
        args.assign("num_train_epochs", ["train.epochs"], 1 if number is None else number)
        if args.get("num_train_epochs") is None:
            self.translation.set_default("train.epochs", 1)
        args.record("max_steps", KeyStatus.DEAD, "the original computes it from num_train_epochs")

    def _put_sft(self) -> None:
        self._put_epochs()
        self.top.put("sequence_length", "data.seq_length")
        self.translation.set("data.shuffle", wrap(False, self.top.origin("sequence_length")))

    def _put_dpo(self) -> None:
        own, loss = self.own, "algo.preference.loss"
        self.top.put("sequence_length", "data.seq_length")
        entry = own.get("ipo")
        if entry is not None and entry.value is True:
            text = "the loss of the original takes sums over tokens, that of msrl means"
            self.translation.approximate(entry, loss, "ipo", text)
        else:
            origin = own.origin("chosen_key")
            self.translation.set(loss, wrap("dpo", origin))
            own.record("ipo", KeyStatus.APPLIED, f"{loss}: dpo")
        smoothing = own.real("label_smoothing", 0.0)
        if smoothing and (entry is None or entry.value is not True):
            options = "algo.preference.options.label_smoothing"
            own.assign("label_smoothing", [options], smoothing)
        own.record("label_smoothing", KeyStatus.OFF, "")
        own.assign("beta", ["algo.preference.beta"], own.real("beta", 0.1))
        args = self.worker.sections["training_args"]
        args.record("num_train_epochs", KeyStatus.DEAD, "max_steps ends the run")
        self.translation.remarks.append(f"{self.translation.name}: {_TEMPLATE_TEXT}")

    def _put_reference(self, devices: Devices) -> None:
        """Translate the reference: its weights, if it has others, and separate devices."""
        reference = Worker.of(self.own, "reference")
        paths = [
            keys.sections["model_args"].get("model_name_or_path")
            for keys in (self.worker, reference)
        ]
        policy, other = paths
        if policy is not None and other is not None and policy.value and other.value:
            self.translation.assign(policy, ["model.path"], policy.value)
            self.translation.assign(other, ["cluster.roles.reference.load"], other.value)
            self.top.record("pretrain", KeyStatus.DEAD, "overridden by model_name_or_path")
        mapping = reference.own.get("device_mapping")
        if mapping is not None:
            devices.put_model("reference", reference)
        reference.record_all(KeyStatus.SAME, "the reference has the settings of actor_train")

    def _put_distillation(self) -> None:
        """Translate distillation to train-distill, which samples the answers."""
        own, origin = self.own, self.own.origin(self.trainer)
        self._put_teachers()
        entry = own.get(self.trainer)
        if entry is None:
            return  # its value is not a section, which has been reported
        if self.samples:
            self._put_samples()
            text = (
                "the original takes log p(teacher) - log p(policy) of each sampled token as its "
                "advantage, msrl the exact divergence as the loss"
            )
            self.translation.report_difference(entry, text)
            return
        self._put_epochs()
        text = (
            "the original compares the likeliest logits on the answers of the data and adds their "
            "loss, msrl compares all logits on answers that the policy samples"
        )
        self.translation.report_difference(entry, text)
        prompt = own.get("distill_on_prompt")
        if prompt is not None and prompt.value is True:
            self.translation.difference(prompt, "msrl distills on the sampled tokens only")
        for key in ("logits_topk", "distill_loss_weight"):
            own.record(key, KeyStatus.DROPPED, "results differ: see the key student")
        self._put_divergence()
        total = self.top.number("sequence_length") or 2048
        half = total // 2
        why = "half of the sequence each for prompt and answer"
        self.top.assign("sequence_length", ["rollout.max_response_tokens"], total - half, why=why)
        self.translation.set("rollout.max_prompt_tokens", wrap(half, origin))
        self.translation.set("rollout.samples_per_prompt", wrap(1, origin))
        self.translation.set("data.shuffle", wrap(True, origin))

    def _put_divergence(self) -> None:
        own = self.own
        name = str(own.value("kd_objective"))
        divergence = _DIVERGENCES.get(name)
        entry = own.get("kd_objective")
        if divergence is None and entry is not None:
            text = f"msrl has no divergence {name}"
            self.translation.approximate(entry, "algo.distill.divergence", "forward_kl", text)
        own.assign("kd_objective", ["algo.distill.divergence"], divergence or "forward_kl")
        for key in ("kd_temperature", "teacher_temperature"):
            temperature = own.get(key)
            if temperature is not None and temperature.value not in (1, None):
                self.translation.difference(temperature, "msrl compares at the temperature 1")
            own.record(key, KeyStatus.OFF, "")

    def _put_teachers(self) -> None:
        """Set the teachers: one, or with `student_train` several with their tags."""
        entry = self.own.get("teacher")
        path = self.own.get("teacher_pretrain")
        node = entry.node if entry is not None else None
        nodes = node.value if node is not None and isinstance(node.value, dict) else {}
        names = [""] if "model_args" in nodes or "device_mapping" in nodes else list(nodes)
        teachers: list[dict[str, Any]] = []
        for name in names:
            label = f"teacher.{name}" if name else "teacher"
            worker = Worker(self.translation, label, nodes[name] if name else node)
            teachers.append(self._teacher(worker, path))
            worker.record_all(KeyStatus.SAME, "a teacher has the layout of the student")
        if entry is not None:
            text = "algo.distill.teachers"
            self.translation.record(entry, KeyStatus.APPLIED, text)
            self.translation.set("algo.distill.teachers", wrap(teachers, entry.origin))
        self.own.record("teacher_pretrain", KeyStatus.APPLIED, "algo.distill.teachers")

    def _teacher(self, worker: Worker, path: SourceKey | None) -> dict[str, Any]:
        weights = worker.sections["model_args"].get("model_name_or_path") or path
        if weights is None:
            self.translation.errors.append(
                f"{self.translation.name}: {worker.name}.model_args.model_name_or_path: missing. "
                "Set the folder of the teacher."
            )
            return {}
        teacher: dict[str, Any] = {"model": weights.value}
        tags, coef = worker.own.get("tag_included"), worker.own.get("opd_kl_coef")
        if tags is not None and tags.value:
            teacher["tags"] = [str(tag) for tag in cast("list[Any]", plain(tags.node))]
        if coef is not None and coef.value not in (None, 1):
            teacher["weight"] = coef.value
        return teacher

    def _put_samples(self) -> None:
        """Translate the rollouts of distillation on samples of the policy."""
        top, engine = self.top, self.engine
        for key, native in (
            ("rollout_batch_size", "rollout.prompts_per_step"),
            ("prompt_length", "rollout.max_prompt_tokens"),
        ):
            top.put(key, native)
        total, prompt = top.number("sequence_length"), top.number("prompt_length")
        if top.get("sequence_length") is not None and total and prompt:
            top.assign("sequence_length", ["rollout.max_response_tokens"], total - prompt)
        top.put("response_length", "rollout.max_response_tokens")
        put_engine_dtype(engine.sections["model_args"], self.worker.sections["model_args"])
        sampling = engine.sections["generating_args"]
        sampling.assign(
            "top_k", ["rollout.sampling.top_k"], convert_value(sampling, "top_k", "top_k")
        )
        sampling.apply_remaining()
        self.translation.fill_defaults(("generating_args",), sampling)
        args = self.worker.sections["training_args"]
        args.record("num_train_epochs", KeyStatus.DEAD, "max_steps ends the run")

    def _put_evaluation(self) -> None:
        """Translate the evaluation of held-out rows, which the original starts before step 1."""
        entry = self.own.get("validation")
        node = entry.node.value if entry is not None else None
        if entry is None or not isinstance(node, dict) or self.kind == "distill":
            reason = "no evaluation without validation.data_args.file_name"
            self.top.record("eval_steps", KeyStatus.DEAD, reason)
            return
        worker = Worker.of(self.own, "validation")
        steps = self.top.value("eval_steps")
        self.top.assign("eval_steps", ["eval.every_steps"], steps)
        text = "preprocess the rows with `msrl preprocess`, then use --set data.eval=PREFIX"
        worker.sections["data_args"].record("file_name", KeyStatus.SAME, text)
        worker.record_all(KeyStatus.SAME, "held-out rows have the columns of the training")

    def _record_workers(self, args: Keys, model: Keys) -> None:
        """Record what only the original's workers read."""
        for keys in (args, model):
            keys.apply_remaining()
        for worker in (self.worker, self.engine):
            for section in (*SECTIONS, "strategy_config"):
                worker.own.record(section, KeyStatus.APPLIED, "key by key")
        text = "evaluation has the micro-batches of the training"
        self.worker.own.record("infer_batch_size", KeyStatus.SPEED, text)
        put_variables(self.worker.own)
        for entry in self.worker.own:
            if not self.translation.is_recorded(entry):
                self.translation.apply(entry)
        text = "implementation detail of training in the original"
        self.worker.record_all(KeyStatus.SAME, text)
        text = "read from the training settings, or chosen by the engine"
        self.engine.record_all(KeyStatus.SAME, text)

    def _put_defaults(self, args: Keys) -> None:
        """Set the defaults of the original for keys that the file does not set."""
        self.translation.fill_defaults(("training_args",), args)
        table = self.translation.table
        for key in self.keys:
            row = table.row("top", key)
            if row is None or not row.has_default or row.by or self.top.get(key) is not None:
                continue
            for native in row.to:
                self.translation.set_default(native, row.default)
