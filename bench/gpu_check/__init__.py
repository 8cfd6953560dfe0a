"""Whether cupaged works on this GPU, and how fast: `make gpu-check`, or `python -m cupaged.bench.gpu_check --out FILE`.

Needs no network and less than five minutes. Each section runs in a process of its own: one that fails, hangs or breaks
the CUDA context is reported, and the others go on; what is not installed is said and left out. **No GPU has run it
yet**: its timings run in tests on a pretended GPU, where their figures mean nothing.

    __main__.py    the command          runner.py     sections one after another, within limits
    sections.py    which there are      report.py     rows, table, JSON
    sizes.py       shapes and amounts   clock.py      times on the device
    suites.py      tests on the device, compute-sanitizer
    attention.py, products.py, steps.py, swaps.py     timings of ours beside what bounds them
    rivals.py      PyTorch's attention and Transformers, where they are
"""
