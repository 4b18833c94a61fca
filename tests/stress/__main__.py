"""`python tests/stress`: the long run. Its last line is JSON; other numbers by --hits, --kills and so on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from run import Scale, main

parser = argparse.ArgumentParser(prog="tests/stress", description=__doc__)
for name, default in Scale()._asdict().items():
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
sys.exit(main(Scale(**vars(parser.parse_args()))))
