"""Rules for src/msrl: imports, device names, function lengths and folders, which tests mirror."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib

from support import ROOT, TESTS, folders

SOURCE = ROOT / "src" / "msrl"
MAX_FUNCTION_LINES = 60
MAX_TEST_FILES = 15  # of one folder, with helpers
TESTS_OF_NO_PACKAGE = {"browser", "examples", "helpers", "npu", "repository"}

# Path prefixes in src/msrl that may import a heavy package.
ALLOWED_IMPORTERS = {
    "megatron": ("trainer/", "checkpoint/distributed/", "data/indexed.py", "platforms/"),
    "vllm": (
        "rollout/images/",
        "rollout/vllm.py",
        "rollout/vllm_sender.py",
        "rollout/vllm_server.py",
    ),
    "ray": ("cluster/", "workflows/"),
    "torch_npu": ("platforms/",),
    "mindspeed": ("platforms/",),
}
# Configuration and commands have the names of platforms as choices.
DEVICE_NAME_FOLDERS = ("platforms/", "config/", "cli/", "importers/", "checks/")
DEVICE_TEXT = re.compile(
    r"(cuda|npu|nccl|gloo|hccl)(:\d*)?|\w*(CUDA|ASCEND|NPU|HCCL|GLOO|NCCL)_\w+"
)
MODULE = re.compile(r"msrl(\.\w+)+(:\w+)?")
DEVICE_ATTRIBUTES = {"cuda", "npu"}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache  # ten tests look at all nodes
def nodes(node: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(node))


def list_imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and package of every import, also of importlib.import_module("...")."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]
        elif (
            isinstance(node, ast.Call)
            and called_name(node) in {"import_module", "__import__"}
            and node.args
        ):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value.split(".")[0]


def called_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def docstrings(module: ast.Module) -> set[int]:
    """Return the ids of the constants that are docstrings or string statements."""
    return {
        id(node.value)
        for node in nodes(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def device_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of device names: strings, or attributes such as `torch.cuda`."""
    prose = docstrings(module)
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and node.attr in DEVICE_ATTRIBUTES:
            yield node.lineno, f".{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in prose
            and DEVICE_TEXT.fullmatch(node.value)
        ):
            yield node.lineno, repr(node.value)


