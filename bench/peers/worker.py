"""The process of one runtime. Run as a script by an interpreter that may know nothing of ours: standard library alone.

    python worker.py MODULE JSON

MODULE is `engine_NAME` beside this file. JSON has weights, threads, variant, text (load the tokenizer too) and perhaps
`first`, a prompt (text or ids) that one token is wanted for before anything else. Messages are a JSON object a line:

    -> {"ready": version}                     after {"first": true} if that was asked for
    <- {"prompts", "new", "samples"}          -> {"result": [seconds, number of new tokens]}
    <- {"memory": true}                       -> {"peak_bytes"}
    -> {"error": message}                     instead of any answer
    end of input ends the process

MODULE has a class Engine(weights, threads, variant, text) with `version`, `first(prompt)` (one token of text or ids)
and `run(prompts, new, samples) -> number of new tokens`, and perhaps `prepare(weights, folder, variant) -> path`, which
makes the file that this runtime needs: JSON then has weights, variant and `prepare`, a folder; `ready` is that path.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


def main(module_name: str, options: dict[str, Any]) -> None:
    # What libraries print on stdout must not get between the answers: it goes to stderr from here on.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        module = importlib.import_module(module_name)
        if "prepare" in options:
            answer(ready=module.prepare(options["weights"], options["prepare"], options["variant"]))
            return
        engine = module.Engine(options["weights"], options["threads"], options["variant"], options["text"])
        if "first" in options:
            engine.first(options["first"])
            answer(first=True)
        answer(ready=engine.version)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        return
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if job.get("memory"):
                answer(peak_bytes=peak_bytes())
                continue
            start = time.perf_counter()
            count = engine.run(job["prompts"], job["new"], job["samples"])
            answer(result=[time.perf_counter() - start, count])
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


def peak_bytes() -> int:
    """Largest resident set of this process so far (VmHWM)."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # some runtimes crash, or wait, when the interpreter takes them down in order
