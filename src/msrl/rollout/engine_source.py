"""Names and numbers that the source of the installed vLLM defines (vLLM 0.23 to 0.32).

Files are parsed and not imported, so that a configuration is checked without loading vLLM. This is
the only module that knows where vLLM defines them.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

_MODELS = "model_executor/models/registry.py"
_MODEL = "model_executor/models/{}.py"
_LOGITS = "model_executor/layers/logits_processor.py"
_CONFIGS = "transformers_utils/config.py"
# Dictionaries of models that this version of vLLM does not have.
_ABSENT_MODELS = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")


@functools.cache
def statements(file: str) -> tuple[ast.stmt, ...] | None:
    """Return the top-level statements of a file of vLLM; None if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], file)
    return tuple(ast.parse(path.read_bytes()).body) if path.is_file() else None


def attention_head_sizes(file: str) -> tuple[int, ...] | None:
    """Return the head sizes that the attention backend in `file` supports.

    They are the list that `get_supported_head_sizes` of its backend class returns.

    Returns:
        None if they are not known.
    """
    for node in statements(file) or ():
        if isinstance(node, ast.ClassDef) and node.name.endswith("Backend"):
            for function in node.body:
                if isinstance(function, ast.FunctionDef):
                    sizes = _returned_sizes(function)
                    if sizes is not None:
                        return sizes
    return None


def _returned_sizes(function: ast.FunctionDef) -> tuple[int, ...] | None:
    last = function.body[-1]
    if function.name != "get_supported_head_sizes" or not isinstance(last, ast.Return):
        return None
    try:
        sizes = ast.literal_eval(last.value) if last.value is not None else None
    except ValueError:
        return None
    return tuple(sizes) if sizes else None


@functools.cache
def architectures() -> frozenset[str] | None:
    """Return the architectures of vLLM's model registry; None if they are not known."""
    names = {name for name, _ in _models()}
    return frozenset(names) if names and not _has_model_plugins() else None


@functools.cache
def has_ungrouped_scores(architecture: str) -> bool | None:
    """Return True if vLLM's class of a model sets how experts are scored, but no groups of them.

    Returns:
        None if vLLM's class of this architecture is not known.
    """
    entry = dict(_models()).get(architecture)
    module = entry.elts[0] if isinstance(entry, ast.Tuple) and entry.elts else None
    nodes = statements(_MODEL.format(module.value)) if isinstance(module, ast.Constant) else None
    if nodes is None:
        return None
    calls = (node for statement in nodes for node in ast.walk(statement))
    names = [set(_keyword_names(node)) for node in calls if isinstance(node, ast.Call)]
    return any("scoring_func" in keys and "use_grouped_topk" not in keys for keys in names)


@functools.cache
def config_types() -> frozenset[str] | None:
    """Return the values of `model_type` with a config class in vLLM; None if they are not known."""
    for target, value in _assignments(_CONFIGS):
        if target == "_CONFIG_REGISTRY" and isinstance(value, ast.Call):
            return frozenset(_keyword_names(value))
        if target == "_CONFIG_REGISTRY" and isinstance(value, ast.Dict):
            return frozenset(_text_keys(value))
    return None


@functools.cache
def sets_logits_dtype() -> bool | None:
    """Return True if the output layer can compute in another dtype; None if this is not known.

    `LogitsProcessor` reads `ModelConfig.head_dtype` since a pull request of July 2026
    (vllm-project/vllm 48390), which vLLM 0.23 does not have.
    """
    nodes = statements(_LOGITS)
    if nodes is None:
        return None
    found = (node for statement in nodes for node in ast.walk(statement))
    return any(isinstance(node, ast.Attribute) and node.attr == "head_dtype" for node in found)


def _models() -> Iterator[tuple[str, ast.expr]]:
    """Yield the architectures of vLLM's model registry with their entries."""
    for target, value in _assignments(_MODELS):
        is_models = target.endswith("_MODELS") and target not in _ABSENT_MODELS
        if is_models and isinstance(value, ast.Dict):
            for key, entry in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, entry


def _assignments(file: str) -> Iterator[tuple[str, ast.expr]]:
    for node in statements(file) or ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def _keyword_names(call: ast.Call) -> Iterator[str]:
    """Yield the names of keyword arguments, including the keys of `**{"name": value}`."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
        elif isinstance(keyword.value, ast.Dict):
            yield from _text_keys(keyword.value)


def _text_keys(node: ast.Dict) -> Iterator[str]:
    for key in node.keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _has_model_plugins() -> bool:
    """Return True if other packages can add models to vLLM when it is imported."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(not plugin.value.startswith("vllm.") for plugin in plugins)
