"""`msrl doctor --platform npu` on recorded version files, outputs and variables. No NPU is used.

The recordings have the form of outputs in public reports: of A2 in 1Panel-dev/1Panel#9472 and
Project-HAMi/HAMi-WebUI#47, of A3 in vllm-project/vllm-ascend#12980, of CANN 8.3 in #4621 there.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

import pytest

from msrl.platforms import _npu_stack as stack
from support import assert_mentions
from test_cli import msrl

HOME = "/usr/local/Ascend/cann"
TOOLKIT = f"{HOME}/{platform.machine()}-linux/ascend_toolkit_install.info"
KERNELS = f"{HOME}/opp/version.info"
OPS = f"{HOME}/{platform.machine()}-linux/ascend_ops_install.info"
SHARED_TOOLKIT = f"{HOME}/share/info/ascend_toolkit_install.info"
HEALTHY = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.7        43                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3331 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 90.1        41                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3330 / 65536         |
+===========================+===============+====================================================+
"""
# Two chips of an A3 device, and a process.
A3 = """\
+------------------------------------------------------------------------------------------------------------------+
| npu-smi 26.0.rc2                            Version: 26.0.rc2                                                    |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
+------------------------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -                    34                      0    / 0                |
| 1     1                   | 0000:9F:00.0  | 0                    0    / 0                2874 / 65536            |
+===========================+===============+======================================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)                        |
+===========================+===============+======================================================================+
| 0       0                 | 19341         | VLLMWorker_TP            | 58472                                     |
+===========================+===============+======================================================================+
"""  # noqa: E501 - an output
TOOLKIT_8_3 = """\
package_name=Ascend-cann-toolkit
version=8.3.RC2
innerversion=V100R001C23SPC002B210
compatible_version=[V100R001C15],[V100R001C18],[V100R001C19],[V100R001C20],[V100R001C21],[V100R001C23]
arch=aarch64
os=linux
"""
COMPLETE = stack.Facts(
    environment={"ASCEND_HOME_PATH": HOME, "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest"},
    files={
        stack.DRIVER: "Version=25.5.0\nascendhal_version=7.35.23\naicpu_version=1.0\n"
        "tdt_version=1.0\nInnerversion=V100R001C23SPC002B212\n",
        stack.FIRMWARE: "Version=7.8.0.5.216\nfirmware_version=1.0\n",
        TOOLKIT: "package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n",
        KERNELS: "Version=9.1.0.1.220\nversion_dir=9.1.0\ntimestamp=20260601_194044950\n"
        'required_package_amct_acl_version="9.1"\n',
        stack.PORT_RANGE: "32768\t60999\n",
        stack.RESERVED_PORTS: "60000-60255,61000\n",
    },
    outputs={stack.NPU_SMI: HEALTHY},
    packages={
        "torch": "2.10.0+cpu",
        "torch-npu": "2.10.0.post4",
        "mindspeed": "0.16.0",
        "vllm": "0.23.0+empty",
        "vllm-ascend": "0.23.0",
    },
)


def _with_entries(
    field: str, changes: Mapping[str, str | None], facts: stack.Facts = COMPLETE
) -> stack.Facts:
    """Return the facts with other entries; None removes an entry."""
    entries = {**getattr(facts, field), **changes}
    known = {name: value for name, value in entries.items() if value is not None}
    return dataclasses.replace(facts, **{field: known})


def test_a_complete_stack_has_no_problem():
    findings = stack.diagnose(COMPLETE)
    assert {finding.level for finding in findings} == {"ok"}, findings
    texts = {finding.what: finding.text for finding in findings}
    assert texts["driver"] == "25.5.0" and texts["CANN"] == "9.1.0"
    assert_mentions(texts["npu-smi"], 2, "910B3")


