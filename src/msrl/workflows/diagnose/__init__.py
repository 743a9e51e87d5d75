"""`msrl diagnose`: why sampling and training disagree."""
