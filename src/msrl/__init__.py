"""Post-training of language models (SFT, then GRPO-style RL) on Ascend NPUs, CUDA and CPU."""

__version__ = "0.1.0"
