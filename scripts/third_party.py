"""Writes the licences of the crates in a binary: third_party.py FEATURES FILE

Build and dev dependencies are left out. The sources of the crates must already be downloaded, as they are after a build.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys

NAMES = re.compile(r"(licen[cs]e|copying|notice|unlicense|copyright)", re.IGNORECASE)
ENDINGS = {"", ".md", ".txt", ".apache", ".mit", ".bsd", ".zlib"}


def metadata(features: str) -> dict:
    host = re.search(r"^host: (.*)$", subprocess.check_output(["rustc", "-vV"], text=True), re.MULTILINE).group(1)
    command = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={host}"]
    command += [f"--features={features}", "--manifest-path=Cargo.toml"]
    return json.loads(subprocess.check_output(command))


def linked(data: dict) -> list[dict]:
    """Returns the third-party packages that the binary contains, sorted by name."""
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    waiting = [next(id for id in data["workspace_members"] if re.search(r"[#/]gemmule[@#]", id))]
    seen = set(waiting)
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_linked and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    packages = [package for package in data["packages"] if package["id"] in seen and package["source"]]
    return sorted(packages, key=lambda package: (package["name"], package["version"]))


def texts(package: dict) -> list[str]:
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [f for f in sorted(folder.iterdir()) if f.is_file() and NAMES.match(f.name)]
    files = [f for f in files if f.suffix.lower() in ENDINGS or NAMES.match(f.suffix[1:])]
    return [file.read_text(errors="replace").strip() for file in files]


def main() -> None:
    features, out = sys.argv[1:]
    packages = linked(metadata(features))
    assert len(packages) > 100, "the list of crates is too short"
    by_text = collections.defaultdict(list)
    for package in packages:
        for text in texts(package):
            by_text[text].append(f"{package['name']} {package['version']}")
    with open(out, "w") as file:
        file.write("gemmule contains the crates below. Their licences follow the list.\n\n")
        for package in packages:
            file.write(f"{package['name']} {package['version']}: {package['license'] or package['license_file']}")
            file.write(f", {package['repository']}\n" if package["repository"] else "\n")
        for text, names in sorted(by_text.items(), key=lambda item: item[1]):
            file.write(f"\n{'=' * 100}\n{', '.join(names)}\n{'-' * 100}\n\n{text}\n")


if __name__ == "__main__":
    main()
