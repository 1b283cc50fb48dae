"""``python3 -m demo_project``: the whole demo, on a machine that has Python and nothing else."""

import sys

from demo_project.bootstrap import run_manage

if __name__ == "__main__":
    run_manage("demo", *sys.argv[1:])
