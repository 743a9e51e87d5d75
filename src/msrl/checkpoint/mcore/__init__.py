"""Megatron checkpoints in MindSpeed's folders and files."""
