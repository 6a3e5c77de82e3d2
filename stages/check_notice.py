"""Lines that the preflight check writes to standard error while it works, for whoever waits for it."""

from typing import Final

#: How such a line begins; what follows is for people.
NOTICE: Final = "note: "
