"""Files of `torch.save`: archives, checksums, reading and writing."""
