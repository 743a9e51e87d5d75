"""Import torch_npu's redirection of `torch.cuda`, which the real adaptor imports first."""

from torch_npu.contrib import transfer_to_npu

__all__ = ("transfer_to_npu",)
