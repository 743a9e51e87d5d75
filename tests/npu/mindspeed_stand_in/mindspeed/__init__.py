"""Stand-in of MindSpeed, used where MINDSPEED_HOME names no checkout.

It has only what Megatron cannot do without on NPUs.
"""