FAULTS: dict[str, tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = {
    "driver": ("files", {stack.DRIVER: None}, "wrong", "driver", ("cat", "mount")),
    "firmware in a container": ("files", {stack.FIRMWARE: None}, "note", "firmware", ("driver",)),
    "no npu-smi": ("outputs", {stack.NPU_SMI: None}, "wrong", "npu-smi", ("PATH",)),
    "driver not loaded": (
        "outputs",
        {
            stack.NPU_SMI: "DrvMngGetConsoleLogLevel failed. (ret=4)\n"
            "dcmi module initialize failed. ret is -8005\n"
        },
        "wrong",
        "npu-smi",
        ("-8005", "HwHiAiUser", "Reboot"),
    ),
    "container without the driver's files": (
        "outputs",
        {stack.NPU_SMI: "npu get board type failed. ret is -9005\n"},
        "wrong",
        "npu-smi",
        ("-9005", "mount /usr/local/dcmi"),
    ),
    "devices in use": (
        "outputs",
        {
            stack.NPU_SMI: "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n"
            "dcmi model initialized failed, because the device is used. ret is -8020\n"
        },
        "wrong",
        "npu-smi",
        ("-8020", "container"),
    ),
    "sick device": (
        "outputs",
        {stack.NPU_SMI: HEALTHY.replace("OK ", "Alarm", 1)},
        "wrong",
        "npu-smi",
        ("NPU 0", "Alarm", "health"),
    ),
    "no device": ("outputs", {stack.NPU_SMI: "+---+\n"}, "wrong", "npu-smi", ("dmesg",)),
    "variables of CANN": (
        "environment",
        {"ASCEND_HOME_PATH": None},
        "wrong",
        "CANN",
        ("ASCEND_HOME_PATH", "set_env.sh"),
    ),
    "no toolkit": ("files", {TOOLKIT: None}, "wrong", "CANN", ("toolkit", "9.1")),
    "older release": (
        "files",
        {TOOLKIT: "version=8.5.0\n", KERNELS: "Version=8.5.0.1\n"},
        "note",
        "CANN",
        ("8.5.0", "9.1"),
    ),
    "no kernels": ("files", {KERNELS: None}, "wrong", "CANN kernels", ("operator", "9.1.0")),
    "other kernels": (
        "files",
        {KERNELS: "Version=8.5.0\n"},
        "wrong",
        "CANN kernels",
        ("8.5.0", "9.1.0", "release"),
    ),
    "NNAL": ("environment", {"ATB_HOME_PATH": None}, "wrong", "NNAL", ("atb/set_env.sh",)),
    "torch": (
        "packages",
        {"torch": "2.13.0+cpu"},
        "wrong",
        "torch_npu build",
        ("2.10.0.post4", "2.13.0", "pip install torch==2.10.0"),
    ),
    "no MindSpeed": ("packages", {"mindspeed": None}, "wrong", "MindSpeed", ("core_r0.16.0",)),
    "MindSpeed branch": (
        "packages",
        {"mindspeed": "0.12.1"},
        "wrong",
        "MindSpeed",
        ("0.12.1", "git checkout core_r0.16.0"),
    ),
    "no vllm-ascend": ("packages", {"vllm-ascend": None}, "wrong", "vllm-ascend", ("NPU",)),
    "vllm-ascend": (
        "packages",
        {"vllm-ascend": "0.18.0"},
        "wrong",
        "vllm-ascend",
        ("0.18.0", "0.23.0"),
    ),
    "ports": (
        "files",
        {stack.RESERVED_PORTS: "60000-60015\n"},
        "note",
        "HCCL ports",
        ("60000-60255", "sysctl -w"),
    ),
    "segments": (
        "environment",
        {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
        "note",
        "PYTORCH_NPU_ALLOC_CONF",
        ("ranks", "engines"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_finding_with_a_remedy(name):
    field, changes, level, what, words = FAULTS[name]
    findings = stack.diagnose(_with_entries(field, changes))
    (finding,) = (finding for finding in findings if finding.level != "ok")
    assert (finding.level, finding.what) == (level, what)
    assert_mentions(finding.text, *words)


@pytest.mark.parametrize(
    ("output", "devices"),
    [
        (A3, "2 of Ascend910,"),
        (HEALTHY.replace("910B3  ", "910B4-1"), "2 of 910B4-1,"),
        (HEALTHY.replace("93.7", "NA  "), "2 of 910B3,"),
    ],
    ids=["A3", "name with a hyphen", "no power"],
)
def test_all_devices_are_counted(output, devices):
    (finding,) = stack._check_devices(_with_entries("outputs", {stack.NPU_SMI: output}))
    assert finding.level == "ok" and finding.text.startswith(devices)


@pytest.mark.parametrize(
    "files",
    [
        # The operators of CANN 8 have a version besides the release's.
        {TOOLKIT: TOOLKIT_8_3, KERNELS: "Version=7.8.0.0.201\nversion_dir=8.3.RC2\n"},
        {TOOLKIT: TOOLKIT_8_3, KERNELS: None, OPS: TOOLKIT_8_3.replace("toolkit", "910b-ops")},
        {TOOLKIT: None, SHARED_TOOLKIT: TOOLKIT_8_3, KERNELS: "version_dir=8.3.RC2\n"},
    ],
    ids=["version of a component", "operators of CANN 9", "shared folder"],
)
def test_the_release_of_toolkit_and_operators_is_read_from_each_layout(files):
    findings = {finding.what: finding for finding in stack.diagnose(_with_entries("files", files))}
    assert findings["CANN"].text.startswith("8.3.RC2")
    assert (findings["CANN kernels"].level, findings["CANN kernels"].text) == ("ok", "8.3.RC2")


def test_the_release_of_the_driver_precedes_that_of_a_component():
    facts = _with_entries("files", {stack.DRIVER: "Version=7.35.23\npackage_version=26.0.rc1\n"})
    assert stack.diagnose(facts)[0].text == "26.0.rc1"


def test_ports_follow_the_base_port_of_the_user():
    facts = _with_entries("environment", {"HCCL_IF_BASE_PORT": "20000"})
    assert stack.diagnose(facts)[-2].text == "20000-20255"


def test_a_limit_of_locked_memory_is_noted():
    findings = stack.diagnose(dataclasses.replace(COMPLETE, locked_bytes=65536))
    (finding,) = (finding for finding in findings if finding.level != "ok")
    assert finding.what == "locked memory"
    assert_mentions(finding.text, "64 KB", "ulimit -l")


def test_the_doctor_explains_all_missing_parts_of_a_machine_without_an_npu(capsys):
    assert msrl("doctor", "--no-imports", "--platform", "npu") == 2
    out = capsys.readouterr().out
    if stack.read_facts().files.get(stack.DRIVER):
        pytest.skip("this machine has an Ascend driver")
    for what in ("driver", "npu-smi", "CANN", "NNAL", "MindSpeed", "vllm-ascend"):
        assert f"wrong  {what}: " in out
