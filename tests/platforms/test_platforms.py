"""Contract of every platform, and `prepare` on the platforms that this machine supports."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

from msrl import registry
from msrl.errors import MsrlError
from msrl.platforms import NAMES, auto_names, get, resolve
from msrl.platforms.base import is_installed
from support import assert_mentions, mentions
from test_cli import msrl

PLATFORMS = registry.names(registry.PLATFORMS)


def _python(code: str, *, path: Path | None = None, **env: str) -> str:
    """Return the output of a new process, which imports and ends quickly."""
    code = f"import gc; gc.disable()\nfrom msrl.processes.interpreter import quick_end\n{code}\n"
    code += "with quick_end(): pass"
    folders = filter(None, [str(path or ""), os.environ.get("PYTHONPATH")])
    variables = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_platform_file_can_be_chosen_by_name():
    assert NAMES == PLATFORMS and set(auto_names()) <= set(NAMES)
    assert auto_names() == ("npu", "cuda", "cpu")


@pytest.mark.parametrize("value", [None, "cpu"])
def test_a_platform_file_without_a_platform_is_refused_by_name(monkeypatch, value):
    file = ModuleType("own")
    file.__file__, file.PLATFORM = "own.py", value
    monkeypatch.setattr(registry, "load", lambda *_, **__: file)
    with pytest.raises(MsrlError, match=mentions("own.py", "PLATFORM")):
        get("own")


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_defines_the_required_attributes(name):
    platform = get(name)
    assert platform.name == name
    assert platform.collective_backend and platform.ray_resource
    missing = platform.missing()
    assert missing is None or len(missing.splitlines()) == 1
    environments = (platform.worker_environment(2), platform.engine_environment())
    assert all(
        isinstance(key, str) and isinstance(value, str)
        for env in environments
        for key, value in env.items()
    )


def test_cpu_threads_spin_briefly_unless_a_process_has_only_one(monkeypatch):
    monkeypatch.setattr(type(get("cpu")), "device_count", lambda self: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for environment in (get("cpu").worker_environment, get("cpu").engine_environment):
        shared, single = environment(2), environment(4)
        assert (
            shared["OMP_NUM_THREADS"] == "2"
            and 0 < int(shared["GOMP_SPINCOUNT"]) < 1_000_000
            and shared["OMP_WAIT_POLICY"] == "PASSIVE"
        )
        assert single["OMP_NUM_THREADS"] == "1" and "GOMP_SPINCOUNT" not in single


@pytest.mark.parametrize(
    ("variable", "num_threads"),
    [("1", "1"), ("3,2", "3"), ("100", "4"), ("0", "1"), ("", "4"), ("all", "4")],
)
def test_omp_num_threads_of_the_user_is_the_largest_number_of_threads(
    variable, num_threads, monkeypatch
):
    monkeypatch.setattr(type(get("cpu")), "device_count", lambda self: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    for environment in (get("cpu").worker_environment(1), get("cpu").engine_environment(1)):
        assert environment["OMP_NUM_THREADS"] == num_threads


# glibc's mallinfo2 (malloc.h): the fourth number counts regions that are mapped one by one.
_MAPPED = """
import ctypes, torch
info = ctypes.CDLL(None).mallinfo2
info.restype = type("Info", (ctypes.Structure,), {"_fields_": [("n", ctypes.c_size_t * 10)]})
before = info().n[3]
large = torch.ones(64 << 18)
print(info().n[3] - before)
"""


@pytest.mark.full
@pytest.mark.slow
def test_processes_that_compute_on_cpu_keep_the_memory_of_large_tensors():
    assert _python(_MAPPED, GLIBC_TUNABLES="").strip() == "1", "glibc maps 64 MiB by default"
    assert _python(_MAPPED, **get("cpu").worker_environment(1)).strip() == "0"


def test_auto_selects_the_first_supported_platform():
    expected = next(name for name in auto_names() if get(name).missing() is None)
    assert resolve("auto").name == expected


def test_without_a_supported_platform_the_message_lists_what_each_lacks(monkeypatch, capsys):
    for name in PLATFORMS:
        monkeypatch.setattr(
            type(get(name)), "missing", lambda self: f"no {self.name}; run: something"
        )
    expected = "; ".join(f"{name}: no {name}; run: something" for name in auto_names())
    with pytest.raises(MsrlError, match=mentions("cluster.platform=auto: ", expected)):
        resolve("auto")
    assert msrl("doctor", "--no-imports") == 2
    assert_mentions(" ".join(capsys.readouterr().out.split()), "platform", expected)


def test_cuda_without_megatron_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(type(get("cuda")), "missing", lambda self: None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "megatron.core" else find_spec(name, package),
    )
    with pytest.raises(
        MsrlError, match=mentions("cluster.platform=cuda", "Megatron", "pip install 'msrl[cuda]'")
    ):
        get("cuda").prepare()


@pytest.mark.parametrize("name", [name for name in PLATFORMS if get(name).missing() is not None])
def test_an_unsupported_platform_is_refused_with_a_remedy(name):
    with pytest.raises(MsrlError, match=rf"^cluster\.platform={name}: \S+"):
        resolve(name)
    with pytest.raises(MsrlError):
        get(name).prepare()


def test_a_folder_in_the_working_directory_is_no_installed_package(tmp_path, monkeypatch):
    (tmp_path / "mindspeed").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("mindspeed")
    (tmp_path / "mindspeed" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed("mindspeed")


def test_the_npu_platform_lists_all_missing_packages():
    message = get("npu").missing()
    if message is None:
        pytest.skip("this machine has an Ascend stack")
    assert_mentions(message, "torch_npu 2.10.0.post4", "MindSpeed core_r0.16.0", "installation")


@pytest.mark.slow
def test_the_npu_platform_hides_the_command_line_and_imports_in_order(tmp_path):
    """Stand-ins of the two modules record what they see; no NPU is involved."""
    note = (
        "import json, os, sys; open(os.environ['SEEN'], 'a').write(json.dumps([__name__, "
        "sys.argv]) + '\\n')\n"
    )
    (tmp_path / "torch_npu.py").write_text(note)
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("")
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text(note)
    code = (
        "import sys; sys.argv = ['prog', '--load', 'x']; from msrl.platforms import get; "
        "get('npu').prepare(); print(sys.argv)"
    )
    output = _python(
        code, path=tmp_path, SEEN=str(tmp_path / "seen"), ASCEND_HOME_PATH="/somewhere"
    )
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen == [["torch_npu", ["prog"]], ["mindspeed.megatron_adaptor", ["prog"]]]
    assert output == "['prog', '--load', 'x']"


@pytest.mark.slow
def test_cpu_redirects_cuda_only_in_a_process_that_calls_prepare():
    look = "print(torch.cuda.current_device is current_device, torch.tensor(1.0).type())\n"
    before = "import torch; current_device = torch.cuda.current_device\n"
    prepare = "from msrl.platforms import get; get('cpu').prepare(); get('cpu').prepare()\n"
    after = (
        "print(torch.cuda.current_device(), torch.zeros(2, device='cuda').device, "
        "torch.ones(1).cuda().device)"
    )
    assert _python(before + look + prepare + look + after).splitlines() == [
        "True torch.FloatTensor",
        "False torch.cuda.FloatTensor",
        "cpu cpu cpu",
    ]


@pytest.mark.full
@pytest.mark.slow
def test_megatron_is_imported_unmodified_after_prepare():
    code = (
        "from msrl.platforms import get; get('cpu').prepare(); import megatron.core; "
        "print(megatron.core.__version__)"
    )
    version = _python(code).partition("+")[0]  # in a checkout, Megatron adds the commit
    assert SpecifierSet(get("cpu").stack["megatron-core"]).contains(version)


@pytest.mark.full
@pytest.mark.slow
def test_megatron_finds_no_wandb_in_a_rank():
    code = (
        "from msrl.trainer.launch import skip_wandb; skip_wandb(); "
        "from megatron.core.inference.contexts import dynamic_context; import sys; "
        "print([name for name in sys.modules if name.startswith('wandb.')])"
    )
    assert _python(code) == "[]"
