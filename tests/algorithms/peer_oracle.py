"""Functions of verl, TRL and ROLL as oracles, from a folder outside this project.

MSRL_PEERS_PATH names folders (separated by `:`) that have `verl` 0.9.1, `trl` 1.16.0 and the
modules they import, for example made by `pip install --no-deps --target FOLDER verl==0.9.1
trl==1.16.0 omegaconf hydra-core tensordict codetiming antlr4-python3-runtime==4.9.3 ...`.
A checkout of ROLL (8eb27cc2) in one of the folders provides single functions of its files.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

PATHS = [path for path in os.environ.get("MSRL_PEERS_PATH", "").split(os.pathsep) if path]


def peer_module(name: str) -> Any:
    """Return a module of a peer, or skip the test."""
    if not PATHS:
        pytest.skip(f"{name} is not here (set MSRL_PEERS_PATH)")
    sys.path.extend(path for path in PATHS if path not in sys.path)
    _provide_names_of_transformers_4()
    if getattr(sys.modules.get("verl"), "has_stand_ins", False):  # of another oracle
        stand_ins = [n for n, module in sys.modules.items() if type(module).__name__ == "_StandIn"]
        packages = [n for n in sys.modules if n.partition(".")[0] == "verl"]
        for module in {*stand_ins, *packages}:
            del sys.modules[module]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported from MSRL_PEERS_PATH: {error}")


def _provide_names_of_transformers_4() -> None:
    """Give transformers 5 a class under its name in version 4, which verl imports."""
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText


def roll_function(file: str, name: str, names: dict[str, Any]) -> Any:
    """Return a function of a file of ROLL, or skip the test.

    Only the function is executed, with `names` in place of the imports of its file, which need a
    whole installation of ROLL.
    """
    path = next((Path(folder) / file for folder in PATHS if (Path(folder) / file).is_file()), None)
    if path is None:
        pytest.skip(f"{file} of ROLL is not here (set MSRL_PEERS_PATH)")
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    (function,) = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name]
    function.returns, function.args.args[-1].annotation = None, None
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[name]
