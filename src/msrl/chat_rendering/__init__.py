"""Rendering of the chat templates of models, which are code of strangers."""
