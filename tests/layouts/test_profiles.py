"""Profiles of devices: packaged ones, and files of users that are read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from msrl.errors import ManyErrors, MsrlError
from msrl.layouts import profile as profiles
from msrl.layouts.profile import profile_names, read_profile
from msrl.platforms.cuda import peak_flops as cuda_peak
from msrl.platforms.npu import peak_flops as npu_peak
from support import assert_mentions

FILES = Path(profiles.__file__).parent / "profiles"


def test_packaged_profiles_are_not_measured_and_agree_with_the_peaks_of_the_platforms():
    assert set(profile_names()) == {"a100", "h100", "h200", "gb200", "ascend-a2", "ascend-a3"}
    peaks = {
        "a100": cuda_peak("NVIDIA A100-SXM4-80GB"),
        "h100": cuda_peak("NVIDIA H100 80GB HBM3"),
        "h200": cuda_peak("NVIDIA H200"),
        "ascend-a2": npu_peak("Ascend910B3"),
        "ascend-a3": npu_peak("Ascend910_9382"),
    }
    for name in profile_names():
        assert not read_profile(name).is_measured
        if name in peaks:
            assert read_profile(name).flops("bfloat16") == peaks[name]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"memory_bytes": {"value": 64e9}}, "memory_bytes.source"),
        ({"memory_bytes": {"value": -1.0, "source": "x"}}, "memory_bytes.value"),
        ({"memory_bytes": 64e9}, "memory_bytes"),
        ({"speed": 1}, "speed"),
        ({"platform": "auto"}, "platform"),
    ],
)
def test_a_profile_with_a_wrong_or_unknown_key_is_refused(change: dict, key: str, tmp_path: Path):
    values = yaml.safe_load((FILES / "h100.yaml").read_text())
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({**values, **change}))
    with pytest.raises(ManyErrors) as error:
        read_profile(str(file))
    assert len(error.value.messages) == 1
    assert_mentions(str(error.value), str(file), key)


def test_a_name_that_is_no_profile_and_a_missing_dtype_are_refused(tmp_path: Path):
    with pytest.raises(MsrlError) as error:
        read_profile("h10")
    assert_mentions(str(error.value), "h10", "h100")
    with pytest.raises(MsrlError) as error:
        read_profile(str(tmp_path / "none.yaml"))
    assert_mentions(str(error.value), "none.yaml", "exist")
    with pytest.raises(MsrlError) as error:
        read_profile("ascend-a2").flops("float32")
    assert_mentions(str(error.value), "float32", "bfloat16")
