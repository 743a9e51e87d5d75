"""Command of vLLM's OpenAI-compatible server, with the options of `vllm serve` (0.23 to 0.32).

This module builds the command and the environment. `workflows/serve/server.py` starts the process,
whose child is the engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msrl.models.families import load_shape
from msrl.platforms.base import Platform
from msrl.processes.child import python_command
from msrl.rollout import server_key
from msrl.rollout.engine import EngineSettings
from msrl.rollout.engine_arguments import engine_arguments
from msrl.rollout.engine_limits import check_limits
from msrl.rollout.vllm import engine_variables

_MODULE = "msrl.rollout.vllm_server"
# Arguments of `vllm.LLM` that only a process that generates for a training needs.
_OFFLINE_ONLY = (
    "worker_extension_cls",
    "use_tqdm_on_load",
    "disable_log_stats",
    "mm_processor_cache_gb",
)
_NO_HOST = "none.invalid"  # vLLM reads an empty list of hosts as all hosts
# Allowed values of --max-lora-rank (`MaxLoRARanks` in vllm/config/lora.py).
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_LORA_RANK = _LORA_RANKS[-1]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        engine: Settings of its engine.
        host: Address to listen on.
        port: Port to listen on.
        name: Name of the model in requests.
        generation_config: Folder whose generation_config.json has the tokens that end a response.
        chat_template: Jinja file; None for the template of the tokenizer.
        tool_parser: vLLM's parser of tool calls; None for a template without tools.
        adapters: Folders of LoRA adapters in PEFT's format by the name in requests.
        max_lora_rank: Largest rank of the adapters.
        image_hosts: Hosts from which the server may download images.
    """

    engine: EngineSettings
    host: str
    port: int
    name: str
    generation_config: Path
    chat_template: Path | None = None
    tool_parser: str | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict[str, Path])
    max_lora_rank: int = 0
    image_hosts: tuple[str, ...] = ()


def server_command(settings: ServerSettings, platform: Platform) -> list[str]:
    """Return the words of the command that starts the server.

    Raises:
        MsrlError: vLLM cannot serve this model with these settings.
    """
    check_limits(settings.engine, platform)
    shape = load_shape(settings.engine.model_dir)
    arguments = engine_arguments(settings.engine, shape, platform)
    options = {name: value for name, value in arguments.items() if name not in _OFFLINE_ONLY}
    options |= _frontend(settings)
    return [*python_command("-m", _MODULE), str(os.getpid()), *_words(options)]


def _frontend(settings: ServerSettings) -> dict[str, Any]:
    """Return the options of the server besides the options of its engine."""
    is_verbose = settings.engine.verbose
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "served_model_name": settings.name,
        "generation_config": str(settings.generation_config),
        "uvicorn_log_level": "info" if is_verbose else "warning",
        "disable_fastapi_docs": True,
        "middleware": f"{server_key.__name__}.{server_key.CheckRequest.__name__}",
        "allowed_origins": "[]",  # by default, pages of all sites may read the answers
        "allowed_media_domains": list(settings.image_hosts) or [_NO_HOST],
    }
    if not is_verbose:
        options |= {"disable_uvicorn_access_log": True, "disable_log_stats": True}
    if settings.chat_template is not None:
        options["chat_template"] = str(settings.chat_template)
    if settings.tool_parser is not None:
        options |= {"enable_auto_tool_choice": True, "tool_call_parser": settings.tool_parser}
    if settings.adapters:
        options |= {
            "enable_lora": True,
            "max_loras": len(settings.adapters),
            "max_lora_rank": lora_rank_limit(settings.max_lora_rank),
            "lora_modules": [f"{name}={path}" for name, path in settings.adapters.items()],
        }
    return options


def lora_rank_limit(rank: int) -> int:
    """Return the smallest limit of ranks that vLLM has and that allows `rank`.

    >>> lora_rank_limit(4), lora_rank_limit(64), lora_rank_limit(65)
    (8, 64, 128)
    """
    return next((limit for limit in _LORA_RANKS if limit >= rank), MAX_LORA_RANK)


def _words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not None:
            words += [flag, str(value)]
    return words


def server_environment(
    settings: ServerSettings, platform: Platform, user: Mapping[str, str], api_key: str | None
) -> dict[str, str]:
    """Return the environment of the server. Only it contains the API key, no command line does."""
    environment = {**engine_variables(platform, settings.engine), **user}
    for override in platform.engine_overrides(environment):
        environment[override.name] = override.value
    # A host that is allowed must not forward downloads to others.
    environment.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    # The engine of an HTTP server is always a separate process.
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    environment.pop("MSRL_API_KEY", None)
    environment.pop(server_key.VARIABLE, None)
    if api_key is not None:
        environment[server_key.VARIABLE] = api_key
    return environment
