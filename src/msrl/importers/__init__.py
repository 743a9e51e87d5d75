"""Import of files and command lines of MindSpeed-RL, MindSpeed-LLM, ROLL and LightRFT.

The files in `tables/`, one per system, map every key to a native key or give the reason why it has
none. One module per system computes the values that depend on several keys. Sources: the guides of
the systems, and their code where the two differ.
"""
