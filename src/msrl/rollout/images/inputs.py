"""Prompts with images, in the form that vLLM's processor returns (vLLM 0.23 to 0.32).

vLLM takes the token ids, pixels and places of a rendered input (`MultiModalInput` in
`vllm/inputs/engine.py`) as they are: its processor, its tokenizer and its expansion of image tokens
do not run, so the engine reads the tokens and pixels that are trained.

Letters: N patches of an image, e elements of a patch, T tiles, C channels, H and W sides of a tile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msrl.rollout.engine import EngineImages
from msrl.types import Image, Ints, PlacedImage
from msrl.vision.pixels import cut_patches, decode_image, normalize, patches_of
from msrl.vision.sizes import image_tokens

if TYPE_CHECKING:
    from torch import Tensor

_CACHE_BYTES = 1 << 30


class ImageInputs:
    """Inputs of prompts with images. The patches of the latest images stay in host memory.

    `is_normalized` says that vLLM gets normalized patches: otherwise it normalizes them itself.
    """

    def __init__(
        self, images: EngineImages, *, is_normalized: bool, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self._vision, self._is_normalized = images.vision, is_normalized
        self._cache_bytes, self._num_bytes = cache_bytes, 0
        self._items = OrderedDict[Image, tuple[Any, int]]()

    def make(self, token_ids: Ints, images: Sequence[PlacedImage]) -> dict[str, Any]:
        """Return the input of a prompt.

        Raises:
            ImageError: An image cannot be decoded.
        """
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        places = [
            PlaceholderRange(
                placed.offset, image_tokens(placed.image.grid, self._vision.merge_size)
            )
            for placed in images
        ]
        return {
            "type": "multimodal",
            "prompt_token_ids": token_ids.tolist(),
            "mm_kwargs": MultiModalKwargsItems(
                {"image": [self._item(placed.image) for placed in images]}
            ),
            "mm_hashes": {"image": [_hash(placed.image) for placed in images]},
            "mm_placeholders": {"image": places},
        }

    def _item(self, image: Image) -> Any:
        """Return the arguments of vLLM's model for an image."""
        if image in self._items:
            self._items.move_to_end(image)
            return self._items[image][0]
        if self._vision.tile:
            pixels = self._tiles(image)
            item, size = _as_tiled_item(pixels, self._vision.image_token_id), pixels.nbytes
        else:
            pixels = self._patches(image)
            item, size = _as_item(image, pixels), pixels.nbytes
        self._items[image.without_file()] = item, size
        self._num_bytes += size
        while self._num_bytes > self._cache_bytes and len(self._items) > 1:
            self._num_bytes -= self._items.popitem(last=False)[1][1]
        return item

    def _patches(self, image: Image) -> Tensor:  # [N, e], uint8, or float32 if normalized
        import torch

        pixels = decode_image(image.data, self._vision, image.grid)
        cut = patches_of if self._is_normalized else cut_patches
        return torch.from_numpy(cut(pixels, self._vision))

    def _tiles(self, image: Image) -> Tensor:  # [T, C, H, W] float32
        """Return the normalized tiles of an image: vLLM does not normalize them itself."""
        import torch

        side = self._vision.tile
        pixels = normalize(decode_image(image.data, self._vision, image.grid), self._vision)
        return torch.from_numpy(pixels.reshape(-1, side, side, 3)).permute(0, 3, 1, 2).contiguous()


def run_rendered(
    llm: Any, inputs: Sequence[Mapping[str, Any]], params: Sequence[Any], bar: Any
) -> list[Any]:
    """Run rendered inputs to their ends, as `vllm.LLM.generate` runs texts, and return the outputs.

    `bar` is a class with the interface of `tqdm`, or False.
    """
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    requests = [str(next(llm.request_counter)) for _ in inputs]
    try:
        for request, content, param in zip(requests, inputs, params, strict=True):
            param.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(request, content, param)
    except BaseException:
        engine.abort_request(requests)
        raise
    progress = bar(total=len(requests)) if bar else None
    outputs = dict[str, Any]()
    while engine.has_unfinished_requests():
        finished = [output for output in engine.step() if output.finished]
        outputs |= {output.request_id: output for output in finished}
        if progress is not None and finished:
            progress.update(len(finished))
    return [outputs[request] for request in requests]


def _as_item(image: Image, patches: Tensor) -> Any:
    """Return the fields that vLLM's Qwen2-VL and its successors read of one image."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    values: Any = {"pixel_values": patches, "image_grid_thw": torch.tensor([image.grid])}
    fields: Any = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(
            "image", torch.tensor([len(patches)])
        ),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(values, fields)["image"][0]


def _as_tiled_item(tiles: Tensor, image_token_id: int) -> Any:
    """Return the fields that vLLM's class of InternVL (`InternS1...`) reads of one image."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    count = torch.tensor([len(tiles)])
    values: Any = {
        "pixel_values": tiles,
        "image_num_patches": count,
        "image_token_id": torch.tensor(image_token_id),
    }
    fields: Any = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", count),
        "image_num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "image_token_id": MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(values, fields)["image"][0]


def _hash(image: Image) -> str:
    """Return the name by which vLLM shares features and cached keys of an image."""
    frames, rows, columns = image.grid
    return f"{image.key}-{frames}x{rows}x{columns}"
