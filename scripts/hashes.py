#!/usr/bin/env python3
"""Writes the hashes of pinned packages into requirements files, for `pip install --require-hashes`.

    python scripts/hashes.py scripts/requirements.txt tests/clients/requirements.txt

For each `NAME==VERSION`, pip is asked which wheel it would install for CPython 3.11 to 3.13 on x86_64 and aarch64, with new and
old versions of glibc. Comments stay as they are; old hashes are replaced.
"""

import json, re, subprocess, sys, tempfile

PYTHONS = ["3.11", "3.12", "3.13"]
MACHINES = ["x86_64", "aarch64"]
# The newest 2.x whose wheels are taken. Not every package has wheels for the oldest.
GLIBCS = [42, 31, 28, 17]


def platforms(machine, glibc):
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    tags += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]
    return [argument for tag in tags for argument in ("--platform", tag)]


def wheels(pins, python, machine, glibc):
    """The hashes of the wheels that pip would install by pin, or None where it finds none for one of them."""
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--only-binary", ":all:", "--target", target, "--report", "-"]
        command += ["--implementation", "cp", "--python-version", python, *platforms(machine, glibc), *pins]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    found = json.loads(done.stdout)["install"]
    return {
        normal(f"{item['metadata']['name']}=={item['metadata']['version']}"): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in found
    }


def normal(pin):
    name, version = pin.split("==")
    return re.sub("[-_.]+", "-", name).lower() + "==" + version


def main(file):
    lines = [line.rstrip(" \\\n") for line in open(file) if not line.lstrip().startswith("--hash")]
    pins = [line for line in lines if line and not line.startswith("#")]
    hashes = {normal(pin): set() for pin in pins}
    for python in PYTHONS:
        for machine in MACHINES:
            known = set()
            for glibc in GLIBCS:
                found = wheels(pins, python, machine, glibc)
                if found is None:
                    found = {}
                    for pin in pins:
                        found.update(wheels([pin], python, machine, glibc) or {})
                for pin, digest in found.items():
                    hashes[pin].add(digest)
                    known.add(pin)
            missing = set(hashes) - known
            if missing:
                sys.exit(f"CPython {python} on {machine} has no wheel of {', '.join(sorted(missing))}")
    with open(file, "w") as out:
        for line in lines:
            digests = sorted(hashes[normal(line)]) if line in pins else []
            out.write(" \\\n    ".join([line, *(f"--hash=sha256:{digest}" for digest in digests)]) + "\n")


for file in sys.argv[1:] or sys.exit(__doc__):
    main(file)
