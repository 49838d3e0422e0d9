"""Two users of one host train, and each attacks the other's run: `python -m scripts.soak.other_users` (as root).

Prints the table of what they tried and saw. Exits with 1 if an attempt got anywhere, or if a run failed.
"""

from __future__ import annotations

import os
import sys

from scripts.soak.results import record
from tests.support.hostile_users import ALLOWED, HARMLESS, Side, duel, shared_folder, table

SECTION = "Another user of the host"


def reached(side: Side) -> list[str]:
    """Returns the attempts that got anywhere, other than bytes that a port takes before it closes the connection."""
    gone_through = [what for what, saw in side.rows if not saw.startswith(HARMLESS) and what not in ALLOWED]
    return [what for what in gone_through if "to a port" not in what]


def main() -> int:
    if os.geteuid():
        sys.exit("needs root, to become other users")
    found: dict[str, list[Side]] = {}
    for strategy in ("dpsgd", "adpsgd"):
        with shared_folder() as folder:
            found[strategy] = duel(folder, strategy)
    print(table(found))
    bad = False
    for strategy, sides in found.items():
        through = [what for side in sides for what in reached(side)]
        attempts = sum(len(side.rows) for side in sides)
        record(SECTION, strategy, {"attempts": attempts, "got through": len(through)})
        bad = bad or bool(through) or any(side.status for side in sides)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
