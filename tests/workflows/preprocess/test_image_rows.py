"""Rows with images: forms of rows, files of the dataset, and rows that are refused."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from families import QWEN2_5_VL
from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset, SftDataset
from msrl.data.image_prompts import image_prompt
from msrl.data.integrity import refuse_damaged
from msrl.data.manifest import all_paths, fingerprint, read_manifest
from msrl.data.preferences import PreferenceDataset
from msrl.data.render import make_renderer
from msrl.data.rows.turns import read_messages
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation, DatasetManifest, Message
from msrl.vision import pixels
from msrl.vision.settings import from_json, read_vision_settings
from msrl.workflows import preprocess as workflow
from msrl.workflows.preprocess import check, run
from msrl.workflows.row_images import model_images
from msrl.workflows.sft.rows import open_rows
from msrl.workflows.training.data_checks import check_data
from support import assert_mentions, mentions
from test_train_from_rows import plan, prefix_of
from tiny_qwen2 import make_tokenizer
from vision_folders import (
    CONFIG,
    PROCESSOR,
    encoded,
    make_vision_tokenizer,
    picture,
    write_folder,
    write_vision_model,
)

IMAGE_TOKEN = 6
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
RED = encoded(picture(120, 90, seed=1), "PNG")  # 4 x 3 squares: 12 tokens
BLUE = encoded(picture(60, 200, seed=2), "JPEG", quality=90)  # 2 x 7 squares: 14 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model") / "vl")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "blue.jpg").write_bytes(BLUE)
    return tmp_path


def preprocess(folder: Path, model: Path, rows: list[Any], **keys: Any) -> DatasetManifest:
    """Preprocess rows to the prefix `x`, or `output_prefix`, in a folder."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "input": [str(file)],
        "tokenizer": str(model),
        "handler": "auto",
        "template": "native",
        "output_prefix": str(folder / "x"),
        "overwrite": True,
        **keys,
    }
    manifest = run(Config.model_validate({"preprocess": values}, strict=False))
    assert manifest is not None
    return manifest


def url(data: bytes, form: str = "png") -> str:
    return f"data:image/{form};base64,{base64.b64encode(data).decode()}"


def question(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


ANSWER = {"role": "assistant", "content": "a red one"}
TEXT = "<image>What is it? And <image>this?"
AROUND = {"type": "text", "text": "What is it? And "}, {"type": "text", "text": "this?"}
FORMS = {
    "content parts": {
        "messages": [
            question(
                {"type": "image", "image": "red.png"},
                AROUND[0],
                {"type": "image", "image": "sub/blue.jpg"},
                AROUND[1],
            ),
            ANSWER,
        ]
    },
    "image_url with data URLs": {
        "messages": [
            question(
                {"type": "image_url", "image_url": {"url": url(RED), "detail": "high"}},
                AROUND[0],
                {"type": "image_url", "image_url": url(BLUE, "jpeg")},
                AROUND[1],
            ),
            ANSWER,
        ]
    },
    "parts with a column": {
        "images": ["red.png", "sub/blue.jpg"],
        "messages": [
            question({"type": "image"}, AROUND[0], {"type": "image"}, AROUND[1]),
            ANSWER,
        ],
    },
    "Anthropic's blocks": {
        "messages": [
            question(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                             "data": base64.b64encode(RED).decode()}},
                AROUND[0],
                {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg",
                                             "data": base64.b64encode(BLUE).decode()}},
                AROUND[1],
            ),
            ANSWER,
        ]
    },
    "ms-swift": {
        "messages": [{"role": "user", "content": TEXT}, ANSWER],
        "images": ["red.png", "sub/blue.jpg"],
    },
    "LLaMA-Factory": {
        "instruction": "<image>What is it? And <image>this?",
        "output": "a red one",
        "images": ["red.png", "sub/blue.jpg"],
    },
    "LLaVA": {
        "id": "1",
        "image": ["red.png", "sub/blue.jpg"],
        "conversations": [
            {"from": "human", "value": TEXT},
            {"from": "gpt", "value": "a red one"},
        ],
    },
    "geo3k": {
        "images": [{"path": "red.png"}, {"path": "sub/blue.jpg", "bytes": None}],
        "problem": TEXT,
        "answer": "a red one",
    },
    "ROLL": {
        "images": [url(RED), url(BLUE, "jpeg")],
        "messages": [
            {"role": "user", "content": f"{MARK}What is it? And {MARK}this?"},
            ANSWER,
        ],
    },
    "transformers": {
        "messages": [
            question(
                {"type": "image", "base64": base64.b64encode(RED).decode()},
                AROUND[0],
                {"type": "image", "url": "file:///FOLDER/sub/blue.jpg"},
                AROUND[1],
            ),
            ANSWER,
        ]
    },
}  # fmt: skip


