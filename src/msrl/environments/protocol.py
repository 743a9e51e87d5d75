"""Messages on the control socket (SOCK_SEQPACKET) between a pool and its fork server.

The pool sends COMMAND messages (kind, number of an episode): OPEN with the descriptor of the
episode's channel, and KILL. The server sends EXITED messages (number, wait status); a negative
status is the errno of a fork that failed.
"""

from __future__ import annotations

import struct

COMMAND = struct.Struct("<BQ")
EXITED = struct.Struct("<Qi")
OPEN, KILL = 1, 2
