"""Do index, slabs, files, bitmaps and counters agree? A list of what does not; exit code 1 if there is any.

Meant for a cache at rest: what is being saved this very moment may show as a finding.
Leaves out: mending, which the coordinator does at start and every 30 seconds.
"""

from __future__ import annotations

import argparse

import msgspec

from shmcache.check import check
from shmcache.errors import NoCoordinator
from shmcache.shm import Names

HELP = "walk index, slabs, files and counters, and list what does not agree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 where there are some. Raises NoCoordinator for a namespace that never was."""
    if not Names(arguments.namespace).directory.exists():
        raise NoCoordinator(arguments.namespace)
    findings = check(arguments.namespace)
    if arguments.json:
        print(msgspec.json.encode(findings).decode())
    else:
        for finding in findings:
            print(f"{finding.kind:8} {finding.name}: {finding.detail}")
        print(f"{len(findings)} findings")
    return 1 if findings else 0
