"""What a change does to the generated sources in snapshots/cuda, each distinct piece once, for whoever reviews it.

A template that changes a line changes all its exemplars alike. Pieces that are equal but for numbers and symbols are
shown once, with how many files have them. A new exemplar is shown as what it has that the nearest one before has not.

    python3 scripts/review_sources.py [BASE]        # BASE is HEAD by default; the working tree is compared with it
"""
import difflib, re, subprocess, sys
from collections import defaultdict
from pathlib import Path

ROOT, FOLDER = Path(__file__).resolve().parent.parent, "snapshots/cuda"
BASE = sys.argv[1] if len(sys.argv) > 1 else "HEAD"


def git(*command):
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def plain(line):
    return re.sub(r"\w*\d\w*", "#", line)


def pieces(old, new):
    """Runs of changed lines, with a line before and behind them."""
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(1):
        piece = []
        for tag, a, b, c, d in group:
            if tag == "equal":
                piece += [" " + line for line in old[a:b]]
            else:
                piece += ["-" + line for line in old[a:b]] + ["+" + line for line in new[c:d]]
        yield piece


def main():
    before = set(git("ls-tree", "-r", "--name-only", BASE, f"{FOLDER}/").split())
    now = {str(file.relative_to(ROOT)) for file in (ROOT / FOLDER).rglob("*.snap")}
    text = lambda file: git("show", f"{BASE}:{file}").splitlines()
    changed = set(git("diff", "--name-only", BASE, "--", FOLDER).split()) & before & now
    old = {file: text(file) for file in sorted(before if now - before else changed)}
    found, n_lines = defaultdict(list), 0
    for file in sorted(changed | (now - before)):
        lines = (ROOT / file).read_text().splitlines()
        nearest = file if file in changed else max(old, key=lambda other: len(set(old[other]) & set(lines)) / len(set(old[other]) | set(lines)))
        for piece in pieces(old[nearest], lines):
            n_lines += len(piece)
            found[tuple(map(plain, piece))].append((file, nearest, piece))
    for places in sorted(found.values(), key=len, reverse=True):
        file, nearest, piece = places[0]
        beside = "" if file == nearest else f" beside {Path(nearest).name}"
        alike = f", and {len(places) - 1} alike" if len(places) > 1 else ""
        print(f"\n=== {Path(file).name}{beside}{alike}")
        print("\n".join(piece))
    for file in sorted(before - now):
        print(f"\n=== {Path(file).name} is gone")
    print(f"\n{len(changed)} changed, {len(now - before)} new, {len(before - now)} gone: {sum(len(piece) for piece in found)} lines to read of {n_lines}")


main()
