"""GGUF files of llama.cpp and Ollama, read as Hugging Face folders."""
