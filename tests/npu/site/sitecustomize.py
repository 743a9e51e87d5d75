"""Load the kernels of the simulated NPU after torch_npu. Python imports this module at its start.

A hook waits for the import of torch_npu, because processes import it at different times: torch
imports it by itself, as on machines with NPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorchNpu(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of torch_npu, which load the kernels after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the usual spec of torch_npu with this loader, None for other modules."""
        if fullname != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Create the default module."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute torch_npu and load the kernels."""
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        import torch
        from npu_operators import register_operators

        torch.ops.load_library(os.environ["NPU_SIM_KERNELS"])
        register_operators()
        if os.environ.get("MINDSPEED_HOME"):
            import mindspeed_placeholders

            mindspeed_placeholders.install()


if "NPU_SIM_KERNELS" in os.environ:
    sys.meta_path.insert(0, _AfterTorchNpu())
