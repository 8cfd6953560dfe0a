"""cupaged beside other runtimes, on the same file and prompts: `python -m cupaged.bench.peers --weights FILE`.

Nothing here installs anything. A runtime that cannot be imported is reported and left out; the others go on. Each runs
in a process of its own that stays loaded, with an interpreter that may be another one (`--python`), because some bring
packages that must never stand beside ours. They are imported by name (importlib), as nobody's dependency.

    workloads.py   what is asked for: prompts, lengths, streams
    catalog.py     which runtimes there are, and the files made for them
    process.py     one loaded runtime behind a pipe; worker.py is the other end of it
    engine_*.py    each runtime behind the same methods
    rounds.py      who runs when
    table.py       medians, ratios, goals, as text and JSON
"""
