"""Modules in the place of Megatron's self-attention, one per kind of mixer."""