def long_functions(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {num_lines} lines"


@pytest.mark.parametrize("package", sorted(ALLOWED_IMPORTERS))
def test_a_heavy_package_is_imported_only_by_its_allowed_importers(package: str) -> None:
    other_files = [
        path for path in files() if not relative(path).startswith(ALLOWED_IMPORTERS[package])
    ]
    violations = [
        f"src/msrl/{relative(path)}:{line}"
        for path in other_files
        for line, name in list_imports(tree(path))
        if name == package
    ]
    assert not violations, (
        f"only these may import {package}: {', '.join(ALLOWED_IMPORTERS[package])}"
    )


def test_device_names_are_used_in_platforms_only() -> None:
    other_files = [path for path in files() if not relative(path).startswith(DEVICE_NAME_FOLDERS)]
    violations = [
        f"src/msrl/{relative(path)}:{line} {name}"
        for path in other_files
        for line, name in device_names(tree(path))
    ]
    assert not violations, "use msrl.platforms instead"


def test_functions_that_torch_npu_replaces_get_only_the_arguments_of_its_versions() -> None:
    """torch_npu 2.10 and 2.13 replace them by versions without torch's newer arguments."""
    violations = [
        f"src/msrl/{relative(path)}:{node.lineno} {keyword.arg}"
        for path in files()
        for node in nodes(tree(path))
        if isinstance(node, ast.Call) and called_name(node) in {"gather", "gather_object"}
        for keyword in node.keywords
        if keyword.arg == "group_dst"
    ]
    assert not violations, "use dst, the rank in the default group"


def test_no_function_is_longer_than_sixty_lines() -> None:
    assert not [
        f"src/msrl/{relative(path)}:{line} {problem}"
        for path in files()
        for line, problem in long_functions(tree(path))
    ]


def test_every_module_has_a_docstring() -> None:
    assert not [
        relative(path) for path in files() if tree(path).body and not ast.get_docstring(tree(path))
    ]


def test_there_are_no_relative_imports() -> None:
    violations = [
        f"src/msrl/{relative(path)}:{node.lineno}"
        for path in files()
        for node in nodes(tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not violations


def defined_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports."""
    names = set[str]()
    for node in nodes(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def test_scripts_import_names_that_exist() -> None:
    """No test imports fuzz.py, soak.py and the benchmarks."""
    scripts = list(TESTS.glob("*.py"))
    for folder in ("benchmarks", "examples", "docs"):
        scripts += (ROOT / folder).rglob("*.py")
    missing = []
    for path in scripts:
        for node in nodes(tree(path)):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("msrl."):
                continue
            module = SOURCE.parent.joinpath(*str(node.module).split("."))
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            known = defined_names(file) if file.is_file() else set()
            known |= {inner.stem for inner in module.glob("*")}
            absent = [alias.name for alias in node.names if alias.name not in known]
            missing += [f"{path.relative_to(ROOT)}: {node.module}.{name}" for name in absent]
    assert not missing


def layers() -> list[set[str]]:
    """Return the packages of every layer in pyproject.toml, top layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (rows,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [{name.strip() for name in row.split("|")} for row in rows]


def modules_in_strings(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of msrl modules in strings, as in tables of commands."""
    for node in nodes(module):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and MODULE.fullmatch(node.value)
        ):
            yield node.lineno, node.value.partition(":")[0]


def test_modules_named_in_strings_are_in_lower_layers() -> None:
    """The registry names the packages of plugins, whose files it lists without an import."""
    rank = {package: number for number, row in enumerate(layers()) for package in row}
    upward = []
    for path in files():
        own = relative(path).split("/")[0].removesuffix(".py")
        for line, name in modules_in_strings(tree(path)):
            package = name.split(".")[1]
            if (
                own != "registry"
                and package in rank
                and package != own
                and rank[package] <= rank[own]
            ):
                upward.append(f"src/msrl/{relative(path)}:{line} {name}")
    assert not upward


def test_validating_a_configuration_imports_no_heavy_package(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from msrl.cli.configuration import load_configuration\n"
        "from msrl.errors import ManyErrors\n"
        "for algorithm in sys.argv[1:]:\n"
        f"    sets = [algorithm, 'model.path={tmp_path}', 'reward.sources=[{{verifier: acc}}]']\n"
        "    try:\n"
        "        load_configuration(sets=sets, command='train-grpo')\n"
        "    except ManyErrors:\n"
        "        pass\n"
        "    heavy = {'torch', 'transformers', 'vllm', 'ray', 'megatron'} & set(sys.modules)\n"
        "    print(algorithm, sorted(heavy))\n"
    )
    sets = ["algo.clip.low=0.1", "algo.preset=gspo", "algo.policy_loss=gmpo"]
    sets.append("algo.options.drift=0.02")
    command = [sys.executable, "-c", code, *sets]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{algorithm} []" for algorithm in sets]


# Packages that see a whole configuration. All others take sections or plain values.
CONFIG_READERS = {"cli", "config", "importers", "layouts", "checks", "plan", "workflows"}


def whole_configurations(module: ast.Module) -> Iterator[int]:
    """Yield the line of each import of `config.schema`, and of each `plan.config`."""
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom) and node.module == "msrl.config.schema":
            yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "config":
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == "plan":
                yield node.lineno


def test_packages_below_the_plan_take_sections_and_not_a_whole_configuration() -> None:
    violations = [
        f"src/msrl/{relative(path)}:{line}"
        for path in files()
        if relative(path).split("/")[0] not in CONFIG_READERS
        for line in whole_configurations(tree(path))
    ]
    assert not violations, "import a section of msrl.config.sections"


def test_a_whole_configuration_is_found_in_imports_and_plans() -> None:
    code = "from msrl.config.schema import Config\nfrom msrl.config.sections.train import A\n"
    assert list(whole_configurations(ast.parse(f"{code}plan.config.train"))) == [1, 3]


# Classes that have several keys of a section under the same names, with the reason.
SAME_NAMES = {
    "EnvironmentSource": "what the processes of environments receive",
    "DatasetManifest": "record of finished work on disk",
    "ParallelLayout": "sizes that the packages below the configuration compute with",
    "PolicyLoss": "numbers of a formula",
    "Correction": "numbers of a formula",
    "ReplicaSettings": "sections of one replica, which is not always the policy",
    "SamplingParams": "numbers of one request",
    "Schedule": "numbers of a formula, which checkpoints store",
    "ServerSettings": "what the process of serve receives",
    "Spread": "sizes of one device",
}


def fields_by_class(folder: Path) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the name and the annotated names of every class in a folder."""
    for path in folder.rglob("*.py"):
        for node in nodes(tree(path)):
            if isinstance(node, ast.ClassDef):
                targets = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                yield node.name, frozenset(names)


def test_settings_are_declared_in_sections_only() -> None:
    """A class with four keys of a section is a second declaration of it."""
    sections = dict(fields_by_class(SOURCE / "config" / "sections"))
    copies = {
        f"{name} repeats {section}"
        for name, names in fields_by_class(SOURCE)
        for section, keys in sections.items()
        if name not in (*sections, *SAME_NAMES) and len(names & keys) >= 4
    }
    assert not copies, "take the section, or explain the class in SAME_NAMES"


def test_no_folder_has_more_than_twenty_modules() -> None:
    reasons = {
        "rewards/verifiers": "one file per verifier",
        "models/families": "one file per family",
    }
    sizes = Counter(relative(path.parent) for path in files() if path.name != "__init__.py")
    assert not {
        folder: size for folder, size in sizes.items() if size > 20 and folder not in reasons
    }


def test_tests_lie_in_small_folders_of_the_packages_that_they_test() -> None:
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("*.py")]
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert {path.parts[0] for path in paths if path.parent.parts} - packages == TESTS_OF_NO_PACKAGE
    assert not [path for path in paths if not path.parent.parts and path.name.startswith("test_")]
    sizes = Counter(path.parent.as_posix() for path in paths)
    assert not {folder: size for folder, size in sizes.items() if size > MAX_TEST_FILES}


def test_no_two_files_of_the_tests_have_the_same_name() -> None:
    names = Counter(path.name for folder in folders() for path in Path(folder).glob("*.py"))
    assert not {name for name, count in names.items() if count > 1}, "pytest imports by name"


def test_imports_go_down_only_and_light_packages_stay_light() -> None:
    """Check import-linter's contracts of pyproject.toml."""
    code = "import importlinter.cli as cli; exit(cli.lint_imports_command(['--no-cache']))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\nx = torch.cuda.is_available()", [".cuda"]),
        ("x.to('cuda:0')", ["'cuda:0'"]),
        ("x.to(f'npu:{rank}')", ["'npu:'"]),
        ("init(backend='gloo')", ["'gloo'"]),
        ("os.environ['ASCEND_RT_VISIBLE_DEVICES'] = '0'", ["'ASCEND_RT_VISIBLE_DEVICES'"]),
        ('"""Runs on cuda."""\nx = "how cuda differs"', []),
        ("x = platform.device", []),
    ],
)
def test_the_search_for_device_names_finds_them(source: str, names: list[str]) -> None:
    assert [name for _, name in device_names(ast.parse(source))] == names


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("import megatron.core as mcore, os", ["megatron", "os"]),
        ("def f():\n    from vllm import LLM", ["vllm"]),
        ("importlib.import_module('ray.util')", ["ray"]),
        ("from . import x", []),
    ],
)
def test_the_search_for_imports_finds_them(source: str, packages: list[str]) -> None:
    assert [name for _, name in list_imports(ast.parse(source))] == packages
