"""Parts that supervised fine-tuning and reinforcement learning share."""
