"""Megatron's model as msrl builds it."""
