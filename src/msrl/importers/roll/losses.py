"""Translation of ROLL's policy losses, reward processing and whitening.

Source: ROLL 8eb27cc2, roll/pipeline/rlvr/actor_pg_worker.py and roll/utils/functionals.py.
Keys that v0.2.0 removed are translated as v0.1.0 reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from msrl.config.sources import wrap
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys
from msrl.importers.table import is_number
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_PG_WORKER = "ActorPGWorker"
_PG_MODULE = "agentic_actor_pg_worker"  # its class has the name of the usual worker
_CISPO_CLIP = 0.1  # its own keys are no fields of the original's worker configuration
_BINARY_WORKERS = ("MathRuleRewardWorker", "CodeSandboxRewardWorker")  # with scores 0 and 1
_TOPR_DIFFERENCE = (
    "the original tapers responses with a score of 0 or less, which may have a positive reward"
)
_TURN_ESTIMATORS = ("gigpo", "step_reinforce")  # the result is the reward of all tokens of a turn
_REWARD_ESTIMATORS = ("grpo", "reinforce", "agentic_reinforce", *_TURN_ESTIMATORS)
_REMOVED = "versions from v0.2.0 on ignore it"


@dataclass(frozen=True)
class Losses:
    """Rules for the loss of actor_train.

    Attributes:
        top: Keys of the pipeline.
        own: Keys of the worker.
        num_domains: Number of reward domains.
        is_normalized: True if an agentic file normalizes rewards; None for other files.
    """

    top: Keys
    own: Keys
    num_domains: int
    is_normalized: bool | None = None

    @property
    def translation(self) -> Translation:
        return self.top.translation

    def apply(self) -> None:
        self._policy_loss()
        self._aggregation()
        self._whitening()
        self._removed_keys()

    def has_clip(self) -> bool:
        """Return True if the policy loss reads pg_clip."""
        return self._variant() in ("", "ppo")

    def _variant(self) -> str:
        """Return pg_variant; empty for the usual worker, which does not read it."""
        worker = str(self.own.value("worker_cls") or "") if self.own.get("worker_cls") else ""
        module, _, name = worker.rpartition(".")
        if name != _PG_WORKER and module.rpartition(".")[2] != _PG_MODULE:
            return ""
        entry = self.own.get("pg_variant")
        return str(entry.value) if entry is not None else "vanilla"

    def _policy_loss(self) -> None:
        variant = self._variant()
        if not variant:
            reason = f"read by {_PG_WORKER} only; this worker has the loss of ppo"
            self.own.record("pg_variant", KeyStatus.DEAD, reason)
            return
        entry = self.own.get("pg_variant") or self.own.get("worker_cls")
        assert entry is not None
        reason = refusal("algo.policy_loss", variant)
        if reason:
            self.translation.add_error(entry, f"not supported: the policy loss {variant}")
            return
        difference = _TOPR_DIFFERENCE if variant == "topr" and not self._has_scores() else ""
        why = f"results may differ: {difference}" if difference else ""
        self.translation.assign(entry, ["algo.policy_loss"], variant, why=why)
        self.own.record("worker_cls", KeyStatus.APPLIED, f"algo.policy_loss: {variant}")
        if difference:
            self.translation.report_difference(entry, difference)
        if variant == "topr":
            for key, value in (("level", "token"), ("split", "reward")):
                self.translation.set(f"algo.options.{key}", wrap(value, entry.origin))
        if variant == "cispo":
            for key in ("algo.clip.low", "algo.clip.high"):
                self.translation.set(key, wrap(_CISPO_CLIP, entry.origin))

    def _has_scores(self) -> bool:
        """Return True if rewards of responses are their scores: rewards of games, or 0 and 1."""
        rewards = self.top.get("rewards")
        domains = rewards.value if rewards is not None else None
        if self.is_normalized is not None or not isinstance(domains, dict) or not domains:
            return self.is_normalized is not None
        return all(map(_has_binary_scores, cast("dict[str, Any]", domains).values()))

    def _aggregation(self) -> None:
        """Set the divisor of seq-mean-token-sum-norm: the padded width of a sequence.

        The value loss is the mean over sequences of their token means.
        """
        if self.translation.algorithm == "gae":
            self.translation.set_default("algo.value.aggregate", "seq-mean-token-mean")
        entry = self.top.get("loss_agg_mode")
        if entry is None or entry.value != "seq-mean-token-sum-norm":
            return
        total = self.top.number("sequence_length") if self.top.get("sequence_length") else None
        prompt, response = self.top.number("prompt_length"), self.top.number("response_length")
        if total is None and prompt is not None and response is not None:
            total = prompt + response
        if total is not None:
            width = float(total - 1)  # the first token has no log-probability
            self.translation.set("algo.aggregate.constant", wrap(width, entry.origin))

    def put_reward_clip(self) -> None:
        """Translate reward_clip, which the original applies after the normalization."""
        top, entry = self.top, self.top.get("reward_clip")
        if entry is None or entry.value is None:
            return
        if not self._normalizes():
            self.translation.assign(entry, ["reward.clip"], entry.value)
            return
        turns = self.translation.algorithm in _TURN_ESTIMATORS
        if clips_advantages(top) and self.translation.algorithm in _REWARD_ESTIMATORS:
            why = "the normalized reward is the advantage of each token"
            self.translation.assign(entry, ["algo.advantage.clip"], entry.value, why=why)
        elif turns or not is_number(entry.value):
            text = "the original clips rewards of turns after normalizing them, msrl before"
            self.translation.approximate(entry, "reward.clip", entry.value, text)
        else:
            bounds = [-float(entry.value), float(entry.value)]
            self.translation.assign(entry, ["reward.norm.clip"], bounds)
            if top.value("add_token_level_kl") is True:
                text = "the original also clips the sum of the reward and the penalty of a token"
                self.translation.report_difference(entry, text)

    def _normalizes(self) -> bool:
        """Return True if the original normalizes rewards before it clips them."""
        if self.is_normalized is not None:
            return self.is_normalized or self.translation.algorithm in _TURN_ESTIMATORS
        keys = ("norm_mean_type", "norm_std_type", "reward_norm")
        return self.translation.algorithm == "grpo" or any(self.top.value(key) for key in keys)

    def scope(self, name: object) -> object:
        """Return the native scope of a mean or deviation: a batch has the samples of a domain."""
        return "domain" if name == "batch" and self.num_domains > 1 else name

    def report_running(self, entry: SourceKey | None) -> None:
        """Report a mean or deviation of the run so far, which each domain in turn updates."""
        if entry is not None and entry.value == "running" and self.num_domains > 1:
            text = "the original adds the domains of a step one after another, msrl all before"
            self.translation.report_difference(entry, text)

    def _whitening(self) -> None:
        if self.num_domains < 2:
            return
        for key in ("whiten_advantages", "whiten_rewards"):
            if self.top.value(key) is True:
                origin = self.top.origin(key)
                self.translation.set("algo.advantage.whiten_scope", wrap("domain", origin))

    def _removed_keys(self) -> None:
        """Translate keys that v0.2.0 removed, in the way in which earlier versions read them."""
        self._reward_norm()
        for key in ("sft_loss_coef", "postive_loss_coef"):
            entry = self.top.get(key)
            if entry is not None and entry.value not in (0, 0.0, None):
                text = f"the original weights tokens by their advantages, and {_REMOVED}"
                self.translation.approximate(entry, "algo.sft.coef", entry.value, text)
        entry = self.top.get("use_topr_loss")
        if entry is not None and entry.value is True:
            text = f"the original splits responses by their scores, and {_REMOVED}"
            self.translation.approximate(entry, "algo.policy_loss", "topr", text)

    def _reward_norm(self) -> None:
        """Translate reward_norm, which norm_mean_type and norm_std_type replaced."""
        top, entry = self.top, self.top.get("reward_norm")
        if entry is None or entry.value is None or top.get("norm_mean_type", "norm_std_type"):
            return
        if entry.value == "None":  # Python's null, which YAML reads as a text
            self.translation.record(entry, KeyStatus.OFF, "")
            return
        if self.translation.algorithm == "grpo":
            return
        natives = ["reward.norm.center", "reward.norm.scale"]
        if top.value("reward_shift") is True:
            natives = natives[:1]
        elif top.value("reward_scale") is True and entry.value == "running":
            natives = natives[1:]
        self.translation.assign(entry, natives, self.scope(entry.value), why=_REMOVED)
        self.report_running(entry)
        for key in ("reward_shift", "reward_scale"):
            top.record(key, KeyStatus.APPLIED, f"{' and '.join(natives)}: {entry.value}")


def clips_advantages(top: Keys) -> bool:
    """Return True if a bound of rewards is one of advantages: nothing comes between the two."""
    is_plain = top.value("add_token_level_kl") is not True and top.value("gamma") in (None, 1)
    return is_plain and not any(
        top.value(key) for key in ("whiten_advantages", "whiten_rewards", "advantage_clip")
    )


def grpo_estimator(top: Keys, scopes: tuple[str, str]) -> str:
    """Return the estimator of grpo with rewards that are normalized by these scopes.

    grpo of the original is the return of the normalized reward. This is group_norm unless rewards
    of single tokens, a discount, whitening or a bound come between normalization and return.
    """
    if top.value("reward_clip") and not clips_advantages(top):
        return "reinforce"
    is_plain = top.value("gamma") in (None, 1) and not any(
        top.value(key) is True for key in ("add_token_level_kl", "whiten_rewards")
    )
    return "group_norm" if is_plain and scopes == ("group", "group") else "reinforce"


def _has_binary_scores(domain: Any) -> bool:
    """Return True if the reward worker of a domain has no other scores than 0 and 1."""
    settings = cast("dict[str, Any]", domain) if isinstance(domain, dict) else {}
    worker = settings.get("worker_cls")
    return str(worker).rpartition(".")[2] in _BINARY_WORKERS