def files(prefix: Path) -> dict[str, bytes]:
    """Return the files of a dataset but its manifest, by the end of their name."""
    paths = [path for path in all_paths(str(prefix)) if path.is_file()]
    assert paths
    names = {path.name.removeprefix(prefix.name): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if "manifest" not in name}


@pytest.mark.sample(1)
@pytest.mark.parametrize("template", ["native", "qwen"])
def test_ten_forms_of_a_row_give_the_same_bytes(pictures: Path, model: Path, template: str):
    results: dict[str, dict[str, bytes]] = {}
    for number, (name, row) in enumerate(FORMS.items()):
        row = json.loads(json.dumps(row).replace("/FOLDER", str(pictures)))
        prefix = pictures / f"x{number}"
        preprocess(pictures, model, [row], output_prefix=str(prefix), template=template)
        results[name] = files(prefix)
    parquet = pictures / "rows.parquet"
    images = [{"path": None, "bytes": RED}, {"path": "b.jpg", "bytes": BLUE}]
    write_parquet(parquet, [{**FORMS["geo3k"], "images": images}])
    preprocess(
        pictures, model, [], input=[str(parquet)], output_prefix=str(pictures / "y"),
        template=template,
    )  # fmt: skip
    results["bytes in Parquet"] = files(pictures / "y")
    first = results["content parts"]
    assert len(results) == 11 and len(first) == 11
    for name, found in results.items():
        assert found == first, name


