"""Files and command lines of other systems, read as msrl's own configuration: MindSpeed-RL, MindSpeed-LLM, ROLL, LightRFT.

What every key becomes, or why it cannot, stands in `tables/`, one file per system; one module per system does the arithmetic that
a table cannot say. Sources: the systems' guides, and their code where it differs from the guide.
"""
