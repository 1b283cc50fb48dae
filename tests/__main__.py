"""``python3 -m tests``: the test suite, on a machine that has Python and nothing else."""

import sys

from demo_project.bootstrap import run_module

if __name__ == "__main__":
    run_module("test", "pytest", *sys.argv[1:])
