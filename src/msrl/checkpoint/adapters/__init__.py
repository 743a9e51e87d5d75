"""LoRA adapters: merging, Megatron files and PEFT folders."""
