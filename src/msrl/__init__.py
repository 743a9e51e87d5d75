"""msrl: from a Hugging Face model to a reinforcement-learned one, on Ascend NPUs, CUDA and CPU."""

__version__ = "0.1.0"
