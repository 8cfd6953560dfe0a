"""`python -m cudabench resources`: see cudabench.resources."""

import sys

from cudabench import resources
from cudabench.errors import BenchError, BenchMissing

if __name__ == "__main__":
    if sys.argv[1:] != ["resources"]:
        sys.exit("usage: PYTHONPATH=.:tests python -m cudabench resources")
    try:
        resources.write()
    except (BenchError, BenchMissing) as error:
        sys.exit(f"cudabench: {error}")
    spilling = [row for row in resources.read_table()[1].values() if row.spilled]
    print(f"{resources.TABLE.name}, {resources.PAGE.name} written; {len(spilling)} builds spill")
    for row in spilling:
        print(f"  sm_{row.arch} {row.kernel} {row.variant}: {row.spilled} bytes")