def write_parquet(path: Path, rows: list[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def test_a_row_has_its_tokens_and_each_picture_is_stored_once(pictures: Path, model: Path):
    text_row = {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}
    rows = [FORMS["ms-swift"], text_row, FORMS["LLaVA"], FORMS["content parts"]]
    manifest = preprocess(pictures, model, rows)
    dataset = SftDataset(pictures / "x")
    assert manifest.vision["num_images"] == 2 and manifest.vision["num_sequences"] == 3
    assert from_json(manifest.vision) == read_vision_settings(model)
    assert manifest.vision["pillow"]
    (example,), (text,), *_ = dataset
    assert text.images == ()
    hf = make_vision_tokenizer()
    parts = json.loads(json.dumps(FORMS["content parts"]["messages"]))
    plain = hf.apply_chat_template(parts, tokenize=False)
    red, blue = (f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (12, 14))
    expected = plain.replace(MARK, red, 1).replace(MARK, blue, 1)
    assert hf.decode(example.token_ids) == expected
    assert example.token_ids.tolist() == hf.encode(expected, add_special_tokens=False)
    assert not example.loss_mask[example.token_ids == IMAGE_TOKEN].any()
    assert [(placed.image.data, placed.image.grid) for placed in example.images] == [
        (RED, (1, 6, 8)),
        (BLUE, (1, 14, 4)),
    ]
    assert [placed.image.key for placed in example.images] == [
        hashlib.sha256(data).hexdigest() for data in (RED, BLUE)
    ]
    for placed, count in zip(example.images, (12, 14), strict=True):
        ids = example.token_ids[placed.offset - 1 : placed.offset + count + 1].tolist()
        assert ids == [3, *[IMAGE_TOKEN] * count, 4]


def test_prompts_and_pairs_have_images(pictures: Path, model: Path):
    preprocess(pictures, model, [FORMS["geo3k"], {"problem": "1+1", "answer": "2"}], kind="prompts")
    prompts = list(PromptDataset(pictures / "x"))
    assert [len(prompt.images) for prompt in prompts] == [2, 0]
    assert prompts[0].answer == "a red one" and "image" not in prompts[0].extra
    assert prompts[0].token_ids[prompts[0].images[1].offset] == IMAGE_TOKEN

    pair = {"prompt": TEXT, "chosen": "red", "rejected": "blue", "images": ["red.png", url(BLUE)]}
    text = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    preprocess(pictures, model, [text, pair, text], handler="pairs", template="qwen")
    pairs = PreferenceDataset(pictures / "x", "pairs")
    chosen, rejected = pairs[1].sides
    assert [placed.image.data for placed in chosen.images] == [RED, BLUE]
    assert chosen.images == rejected.images and not pairs[0].sides[0].images
    assert not pairs[2].sides[1].images


def test_packed_rows_have_the_images_of_their_examples(pictures: Path, model: Path):
    one = {"messages": [{"role": "user", "content": "See <image>"}, ANSWER], "image": "red.png"}
    text = {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}
    preprocess(pictures, model, [text, one, FORMS["ms-swift"]], pack=True, seq_length=300)
    examples = [example for row in SftDataset(pictures / "x") for example in row]
    found = {tuple(placed.image.data for placed in example.images) for example in examples}
    assert found == {(), (RED,), (RED, BLUE)}
    for example in examples:
        for placed in example.images:
            assert example.token_ids[placed.offset - 1 : placed.offset + 1].tolist() == [3, 6]


def test_truncation_drops_rows_that_it_would_cut_inside_an_image(pictures: Path, model: Path):
    late = message("x" * 105 + "<image>", images=["red.png"])
    early = message("<image>", images="red.png")
    early["messages"][1] = {"role": "assistant", "content": "y" * 200}
    keys = {"seq_length": 120, "too_long": "truncate"}
    manifest = preprocess(pictures, model, [late, early], **keys)
    assert manifest.dropped == {"image_too_long": 1}
    assert (manifest.truncated, manifest.num_examples) == (1, 1)
    ((example,),) = SftDataset(pictures / "x")
    assert len(example.token_ids) == 120 and len(example.images) == 1


@pytest.mark.parametrize("template", ["native", "qwen"])
def test_names_of_tokens_beside_an_image_stay_text(pictures: Path, model: Path, template: str):
    text = "Is <|image_pad|> or <|im_end|> in <image>?"
    preprocess(pictures, model, [message(text, images=["red.png"])], template=template)
    ((example,),) = SftDataset(pictures / "x")
    assert np.count_nonzero(example.token_ids == IMAGE_TOKEN) == 12
    decoded = make_vision_tokenizer().decode(example.token_ids)
    assert text.partition("<image>")[0] in decoded and len(example.images) == 1


@pytest.mark.parametrize("template", ["native", "qwen"])
def test_a_prompt_for_an_engine_has_the_tokens_and_images_of_its_row(
    pictures: Path, model: Path, template: str
):
    preprocess(pictures, model, [FORMS["geo3k"]], kind="prompts", template=template)
    (expected,) = PromptDataset(pictures / "x")
    tokenizer = open_tokenizer(model)
    renderer = make_renderer(load_template(template), tokenizer)
    conversation = Conversation(read_messages(FORMS["content parts"]["messages"][:1]))
    token_ids, images = image_prompt(renderer, model_images(tokenizer), conversation, pictures)
    assert np.array_equal(token_ids, expected.token_ids) and images == expected.images
    assert [placed.image.data for placed in images] == [RED, BLUE]
    with pytest.raises(MsrlError, match=mentions("images", "texts")):
        renderer.prompt(conversation)
    with pytest.raises(MsrlError, match=mentions("turn 1", "<image>")):
        image_prompt(renderer, model_images(tokenizer), Conversation((Message("user", "<image>"),)),
                     pictures)  # fmt: skip


def test_limits_of_pixels_change_the_tokens(pictures: Path, model: Path):
    manifest = preprocess(pictures, model, [FORMS["LLaVA"]], max_pixels=4000)
    assert manifest.vision["max_pixels"] == 4000
    ((example,),) = SftDataset(pictures / "x")
    assert [placed.image.grid for placed in example.images] == [(1, 2, 4), (1, 8, 2)]
    with pytest.raises(MsrlError) as error:
        preprocess(pictures, model, [FORMS["LLaVA"]], min_pixels=500_000)
    assert_mentions(error.value, "min_pixels=500000")


def test_a_training_drops_rows_that_it_would_cut_inside_an_image(pictures: Path, model: Path):
    late = message("x" * 105 + "<image>", images=["red.png"])
    early = message("<image>", images="red.png")
    early["messages"][1] = {"role": "assistant", "content": "y" * 200}
    preprocess(pictures, model, [late, early])
    data = {"seq_length": 120, "too_long": "truncate", "train": "x"}
    rows = open_rows(Config.model_validate({"data": data}), SftDataset(pictures / "x"))
    assert (rows.members, rows.num_dropped, rows.num_truncated) == (((1,),), 1, 1)
    (example,) = rows.examples(0)
    assert len(example.token_ids) == 120 and len(example.images) == 1


def test_shown_rows_have_each_image_as_one_part(
    pictures: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    file = pictures / "rows.jsonl"
    pair = {"prompt": TEXT, "chosen": "red", "rejected": "blue", "images": ["red.png", url(BLUE)]}
    for row, keys in (
        (FORMS["ms-swift"], {}),
        (FORMS["geo3k"], {"kind": "prompts"}),
        (pair, {"handler": "pairs"}),
    ):
        file.write_text(json.dumps(row))
        values = {"input": [str(file)], "tokenizer": str(model), "handler": "auto",
                  "template": "native", "show": 1, **keys}  # fmt: skip
        assert run(Config.model_validate({"preprocess": values}, strict=False)) is None
        output = capsys.readouterr().out
        assert output.count("  image, 12 tokens: 8 x 6 patches") == 1
        assert output.count("  image, 14 tokens: 4 x 14 patches") == 1
        assert "image_pad" not in output and "What is it? And <|vision_start|>" in output


def message(*content: Any, **columns: Any) -> dict[str, Any]:
    text = content[0] if isinstance(content[0], str) else list(content)
    return {"messages": [{"role": "user", "content": text}, ANSWER], **columns}


def part(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


BAD_ROWS = [
    (message("<image> and <image>", images=["red.png"]), ("1 in the column", "2 marks")),
    (message("no mark", images=["red.png"]), ("1 in the column", "0 marks")),
    (message("a mark <image> alone"), ("turn 1", "<image>", "column")),
    (message("a mark <image> alone", images=[]), ("turn 1", "<image>")),
    (message(f"ROLL {MARK}"), ("turn 1", MARK)),
    (message({"type": "image"}), ("0 in the column", "1 marks")),
    (message(part("none.png")), ("image 1", "no such file", "none.png", "image_root")),
    (message(part("red.png"), part("sub")), ("image 2", "directory", "sub")),
    (message(part("broken.jpg")), ("image 1", "damaged", "broken.jpg")),
    (message(part("page.png")), ("image 1", "not an image", "page.png")),
    (message(part("vector.svg")), ("image 1", "not an image", "vector.svg")),
    (message(part("huge.png")), ("image 1", "too many pixels", "huge.png")),
    (message(part("long.png")), ("image 1", "aspect ratio", "long.png")),
    (message(part("dot.png")), ("image 1", "too small", "dot.png")),
    (message(part("https://x.example/a.png")), ("image 1", "https://", "Download")),
    (message(part("s3://bucket/a.png")), ("image 1", "s3://")),
    (message(part("data:image/png,abc")), ("image 1", "base64")),
    (message(part("data:image/png;base64,@@@")), ("image 1", "base64")),
    (message(part("a\0b")), ("image 1", "cannot be read")),
    (message(part("x" * 5000)), ("image 1", "cannot be read")),
    (message(part(3)), ("image 1", "a number")),
    (message(part({"bytes": "abc"})), ("image 1", "bytes")),
    (message(part({"size": 3})), ("image 1", "size")),
    (message("<image>", image="red.png", images=["sub/blue.jpg"]), ("image", "images")),
    (message("<image>" * 5, images=["red.png"] * 5), ("5", "max_images=4")),
    (message("\ufdd1<image>", images=["red.png"]), ("turn 1", "U+FDD1")),
    (message("<image>", images="[1"), ("images", "JSON")),
    (message("x", video="a.mp4"), ("column video", "not supported")),
    (message("x", audios=["a.wav"]), ("column audios", "not supported")),
    (message({"type": "video", "video": "a.mp4"}), ("turn 1", "video")),
    (message({"type": "image", "image": "red.png", "min_pixels": 9}), ("min_pixels",)),
    (
        {"messages": [{"role": "user", "content": "x"},
                      {"role": "assistant", "content": [part("red.png")]}]},
        ("turn 2", "assistant"),
    ),
    (
        {"messages": [{"role": "user", "content": "<image>"},
                      {"role": "assistant", "content": "<image>"}], "images": ["red.png"]},
        ("turn 2", "assistant"),
    ),
]  # fmt: skip


@pytest.fixture
def hostile(pictures: Path) -> Path:
    from test_vision_pixels import png

    (pictures / "broken.jpg").write_bytes(BLUE[: len(BLUE) // 2])
    (pictures / "page.png").write_bytes(b"%PDF-1.7\n" + bytes(100))
    (pictures / "vector.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (pictures / "huge.png").write_bytes(png(40_000, 40_000))
    (pictures / "long.png").write_bytes(encoded(picture(1000, 2)))
    (pictures / "dot.png").write_bytes(encoded(picture(1, 1)))
    return pictures


def test_a_bad_image_is_one_line_with_its_row(hostile: Path, model: Path):
    for row, words in BAD_ROWS:
        with pytest.raises(MsrlError) as error:
            preprocess(hostile, model, [FORMS["ms-swift"], row], max_images=4)
        assert_mentions(error.value, "rows.jsonl:2: ", *words)
        assert "\n" not in str(error.value)
    assert not list(hostile.glob("x_*"))


def test_bad_images_are_dropped_and_counted_by_reason(hostile: Path, model: Path):
    rows = [FORMS["ms-swift"], *(row for row, _ in BAD_ROWS)]
    manifest = preprocess(hostile, model, rows, max_images=4, on_bad_row="drop")
    assert manifest.num_examples == 1 and sum(manifest.dropped.values()) == len(BAD_ROWS)
    reasons = set(manifest.dropped)
    assert {"no such file", "damaged image", "not an image", "remote image"} <= reasons
    assert len((hostile / "x_bad_rows.jsonl").read_text().splitlines()) == len(BAD_ROWS)


def test_images_with_a_text_only_model_are_refused(pictures: Path, tmp_path: Path, model: Path):
    text = tmp_path / "text"
    make_tokenizer().save_pretrained(text)
    (text / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    for name in ("ms-swift", "content parts"):
        with pytest.raises(MsrlError) as error:
            preprocess(pictures, text, [FORMS[name]])
        assert_mentions(error.value, "rows.jsonl:1", str(text), "vision tower")
    with pytest.raises(MsrlError) as error:
        preprocess(pictures, text, [message("Hi")], max_pixels=9000)
    assert_mentions(error.value, "preprocess.max_pixels=9000", "vision tower")
    assert preprocess(pictures, text, [message("Hi <image>")]).num_examples == 1
    assert preprocess(pictures, text, [FORMS["ms-swift"]], ignore=["images"]).num_examples == 1


def test_a_model_without_its_processor_reads_texts_only(pictures: Path, tmp_path: Path):
    folder = write_vision_model(tmp_path / "vl")
    (folder / "preprocessor_config.json").unlink()
    assert preprocess(pictures, folder, [message("Hi")]).vision == {}
    with pytest.raises(MsrlError) as error:
        preprocess(pictures, folder, [FORMS["LLaVA"]])
    assert_mentions(error.value, "rows.jsonl:1", "preprocessor_config.json")


def test_texts_give_the_same_files_without_images(pictures: Path, model: Path):
    manifest = preprocess(pictures, model, [message("What is <|image_pad|>?")])
    assert manifest.vision == {} and "vision" not in (pictures / "x_manifest.json").read_text()
    assert not list(pictures.glob("x_image*"))
    ((example,),) = SftDataset(pictures / "x")
    assert IMAGE_TOKEN not in example.token_ids and example.images == ()


def test_links_keep_paths_and_refuse_changed_files(pictures: Path, model: Path):
    manifest = preprocess(pictures, model, [FORMS["ms-swift"]], images="link")
    assert manifest.vision["images"] == "link"
    assert not (pictures / "x_images.bin").exists()
    ((example,),) = SftDataset(pictures / "x")
    assert [placed.image.data for placed in example.images] == [RED, BLUE]
    dataset = SftDataset(pictures / "x")
    ((example,),), images = dataset, dataset.images
    assert images is not None
    images.check_links()
    for content, words in ((BLUE, "changed"), (None, "no such file")):
        (pictures / "red.png").unlink()
        if content is not None:
            (pictures / "red.png").write_bytes(content)
        for read in (lambda: example.images[0].image.data, images.check_links):
            with pytest.raises(MsrlError, match=mentions("red.png", words)):
                read()
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:1", "image 1", "linked", "embed")):
        preprocess(pictures, model, [FORMS["ROLL"]], images="link")


def test_checksums_and_digests_cover_the_files_of_images(pictures: Path, model: Path):
    preprocess(pictures, model, [FORMS["ms-swift"]])
    prefix = str(pictures / "x")
    digest = fingerprint(prefix)
    refuse_damaged(prefix, read_manifest(prefix))
    for name in ("images.bin", "images.jsonl", "image_rows.bin", "image_rows.idx"):
        path = pictures / f"x_{name}"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert fingerprint(prefix) != digest
        with pytest.raises(MsrlError, match=mentions(name)):
            refuse_damaged(prefix, read_manifest(prefix))
        path.write_bytes(content)
    (pictures / "x_images.jsonl").write_text("")
    with pytest.raises(MsrlError, match=mentions(prefix, "same run")):
        SftDataset(prefix)
    (pictures / "x_images.jsonl").unlink()
    with pytest.raises(MsrlError, match=mentions("x_images.jsonl")):
        SftDataset(prefix)


@pytest.mark.slow
def test_workers_write_the_same_files(pictures: Path, model: Path):
    rows = [FORMS[name] for name in ("ms-swift", "LLaVA", "ROLL")] * 40
    rows[50:60] = [message("text only")] * 10
    preprocess(pictures, model, rows, template="qwen")
    preprocess(pictures, model, rows, template="qwen", workers=2, output_prefix=str(pictures / "y"))
    assert files(pictures / "x") == files(pictures / "y")
    dataset = SftDataset(pictures / "y")
    counts = [len(example.images) for (example,) in dataset]
    assert counts == [2] * 50 + [0] * 10 + [2] * 60
    assert np.array_equal(dataset[0][0].token_ids, dataset[119][0].token_ids)


def test_a_check_reads_the_first_images(pictures: Path, model: Path):
    (pictures / "rows.jsonl").write_text(json.dumps(FORMS["ms-swift"]) + "\n")
    values = {
        "input": [str(pictures / "rows.jsonl")], "tokenizer": str(model), "handler": "auto",
        "template": "native", "output_prefix": str(pictures / "x"),
    }  # fmt: skip
    config = Config.model_validate({"preprocess": values}, strict=False)
    assert check(config) == 1
    (pictures / "red.png").unlink()
    with pytest.raises(MsrlError, match=mentions("rows.jsonl:1", "no such file")):
        check(config)


def test_a_handler_of_the_user_returns_images(pictures: Path, model: Path):
    (pictures / "own.py").write_text(
        "def conversation(row):\n"
        "    turns = [{'from': 'user', 'value': row['q']}, {'from': 'gpt', 'value': 'a'}]\n"
        "    return {'messages': turns, 'images': row['files']}\n"
    )
    handler = f"{pictures / 'own.py'}:conversation"
    row = {"q": TEXT, "files": ["red.png", "sub/blue.jpg"]}
    preprocess(pictures, model, [row], handler=handler)
    ((example,),) = SftDataset(pictures / "x")
    assert [placed.image.data for placed in example.images] == [RED, BLUE]


def test_paths_begin_at_the_root(pictures: Path, model: Path, tmp_path_factory: Any):
    other = tmp_path_factory.mktemp("elsewhere")
    manifest = preprocess(other, model, [FORMS["ms-swift"]], image_root=str(pictures))
    assert manifest.vision["num_images"] == 2
    with pytest.raises(MsrlError, match=mentions("image_root", "no such folder")):
        preprocess(other, model, [FORMS["ms-swift"]], image_root=str(other / "none"))


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model that a training could name, without weights."""
    monkeypatch.setenv("MSRL_DATA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "trained"
    ids = {key: CONFIG[key] for key in CONFIG if key.endswith("_token_id")}
    write_folder(folder, config={**QWEN2_5_VL, **ids, "vocab_size": 300})
    make_vision_tokenizer().save_pretrained(folder)
    return folder


def test_cached_rows_are_written_again_when_an_image_changes(
    pictures: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
):
    original, calls = workflow.write, list[str]()
    monkeypatch.setattr(workflow, "write", lambda *args: calls.append("") or original(*args))
    rows = pictures / "rows.jsonl"
    rows.write_text(json.dumps(FORMS["ms-swift"]) + "\n")
    first = prefix_of(plan(trained, rows))
    assert prefix_of(plan(trained, rows)) == first and len(calls) == 1
    (pictures / "red.png").touch()
    assert prefix_of(plan(trained, rows)) == first and len(calls) == 1
    (pictures / "red.png").write_bytes(BLUE)
    assert prefix_of(plan(trained, rows)) == first and len(calls) == 2
    ((example,),) = SftDataset(first)
    assert [placed.image.data for placed in example.images] == [BLUE, BLUE]
    other = pictures / "other"
    shutil.copytree(pictures / "sub", other / "sub")
    shutil.copy(rows, other / "rows.jsonl")
    (other / "red.png").write_bytes(RED)
    second = prefix_of(plan(trained, other / "rows.jsonl"))
    ((example,),) = SftDataset(second)
    assert [placed.image.data for placed in example.images] == [RED, BLUE]


def test_a_training_refuses_images_of_another_processor(pictures: Path, trained: Path):
    manifest = preprocess(pictures, trained, [FORMS["ms-swift"]], max_pixels=9000)
    run = plan(trained, pictures / "x")
    check_data(manifest, run, str(pictures / "x"))  # other limits of pixels are no difference
    (trained / "preprocessor_config.json").write_text(
        json.dumps({**PROCESSOR, "image_mean": [0.5, 0.5, 0.5]})
    )
    with pytest.raises(MsrlError) as error:
        check_data(manifest, run, str(pictures / "x"))
    assert_mentions(error.value, str(pictures / "x"), "image_mean", "0.5")


def test_a_training_on_images_names_pillow_if_it_is_not_installed(
    pictures: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
):
    manifests = [preprocess(pictures, trained, [FORMS["ms-swift"]])]
    runs = [plan(trained, pictures / "x")]
    manifests.append(preprocess(pictures, trained, [message("Hi")]))
    runs.append(plan(trained, pictures / "x"))
    assert [run.has_images for run in runs] == [True, False]
    monkeypatch.setattr(pixels, "find_spec", lambda name: None)
    with pytest.raises(MsrlError, match=mentions(str(pictures / "x"), "Pillow", "install")):
        check_data(manifests[0], runs[0], str(pictures / "x"))
    check_data(manifests[1], runs[1], str(pictures / "x"))


@pytest.mark.slow
def test_texts_are_preprocessed_without_pillow(pictures: Path, model: Path):
    (pictures / "rows.jsonl").write_text(json.dumps(message("Hi")) + "\n")
    code = (
        "import sys\nfrom msrl.cli.app import main\n"
        f"sys.argv = ['msrl', 'preprocess', '--input', {str(pictures / 'rows.jsonl')!r},"
        f" '--tokenizer', {str(model)!r}, '--handler', 'auto', '--template', 'qwen',"
        f" '--output-prefix', {str(pictures / 'x')!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('PIL' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False", done.stdout
