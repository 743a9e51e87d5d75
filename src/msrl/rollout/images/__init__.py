"""Images in vLLM: classes of vision-language models without torchvision, and rendered inputs."""
