"""`msrl serve`: vLLM's OpenAI-compatible server for any checkpoint.

The server runs as a child process in a new session, so that Ctrl-C reaches only this process. It
then ends the server and its engine, and removes their shared memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from msrl import platforms, temporary
from msrl.config.schema import Config
from msrl.data.chat_template import chat_template
from msrl.data.render import Renderer
from msrl.errors import MsrlError
from msrl.limits import print_note, printable
from msrl.rollout.engine import EngineImages, EngineSettings
from msrl.rollout.server import ServerSettings, server_command, server_environment
from msrl.rollout.server_access import free_port, read_api_key, server_url
from msrl.types import Conversation, Message
from msrl.vision.settings import has_vision, read_vision_settings
from msrl.workflows.engine import (
    check_engine,
    choose_renderer,
    engine_settings,
    other_template,
)
from msrl.workflows.serve import model_cache
from msrl.workflows.serve.served_model import ServedModel, open_served_model, write_adapters
from msrl.workflows.serve.server_process import run_server
from msrl.workflows.serve.tool_parsers import tool_parser
from msrl.workflows.training.interrupts import EndAtOnce

_NO_TOOLS = "none"


@dataclass(frozen=True, slots=True)
class ServeSetup:
    """Checked inputs of `msrl serve`. `port` is 0 if any free port will do."""

    config: Config
    model: ServedModel
    renderer: Renderer
    tool_parser: str | None
    port: int
    api_key: str | None
    key_source: str


def prepare(config: Config) -> ServeSetup:
    """Check the model, its template, the address and the API key, without starting anything.

    The template must render a question, since the server would refuse every conversation otherwise.

    Raises:
        MsrlError: One of them is not valid.
    """
    section = config.serve
    free_port(section.host, section.port)
    model = open_served_model(section)
    check_engine(config, _engine_settings(config, model))
    renderer = choose_renderer(model.tokenizer_dir, section.template, day=section.date)
    if warning := other_template(model.tokenizer_dir, renderer):
        print_note(warning)
    renderer.prompt(Conversation((Message("user", "?"),)))
    parser = tool_parser(renderer) if section.tools is None else section.tools
    key, source = read_api_key(section.api_key_file) or (None, "")
    return ServeSetup(
        config=config,
        model=model,
        renderer=renderer,
        tool_parser=None if parser == _NO_TOOLS else parser,
        port=section.port,
        api_key=key,
        key_source=source,
    )


def summary(setup: ServeSetup) -> str:
    """Return what would be served, in one line."""
    model, section = setup.model, setup.config.serve
    names = ", ".join([model.name, *(adapter.name for adapter in model.adapters)])
    address = server_url(section.host, setup.port) if setup.port else f"a port of {section.host}"
    conversion = "" if model.source is None else f", converted into {model.folder}"
    key = f"API key from {setup.key_source}" if setup.api_key else "no API key"
    return (
        f"{names} ({model.shape.architecture}{conversion}) at {address}; template "
        f"{setup.renderer.template.name}, tool parser {setup.tool_parser or _NO_TOOLS}, {key}"
    )


def run(config: Config) -> None:
    """Serve the model of `config.serve` until a signal ends the server.

    Raises:
        MsrlError: The inputs are not valid, or vLLM refuses them.
        RunFailedError: The server failed.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP ended the server.
    """
    with EndAtOnce():
        setup = prepare(config)
        platform = platforms.resolve(config.cluster.platform)
        model = setup.model
        if model.source is not None:
            model_cache.convert(model.source, model.load, model.folder)
        with temporary.owned_folder("msrl-serve-") as folder:
            settings = _server_settings(setup, folder)
            command = server_command(settings, platform)
            environment = server_environment(settings, platform, os.environ, setup.api_key)
            print_note(f"Loading {model.load} with vLLM")
            run_server(
                command,
                environment,
                folder,
                server_url(settings.host, settings.port),
                lambda: _print_ready(setup, settings),
                is_verbose=settings.engine.verbose,
            )


def _engine_settings(config: Config, model: ServedModel) -> EngineSettings:
    """Return the settings of the engine, with the folder that has config.json already."""
    config_dir = model.folder if model.source is None else model.source.hf_dir
    engine = engine_settings(config, config_dir, dtype=config.serve.dtype)
    awake = engine.engine.model_copy(update={"sleep": 0})  # requests may come at any time
    images = _images(config, config_dir)
    return replace(engine, engine=awake, tokenizer_dir=model.tokenizer_dir, images=images)


def _images(config: Config, config_dir: Path) -> EngineImages | None:
    """Return the limits of the images of a request, or None for text only.

    Raises:
        MsrlError: A setting for images has no effect, or the files of the image processor are
            missing or not supported.
    """
    section = config.serve
    if not has_vision(config_dir) or not section.max_images:
        if section.image_hosts:
            raise MsrlError(
                f"serve.image_hosts={list(section.image_hosts)}: {config_dir} is served without "
                "images. Remove the key."
            )
        return None
    try:
        return EngineImages(section.max_images, read_vision_settings(config_dir))
    except MsrlError as error:
        raise MsrlError(f"{error} serve.max_images=0 serves text only.") from error


def _server_settings(setup: ServeSetup, folder: Path) -> ServerSettings:
    """Return the settings of the server, whose files are written into `folder`."""
    config, model = setup.config, setup.model
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": list(setup.renderer.stop_token_ids)}), encoding="utf-8"
    )
    template = chat_template(setup.renderer)
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ServerSettings(
        engine=replace(_engine_settings(config, model), model_dir=model.folder),
        host=config.serve.host,
        port=free_port(config.serve.host, setup.port),
        name=model.name,
        generation_config=folder,
        chat_template=folder / "chat_template.jinja" if template else None,
        tool_parser=setup.tool_parser,
        adapters=write_adapters(model.adapters, model.folder, folder),
        max_lora_rank=max((adapter.rank for adapter in model.adapters), default=0),
        image_hosts=config.serve.image_hosts,
    )


def _print_ready(setup: ServeSetup, settings: ServerSettings) -> None:
    """Print the address and the names of the models on standard output."""
    names = ", ".join([settings.name, *settings.adapters])
    url = server_url(settings.host, settings.port)
    key = f" with the API key from {setup.key_source}" if setup.api_key else ""
    print(printable(f"Serving {names} at {url}/v1{key} (Ctrl-C stops the server)"), flush=True)
