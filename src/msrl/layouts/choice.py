"""The command `msrl plan`: the fastest layouts of a training as a table, and why none is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msrl.checks.validate import guess
from msrl.config.loader import Resolved
from msrl.config.sections.train import LoraConfig, TrainConfig
from msrl.errors import ManyErrors, MsrlError
from msrl.layouts.cost import Job, Lengths
from msrl.layouts.grpo import GrpoRequest, own_placement, placements
from msrl.layouts.profile import Profile
from msrl.layouts.responses import read_responses
from msrl.layouts.rollouts import ListedLengths
from msrl.layouts.search import KEYS, USABLE_MEMORY, Devices, Layout, Search
from msrl.memory.estimate import bytes_text
from msrl.memory.states import logits_bytes
from msrl.plan.run_plan import RunPlan, resolve
from msrl.platforms import get
from msrl.tracking.tables import table_lines

_COMMANDS = ("train-sft", "train-grpo")
_MORE_DEVICES = (2, 4, 8, 16)
_CAUSES = {
    "other operations": "norms, activations and logits move memory",
    "host": "kernels are too short to keep the device busy; a larger micro-batch helps",
    "recomputation": "the backward pass computes activations again, since they do not fit",
    "TP communication": "tensor-parallel ranks exchange the activations of every layer",
    "CP communication": "context-parallel ranks exchange keys, values or heads",
    "EP communication": "every token travels to its experts and back",
    "PP communication": "stages send the activations of every micro-batch",
    "pipeline bubbles": "stages wait for the first and last of few micro-batches",
    "DP communication": "copies exchange gradients and weights once per update",
    "optimizer": "the optimizer reads and writes its states",
    "log-probabilities": "passes without gradients precede the updates",
    "generation": "the ranks wait for the longest responses of the step",
    "weight transfer": "engines wait for new weights",
    "idle": "engines and ranks wait for each other",
}


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a user.

    `tokens` is the mean length of an example, or of a prompt in train-grpo, if it is set.
    `responses` names the lengths of responses (`responses.py`).
    """

    devices: Devices
    profile: Profile
    kept: tuple[str, ...] = ()
    number: int = 5
    tokens: int | None = None
    responses: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest layouts of a request, and that of the configuration if it is possible.

    `lengths` says what lengths were used.
    """

    request: Request
    command: str
    lengths: str
    layouts: Sequence[Layout]
    own: Layout | None
    limit: float  # bytes of a device


def parse_devices(text: str | None, resolved: Resolved) -> Devices:
    """Return the devices of `--devices`, 8 or 4x8, or else those of the configuration.

    Raises:
        MsrlError: The text has another form, or no devices are set.
    """
    cluster = resolved.config.cluster
    if text is None:
        if cluster.devices_per_node is None:
            raise MsrlError(
                "cluster.devices_per_node: missing. Set it and cluster.nodes, or use --devices, "
                "such as --devices 4x8 for 4 machines with 8 devices each."
            )
        return Devices(cluster.nodes, cluster.devices_per_node)
    words = text.split("x")
    if len(words) > 2 or not all(word.isascii() and word.isdigit() for word in words):
        raise MsrlError(f"--devices={text}: must be a number such as 8, or machines x devices: 4x8")
    sizes = [int(word) for word in words]
    if min(sizes) < 1:
        raise MsrlError(f"--devices={text}: must be positive")
    return Devices(1, sizes[0]) if len(sizes) == 1 else Devices(*sizes)


def choose(resolved: Resolved, request: Request) -> Choice:
    """Return the fastest layouts of a training.

    Raises:
        MsrlError: No layout fits, or the training or its lengths are not known.
        ManyErrors: The checks allow no layout.
    """
    command = guess(resolved)
    if command not in _COMMANDS:
        raise MsrlError(
            f"msrl plan: this configuration is for {command or 'no training'}; only "
            f"{' and '.join(_COMMANDS)} are planned."
        )
    return choose_for(resolved, resolve(resolved.config, command), request)


def choose_for(resolved: Resolved, plan: RunPlan, request: Request) -> Choice:
    """Return the fastest layouts of a training whose plan is known. Raises as `choose`."""
    for key in request.kept:
        if key not in KEYS:
            raise MsrlError(
                f"--keep={key}: not a key that is chosen. Choose from {', '.join(KEYS)}"
            )
    _check_profile(resolved, request)
    found = _find(resolved, plan, request)
    if not found.layouts:
        _refuse(resolved, plan, request, found.errors)
    limit = USABLE_MEMORY * request.profile.memory_bytes.value
    return Choice(request, plan.command, found.lengths, found.layouts, found.own, limit)


@dataclass(frozen=True, slots=True)
class _Found:
    """Layouts of a search, or the errors of the checks that allowed none."""

    lengths: str
    layouts: Sequence[Layout]
    own: Layout | None = None
    errors: Sequence[str] = ()


def _find(resolved: Resolved, plan: RunPlan, request: Request) -> _Found:
    return (_find_grpo if plan.has_engines else _find_sft)(resolved, plan, request)


def _find_sft(resolved: Resolved, plan: RunPlan, request: Request) -> _Found:
    lengths = _lengths(plan, request.tokens)
    search = _search(resolved, plan, request, lengths)
    layouts = search.best(request.number)
    text = (
        f"{lengths.row:,.0f} tokens per row, {lengths.sequence:,.0f} per sequence, {lengths.note}"
    )
    return _Found(text, layouts, search.own() if layouts else None, search.errors)


def _find_grpo(resolved: Resolved, plan: RunPlan, request: Request) -> _Found:
    prompt, note = _prompt_tokens(plan, request.tokens)
    limit = plan.rollout.max_response_tokens
    responses = read_responses(request.responses, limit, plan.samples_per_step)
    grpo = GrpoRequest(request.devices, request.profile, frozenset(request.kept), prompt, responses)
    layouts, errors = list[Layout](), list[str]()
    for searches in placements(resolved, plan, grpo):
        for search in searches:  # those with the fastest engines first
            own = search.best(request.number)
            layouts += own
            if own:
                break
            errors = search.search.errors or errors
    layouts.sort(key=lambda layout: layout.update.seconds)
    own = own_placement(resolved, plan, grpo)
    layout = own and own.search.own()
    return _Found(
        f"prompts {prompt:,.0f} tokens, {note}; responses {_response_text(responses)}",
        layouts[: request.number],
        own.timed(layout) if own and layout else None,
        errors,
    )


def _response_text(responses: ListedLengths) -> str:
    longest = max(responses.lengths)
    return f"{responses.mean:,.0f} on average and up to {longest:,}, {responses.name}"


def _prompt_tokens(plan: RunPlan, tokens: int | None) -> tuple[float, str]:
    """Return the mean length of prompts, and where it is from."""
    name = plan.data.train
    manifest = None if name is None else plan.datasets[name].manifest
    if tokens is not None:
        return float(tokens), "of --tokens"
    if manifest is not None and manifest.num_tokens:
        return manifest.num_tokens / manifest.num_rows, f"of {name}"
    return plan.rollout.max_prompt_tokens / 2, "assumed: half of rollout.max_prompt_tokens"


def _check_profile(resolved: Resolved, request: Request) -> None:
    """Raise MsrlError if the profile cannot describe the devices of the request."""
    platform = resolved.config.cluster.platform
    if platform not in ("auto", request.profile.platform):
        raise MsrlError(
            resolved.mistake(
                "cluster.platform", f"the profile is of {request.profile.platform} devices"
            )
        )
    if request.devices.nodes > 1 and request.profile.network_bytes_per_s is None:
        raise MsrlError(
            f"--devices={request.devices}: the profile {request.profile.title} has no "
            "network_bytes_per_s. Add it to the profile, since one machine cannot measure it."
        )


def _search(resolved: Resolved, plan: RunPlan, request: Request, lengths: Lengths) -> Search:
    device = get(request.profile.platform)
    job = Job(
        shape=plan.shape,
        profile=request.profile,
        lengths=lengths,
        dtype=plan.dtype,
        logits_bytes=logits_bytes(plan),
        world_size=request.devices.total,
        devices_per_node=request.devices.per_node,
        rows=plan.train.global_batch,
        overlaps=device.overlap_communication,
        is_queued=not device.shares_main_memory,
    )
    return Search(resolved, plan, job, request.devices, frozenset(request.kept))


def _lengths(plan: RunPlan, tokens: int | None) -> Lengths:
    """Return the mean lengths: of `--tokens`, of preprocessed data, or of rows that are full.

    Raises:
        MsrlError: Nothing tells the length of a row.
    """
    name, limit = plan.data.train, plan.data.seq_length
    manifest = None if name is None else plan.datasets[name].manifest
    if tokens is not None:
        row = float(limit) if limit is not None and plan.data.pack else float(tokens)
        return Lengths(row, min(float(tokens), row), 1.0, "of --tokens")
    if manifest is not None and manifest.num_tokens:
        row = manifest.num_tokens / manifest.num_rows
        sequence = manifest.num_tokens / max(manifest.num_examples, manifest.num_rows)
        share = manifest.num_loss_tokens / manifest.num_tokens
        return Lengths(row, sequence, share, f"of {name}")
    if limit is None:
        raise MsrlError(
            "data.seq_length: missing. Set it, preprocess data.train, or use --tokens, since the "
            "time depends on the length of rows."
        )
    return Lengths(limit, limit, 1.0, "assumed: every row is one sequence of data.seq_length")


def _refuse(resolved: Resolved, plan: RunPlan, request: Request, errors: Sequence[str]) -> None:
    """Raise the reason why there is no layout, and what would make one possible."""
    if errors:
        raise ManyErrors([f"no layout of {request.devices} devices passes the checks", *errors])
    memory = f"{request.profile.memory_bytes.value / 1e9:g} GB"
    usable = bytes_text(int(USABLE_MEMORY * request.profile.memory_bytes.value))
    raise MsrlError(
        f"memory: no layout fits {request.devices} devices of {memory}, of which {usable} may be "
        f"used. {_remedies(resolved, plan, request)}"
    )


def _remedies(resolved: Resolved, plan: RunPlan, request: Request) -> str:
    """Return the changes that make a layout possible, each of which was searched for."""

    def fits(changed: Resolved, other: Request) -> bool:
        own = resolve(changed.config, plan.command)
        return bool(_find(changed, own, replace(other, number=1)).layouts)

    def with_train(**changes: object) -> Resolved:
        train = plan.train.model_copy(update=changes)
        return replace(resolved, config=resolved.config.model_copy(update={"train": train}))

    remedies: list[str] = []
    if request.kept and fits(resolved, replace(request, kept=())):
        remedies.append(f"other values of {', '.join(request.kept)}")
    train = plan.train
    if train.lora.rank is None and not train.freeze:
        if fits(with_train(lora=LoraConfig(rank=16)), request):
            remedies.append("LoRA (train.lora.rank=16)")
        if not train.offload.optimizer:
            offload = train.offload.model_copy(update={"optimizer": True})
            if fits(with_train(offload=offload), request):
                remedies.append("train.offload.optimizer=true")
    for factor in _MORE_DEVICES:
        devices = Devices(request.devices.nodes * factor, request.devices.per_node)
        if fits(resolved, replace(request, devices=devices)):
            remedies.append(f"{devices} devices")
            break
    if not remedies:
        return f"{_MORE_DEVICES[-1]} times as many devices are not enough either."
    return f"Possible with: {', or '.join(remedies)}."


# Text


def lines(choice: Choice) -> Iterator[str]:
    """Yield the lines of the table."""
    request, profile = choice.request, choice.request.profile
    origin = "measured" if profile.is_measured else "published figures, not measured"
    yield f"devices: {request.devices} of {profile.title} ({origin})"
    yield f"lengths: {choice.lengths}"
    yield f"memory: at most {bytes_text(int(choice.limit))} of a device"
    if choice.command != "train-sft":
        yield "not counted: rewards, environments, critics, filters"
    yield "predicted, not run: compare the layouts, and measure the first ones"
    yield ""
    layouts = [*choice.layouts]
    if choice.own is not None and choice.own.train not in [layout.train for layout in layouts]:
        layouts.append(choice.own)
    names = [str(number + 1) for number in range(len(choice.layouts))]
    names += ["file"] * (len(layouts) - len(names))
    rows = [_row(name, layout, choice) for name, layout in zip(names, layouts, strict=True)]
    engines = () if layouts[0].engines is None else ("ranks", "engines", "engines idle")
    times = ("memory", "s/step", "tokens/s/device")
    yield from table_lines([("", "layout", "micro-batch", "recompute", *engines, *times), *rows])
    yield ""
    if choice.own is None:
        yield "The layout of the configuration is not legal on these devices, or does not fit."
        yield ""
    yield "seconds per step"
    parts = [name for name in layouts[0].update.parts if any(_matters(name, x) for x in layouts)]
    yield from table_lines(
        [
            ("", *names),
            *((part, *(f"{x.update.parts[part]:.3g}" for x in layouts)) for part in parts),
        ]
    )
    yield ""
    for name, layout in zip(names, layouts, strict=True):
        yield f"{name}: {_reason(layout, choice.limit)}"


def _matters(part: str, layout: Layout) -> bool:
    """Return True for a part of at least a thousandth of the step."""
    return layout.update.parts[part] >= 1e-3 * layout.update.seconds


def layout_text(train: TrainConfig) -> str:
    """Return the sizes of a layout, without those that are 1."""
    parallel = train.parallel
    sizes = {name.upper(): getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
    texts = [f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)]
    if parallel.cp > 1:
        texts.append(parallel.cp_algo)
    if parallel.etp is not None and parallel.etp != parallel.tp:
        texts.append(f"ETP {parallel.etp}")
    return ", ".join(texts) or "DP only"


def _row(name: str, layout: Layout, choice: Choice) -> tuple[str, ...]:
    train, update = layout.train, layout.update
    rate = update.tokens / update.seconds / choice.request.devices.total
    limit = train.max_tokens_per_micro_batch
    micro_batch = f"{train.micro_batch}" if limit is None else f"{limit} tokens"
    engines = (
        ()
        if layout.engines is None
        else (str(layout.devices), str(layout.engines), f"{layout.engine_idle:.0%}")
    )
    return (
        *(name, layout_text(train), micro_batch, train.recompute.granularity, *engines),
        *(bytes_text(layout.memory.peak), f"{update.seconds:.4g}", f"{rate:,.0f}"),
    )


def _reason(layout: Layout, limit: float) -> str:
    """Return a sentence on what costs the most time besides products and attention."""
    update = layout.update
    costs = {name: update.parts.get(name, 0.0) for name in _CAUSES}
    name = max(costs, key=costs.__getitem__)
    share = costs[name] / update.seconds
    text = f"{name}: {share:.0%} of the step, because {_CAUSES[name]}."
    if layout.memory.peak > limit:
        return f"does not fit. {text}"
    return text


def changed_keys(choice: Choice) -> dict[str, object]:
    """Return the sections of a configuration with the keys of the fastest layout."""
    layout = choice.layouts[0]
    train, devices = layout.train, layout.devices or choice.request.devices
    changed: dict[str, object] = {"parallel": train.parallel.model_dump(mode="json")}
    changed["recompute"] = train.recompute.model_dump(mode="json")
    if train.max_tokens_per_micro_batch is None:
        changed["micro_batch"] = train.micro_batch
    cluster: dict[str, object] = {"nodes": devices.nodes, "devices_per_node": devices.per_node}
    sections: dict[str, object] = {"cluster": cluster, "train": changed}
    if layout.engines is not None:
        separate = layout.engines.devices if layout.engines.is_separate else None
        cluster["roles"] = {"rollout": {"devices": separate}}
        sections["rollout"] = {"engine": {"tp": layout.engines.tp}}
    return sections
