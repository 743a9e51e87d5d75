"""The command `msrl plan`: the fastest layouts of a training as a table, and why none is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msrl.checks.validate import guess
from msrl.config.loader import Resolved
from msrl.config.sections.train import LoraConfig, TrainConfig
from msrl.errors import ManyErrors, MsrlError
from msrl.layouts.cost import Job, Lengths
from msrl.layouts.profile import Profile
from msrl.layouts.search import KEYS, Devices, Layout, Search
from msrl.memory.estimate import bytes_text
from msrl.memory.states import logits_bytes
from msrl.plan.run_plan import RunPlan, resolve
from msrl.platforms import get
from msrl.tracking.tables import table_lines

_COMMAND = "train-sft"
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
}


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a user. `tokens` is the mean length of an example, if it is set."""

    devices: Devices
    profile: Profile
    kept: tuple[str, ...] = ()
    number: int = 5
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest layouts of a request, and that of the configuration if it is possible."""

    request: Request
    lengths: Lengths
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
    if command != _COMMAND:
        raise MsrlError(
            f"msrl plan: this configuration is for {command or 'no training'}; only {_COMMAND} is "
            "planned so far."
        )
    for key in request.kept:
        if key not in KEYS:
            raise MsrlError(
                f"--keep={key}: not a key that is chosen. Choose from {', '.join(KEYS)}"
            )
    plan = resolve(resolved.config, command)
    lengths = _lengths(plan, request.tokens)
    search = _search(resolved, plan, request, lengths)
    layouts = search.best(request.number)
    if not layouts:
        _refuse(resolved, plan, request, lengths, search)
    return Choice(request, lengths, layouts, search.own(), search.limit)


def _search(resolved: Resolved, plan: RunPlan, request: Request, lengths: Lengths) -> Search:
    platform = resolved.config.cluster.platform
    if platform not in ("auto", request.profile.platform):
        raise MsrlError(
            resolved.mistake(
                "cluster.platform", f"the profile is of {request.profile.platform} devices"
            )
        )
    job = Job(
        shape=plan.shape,
        profile=request.profile,
        lengths=lengths,
        dtype=plan.dtype,
        logits_bytes=logits_bytes(plan),
        world_size=request.devices.total,
        devices_per_node=request.devices.per_node,
        rows=plan.train.global_batch,
        overlaps=get(request.profile.platform).overlap_communication,
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


def _refuse(
    resolved: Resolved, plan: RunPlan, request: Request, lengths: Lengths, search: Search
) -> None:
    """Raise the reason why there is no layout, and what would make one possible."""
    if search.errors:
        raise ManyErrors(
            [f"no layout of {request.devices} devices passes the checks", *search.errors]
        )
    memory = f"{request.profile.memory_bytes.value / 1e9:g} GB"
    raise MsrlError(
        f"memory: no layout fits {request.devices} devices of {memory}, of which "
        f"{bytes_text(int(search.limit))} may be used. "
        f"{_remedies(resolved, plan, request, lengths)}"
    )


def _remedies(resolved: Resolved, plan: RunPlan, request: Request, lengths: Lengths) -> str:
    """Return the changes that make a layout possible, each of which was searched for."""

    def fits(changed: Resolved, other: Request) -> bool:
        own = resolve(changed.config, _COMMAND)
        return bool(_search(changed, own, other, lengths).best(1))

    remedies: list[str] = []
    if request.kept and fits(resolved, replace(request, kept=())):
        remedies.append("no --keep")
    train = plan.train
    if train.lora.rank is None and not train.freeze:
        adapted = train.model_copy(update={"lora": LoraConfig(rank=16)})
        config = resolved.config.model_copy(update={"train": adapted})
        if fits(replace(resolved, config=config), request):
            remedies.append("LoRA (train.lora.rank=16)")
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
    lengths = choice.lengths
    yield f"devices: {request.devices} of {profile.title} ({origin})"
    yield (
        f"lengths: {lengths.row:,.0f} tokens per row, {lengths.sequence:,.0f} per sequence, "
        f"{lengths.note}"
    )
    yield f"memory: at most {bytes_text(int(choice.limit))} of a device"
    yield "predicted, not run: compare the layouts, and measure the first ones"
    yield ""
    layouts = [*choice.layouts]
    if choice.own is not None and choice.own.train not in [layout.train for layout in layouts]:
        layouts.append(choice.own)
    names = [str(number + 1) for number in range(len(choice.layouts))]
    names += ["file"] * (len(layouts) - len(names))
    rows = [_row(name, layout, choice) for name, layout in zip(names, layouts, strict=True)]
    head = ("", "layout", "micro-batch", "recompute", "memory", "s/step", "tokens/s/device")
    yield from table_lines([head, *rows])
    yield ""
    if choice.own is None:
        yield "The layout of the configuration is not legal on these devices, or does not fit."
        yield ""
    yield "seconds per step"
    parts = [name for name in layouts[0].update.parts if any(x.update.parts[name] for x in layouts)]
    yield from table_lines(
        [
            ("", *names),
            *((part, *(f"{x.update.parts[part]:.2f}" for x in layouts)) for part in parts),
        ]
    )
    yield ""
    for name, layout in zip(names, layouts, strict=True):
        yield f"{name}: {_reason(layout, choice.limit)}"


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
    return (
        *(name, layout_text(train), micro_batch, train.recompute.granularity),
        *(bytes_text(layout.memory.peak), f"{update.seconds:.2f}", f"{rate:,.0f}"),
    )


def _reason(layout: Layout, limit: float) -> str:
    """Return a sentence on what costs the most time besides products and attention."""
    update = layout.update
    costs = {name: update.parts[name] for name in _CAUSES}
    name = max(costs, key=costs.__getitem__)
    share = costs[name] / update.seconds
    text = f"{name}: {share:.0%} of the step, because {_CAUSES[name]}."
    if layout.memory.peak > limit:
        return f"does not fit. {text}"
    return text


def changed_keys(choice: Choice) -> dict[str, object]:
    """Return the sections of a configuration with the keys of the fastest layout."""
    train, devices = choice.layouts[0].train, choice.request.devices
    parallel = train.parallel.model_dump(mode="json")
    changed: dict[str, object] = {"parallel": parallel}
    changed["recompute"] = train.recompute.model_dump(mode="json")
    if train.max_tokens_per_micro_batch is None:
        changed["micro_batch"] = train.micro_batch
    return {
        "cluster": {"nodes": devices.nodes, "devices_per_node": devices.per_node},
        "train": changed,
    }
