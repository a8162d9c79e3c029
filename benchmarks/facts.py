"""What every result names: date, machine, commit and command."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
AMD_FAMILIES = {"23": " (Zen, Zen 2)", "25": " (Zen 3, Zen 4)", "26": " (Zen 5)"}
"""Virtual machines hide the model, but not the family."""
GIB = 1 << 30


def output_of(*command: str) -> list[str]:
    """The lines that a program writes; none where it is not there, or fails."""
    if shutil.which(command[0]) is None:
        return []
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.splitlines()


def hardware(device: str) -> str:
    """The machine in words. device: cpu or cuda, with a number or without; SystemExit where there is no GPU."""
    import torch

    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("this needs an NVIDIA GPU, and torch sees none")
        return f"one {torch.cuda.get_device_name(device)}"
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in words.split("\n\n")[0].splitlines() if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in fields.items()}
    name = cpu.get("model name", platform.processor() or platform.machine())
    memory = Path("/proc/meminfo").read_text().split()[1] if Path("/proc/meminfo").exists() else "0"
    family = AMD_FAMILIES.get(cpu.get("cpu family", ""), "") if "AMD" in name else ""
    threads = torch.get_num_threads()
    used = "" if threads == os.cpu_count() else f", torch on {threads} threads"
    return f"{os.cpu_count()} cores of an {name}{family}, {round(int(memory) * 1024 / GIB)} GiB{used}"


def facts_of(module: str, machine: str) -> dict[str, str]:
    """Date, machine, how busy it was when this began, commit, command and torch's version."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": machine,
        "load": f"{os.getloadavg()[0]:.1f}",
        "commit": "".join(output_of("git", "describe", "--always", "--dirty", "--abbrev=8")) or "not in git",
        "command": f"python -m {module} {_arguments()}".strip(),
        "torch": metadata.version("torch"),
    }


def paragraph(facts: Mapping[str, str]) -> str:
    """All that in words."""
    return (
        f"{facts['date']}, {facts['hardware']}, load average {facts['load']} at the start; torch {facts['torch']},"
        f" commit {facts['commit']}:\n`{facts['command']}`\n"
    )


def say(module: str, device: str = "cpu") -> None:
    """Print all that above a benchmark's figures. Raises SystemExit where there is no such device."""
    print(paragraph(facts_of(module, hardware(device))), flush=True)


def _arguments() -> str:
    """The command line's, without the folder for the results: it says nothing of them."""
    words = sys.argv[1:]
    while "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(words)
