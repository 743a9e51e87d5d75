"""msrl plan: the fastest parallel layouts of a training, before any device is requested."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from msrl.cli.execute import resolve
from msrl.cli.help import examples
from msrl.cli.options import APPROXIMATE, CONFIG, CONFIG_NAME, SETS, option, takes
from msrl.limits import printable

EXAMPLES = examples(
    "msrl plan -c sft.yaml --devices 4x8 --profile ascend-a2",
    "msrl plan -c sft.yaml --profile h100 --write layout.yaml",
    "msrl plan -c grpo.yaml --devices 2x8 --profile h200 --responses runs/grpo",
)


Profile = Annotated[
    str,
    option(
        "--profile",
        metavar="NAME|FILE",
        help="Profile of the devices: a100, h100, h200, gb200, ascend-a2, ascend-a3, or a YAML "
        "file (docs/planning.md). Required.",
    ),
]
DeviceCount = Annotated[
    str | None,
    option(
        "--devices",
        metavar="N|MxN",
        help="Devices, or machines x devices of each. "
        "Default: cluster.nodes x cluster.devices_per_node.",
    ),
]
Tokens = Annotated[
    int | None,
    option(
        "--tokens",
        metavar="N",
        min=1,
        help="Mean length of an example, or of a prompt in train-grpo, in tokens. Default: that "
        "of preprocessed data, or else data.seq_length or half of rollout.max_prompt_tokens.",
    ),
]
Responses = Annotated[
    str | None,
    option(
        "--responses",
        metavar="N|FILE|RUN",
        help="Lengths of responses in tokens: their mean, a file with one length per line, or the "
        "folder of a run. Default: an assumption, which the output says.",
    ),
]
Keep = Annotated[
    list[str] | None,
    option(
        "--keep",
        metavar="KEY",
        help="Key whose value in the configuration holds for all layouts, as in "
        "train.parallel.tp. Repeatable.",
    ),
]
Number = Annotated[int, option("--number", metavar="N", min=1, help="Number of layouts to print.")]
Write = Annotated[
    str | None,
    option(
        "--write",
        metavar="FILE",
        help="YAML file to write with the keys of the fastest layout, to be given after the "
        "configuration.",
    ),
]


@takes(CONFIG, CONFIG_NAME, SETS, APPROXIMATE)
def plan(
    ctx: typer.Context,
    profile: Profile,
    devices: DeviceCount = None,
    tokens: Tokens = None,
    responses: Responses = None,
    keep: Keep = None,
    number: Number = 5,
    write: Write = None,
) -> None:
    """Predict the fastest layouts of a train-sft or train-grpo run that fit some devices.

    Nothing is started, and no device is needed.
    """
    from pathlib import Path

    import yaml

    from msrl.errors import MsrlError
    from msrl.files import write_text
    from msrl.layouts.choice import Request, changed_keys, choose, lines, parse_devices
    from msrl.layouts.profile import read_profile

    if write is not None and Path(write).exists():
        raise MsrlError(f"--write={write}: exists already. Name another file.")
    resolved = resolve(ctx)
    request = Request(
        parse_devices(devices, resolved),
        read_profile(profile),
        tuple(keep or ()),
        number,
        tokens,
        responses,
    )
    choice = choose(resolved, request)
    typer.echo(printable("\n".join(lines(choice))))
    if write is not None:
        write_text(Path(write), yaml.safe_dump(changed_keys(choice), sort_keys=False))
        files: list[str] = [*(ctx.params.get("config") or []), write]
        named = shlex.join(word for file in files for word in ("-c", file))
        typer.echo(printable(f"next: msrl {choice.command} {named} --dry-run"))
