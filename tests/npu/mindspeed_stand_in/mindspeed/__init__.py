"""Stand-in of MindSpeed, used where MINDSPEED_HOME names no checkout. It patches nothing."""
