"""Drawings of the first page and of the page on concepts, as SVG.

Every drawing has an opaque background: it is legible on light and dark pages, also where the page
has another theme than the system, whose theme the drawing follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

INK, LINE, PAPER = "#1f2933", "#52606d", "#fbfcfd"
BLUE, GREEN, ORANGE, VIOLET, GRAY = "#dbeafe", "#dcfce7", "#ffedd5", "#ede9fe", "#eef1f4"
DARK_INK, DARK_LINE, DARK_PAPER = "#e4e7eb", "#9aa5b1", "#1a1c1e"
DARK_FILLS = {
    BLUE: "#1e3a5f",
    GREEN: "#14432a",
    ORANGE: "#5a3210",
    VIOLET: "#3b2a63",
    GRAY: "#2b3036",
}
FONT = "system-ui, 'Noto Sans', 'Noto Sans SC', sans-serif"
_SIZE = 13  # of texts, in pixels
_WIDEST, _WIDEST_BOLD = 7.6, 8.3  # average width of a character in a wide font of this size
MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
)

TRAININGS = {
    "train-sft": "imitate answers",
    "train-dpo": "learn preferences",
    "train-rm": "score answers",
    "train-grpo": "learn from rewards",
    "train-distill": "learn from teachers",
}


def _dark_style() -> str:
    """Return the rules that replace the colors of a drawing on dark screens."""
    fills = [f'[fill="{light}"]{{fill:{dark}}}' for light, dark in DARK_FILLS.items()]
    rules = [
        f"svg{{fill:{DARK_INK}}}",
        f"svg>rect:first-of-type{{fill:{DARK_PAPER};stroke:{DARK_LINE}}}",
        f"[stroke]{{stroke:{DARK_LINE}}}marker path{{fill:{DARK_LINE}}}",
        *fills,
    ]
    return f"<style>@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


@dataclass
class Drawing:
    """Boxes, arrows and texts on a canvas, in pixels."""

    width: int
    height: int
    title: str
    elements: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, w: int, h: int, *lines: str, fill: str = GRAY) -> None:
        """Draw a box with centered lines of text, the first of them bold."""
        shape = f'x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{LINE}"'
        self.elements.append(f"<rect {shape}/>")
        top = y + h / 2 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            y_of_line = round(top + 16 * number) + 4
            self.text(x + w // 2, y_of_line, line, is_bold=number == 0, room=w - 12)

    def text(
        self,
        x: int,
        y: int,
        line: str,
        *,
        is_bold: bool = False,
        anchor: str = "middle",
        room: int | None = None,
    ) -> None:
        """Draw one line of text around, from or up to a point, in at most `room` pixels."""
        weight = ' font-weight="600"' if is_bold else ""
        # Fonts differ: a text that is too wide in one of them is smaller.
        width = (_WIDEST_BOLD if is_bold else _WIDEST) * len(line)
        is_wide = room is not None and width > room
        fitted = f' font-size="{_SIZE * room / width:.1f}"' if is_wide else ""
        position = f'x="{x}" y="{y}" text-anchor="{anchor}"{weight}{fitted}'
        self.elements.append(f"<text {position}>{escape(line)}</text>")

    def arrow(
        self, *points: tuple[int, int], label: str = "", at: tuple[int, int] = (0, 0)
    ) -> None:
        """Draw an arrow through points, with a label at a point."""
        path = " ".join(f"{x},{y}" for x, y in points)
        style = f'fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#head)"'
        self.elements.append(f'<polyline points="{path}" {style}/>')
        if label:
            self.text(*at, label)

    def svg(self) -> str:
        """Return the drawing as an SVG file."""
        size = (
            f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}" '
            f'font-size="{_SIZE}" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f"<defs>{MARKER}{_dark_style()}</defs>",
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}" stroke="#cbd2d9"/>',
            *self.elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def pipeline() -> Drawing:
    """Return the commands from a model to a better model, with their files."""
    drawing = Drawing(860, 300, "Commands of msrl and the files between them")
    drawing.box(20, 30, 160, 60, "model", "folder or hub name", fill=BLUE)
    drawing.box(20, 210, 160, 60, "rows", "JSON, CSV, Parquet", fill=BLUE)
    drawing.box(225, 30, 165, 60, "msrl convert-ckpt", "to Megatron's files", fill=GREEN)
    drawing.box(225, 210, 165, 60, "msrl preprocess", "tokens, loss masks", fill=GREEN)
    drawing.box(435, 12, 195, 276)
    for row, (name, purpose) in enumerate(TRAININGS.items()):
        drawing.box(447, 22 + 52 * row, 171, 46, f"msrl {name}", purpose, fill=GREEN)
    drawing.box(680, 25, 165, 70, "msrl generate, chat", "serve, eval", fill=GREEN)
    drawing.box(680, 120, 165, 60, "run folder", "checkpoints, metrics", fill=VIOLET)
    drawing.box(680, 205, 165, 70, "msrl view, report", "diagnose", fill=GREEN)
    drawing.arrow((180, 60), (225, 60))
    drawing.arrow((180, 240), (225, 240))
    drawing.arrow((390, 60), (435, 60))
    drawing.arrow((390, 240), (435, 240))
    drawing.arrow((630, 140), (680, 140))
    drawing.arrow((680, 160), (630, 160), label="next", at=(656, 178))
    drawing.arrow((762, 120), (762, 95))
    drawing.arrow((762, 180), (762, 205))
    return drawing


def formats() -> Drawing:
    """Return the checkpoint formats and the commands between them."""
    drawing = Drawing(860, 250, "Checkpoint formats and the conversions between them")
    files = ("Hugging Face folder", "config.json, tokenizer", "model-*.safetensors")
    drawing.box(20, 85, 190, 76, *files, fill=BLUE)
    files = ("Megatron, one file per rank", "mp_rank_TT_PPP_EEE/", "model_optim_rng.pt (MindSpeed)")
    drawing.box(335, 20, 230, 76, *files, fill=GREEN)
    files = ("Megatron, distributed", "__0_0.distcp, .metadata", "loads with any layout")
    drawing.box(335, 150, 230, 76, *files, fill=GREEN)
    drawing.box(
        680, 85, 160, 76, "training", "train-sft, train-grpo", "reads all formats", fill=VIOLET
    )
    drawing.arrow((210, 105), (335, 60), label="hf2mcore", at=(262, 68))
    drawing.arrow((210, 145), (335, 190), label="hf2mcore --format dist", at=(235, 200))
    drawing.arrow((335, 85), (210, 125), label="mcore2hf", at=(300, 118))
    drawing.arrow((450, 96), (450, 150), label="reshard", at=(480, 128))
    drawing.arrow((420, 150), (420, 96))
    drawing.arrow((565, 60), (680, 105))
    drawing.arrow((565, 190), (680, 145))
    return drawing


def layouts() -> Drawing:
    """Return how eight devices are divided by TP 2, PP 2 and DP 2."""
    drawing = Drawing(860, 290, "Eight devices with TP 2, PP 2 and DP 2")
    for replica in range(2):
        left = 110 + 380 * replica
        drawing.text(
            left + 170, 30, f"replica {replica} (DP {replica}): its own micro-batches", is_bold=True
        )
        for stage in range(2):
            top = 60 + 110 * stage
            fill = (BLUE, GREEN)[stage]
            for shard in range(2):
                rank = 4 * stage + 2 * replica + shard
                layers = ("layers 1 to 16", "layers 17 to 32")[stage]
                lines = (f"device {rank}", layers, f"shard {shard} of every matrix")
                drawing.box(left + 175 * shard, top, 165, 70, *lines, fill=fill)
        drawing.arrow(
            (left + 170, 132), (left + 170, 168), label="activations", at=(left + 215, 155)
        )
    drawing.text(16, 99, "PP stage 0", anchor="start", is_bold=True)
    drawing.text(16, 209, "PP stage 1", anchor="start", is_bold=True)
    drawing.text(
        430,
        262,
        "TP: the devices of a row of a replica compute the same tokens with parts of each matrix.",
    )
    drawing.text(
        430,
        280,
        "DP: gradients are summed over replicas, which share the optimizer's state.",
    )
    return drawing


def rl_loop() -> Drawing:
    """Return one step of train-grpo."""
    drawing = Drawing(860, 300, "One step of train-grpo")
    drawing.box(20, 40, 150, 60, "prompts", "prompts_per_step", fill=BLUE)
    drawing.box(230, 40, 170, 60, "1 generate (vLLM)", "samples_per_prompt each", fill=GREEN)
    drawing.box(460, 40, 170, 60, "2 score", "reward sources, weighted", fill=ORANGE)
    drawing.box(680, 40, 160, 60, "3 advantages", "within each group", fill=VIOLET)
    drawing.box(
        680, 190, 160, 70, "4 log-probabilities", "policy, reference", "of the trainer", fill=GREEN
    )
    drawing.box(
        400,
        190,
        220,
        70,
        "5 update (Megatron)",
        "samples_per_update, in",
        "micro-batches, over DP",
        fill=GREEN,
    )
    drawing.box(150, 190, 190, 70, "6 transfer the weights", "to the engines, verified", fill=GRAY)
    drawing.arrow((170, 70), (230, 70))
    drawing.arrow((400, 70), (460, 70))
    drawing.arrow((630, 70), (680, 70))
    drawing.arrow((760, 100), (760, 190))
    drawing.arrow((680, 225), (620, 225))
    drawing.arrow((400, 225), (340, 225))
    drawing.arrow(
        (245, 190), (245, 145), (315, 145), (315, 100), label="new policy version", at=(400, 142)
    )
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "pipeline.svg": pipeline,
    "formats.svg": formats,
    "layouts.svg": layouts,
    "rl-loop.svg": rl_loop,
}


def drawings() -> dict[str, str]:
    """Return all drawings by file name."""
    return {name: draw().svg() for name, draw in DRAWINGS.items()}
