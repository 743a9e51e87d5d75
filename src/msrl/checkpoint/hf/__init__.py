"""Hugging Face folders: weights, manifests, expert stacks and pass-through tensors."""
