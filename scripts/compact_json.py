"""Formats JSON with as many items on each line as fit, so that test data stay short and changes have small diffs.

    python scripts/compact_json.py FILE ...     rewrites files in place; values do not change
"""

import json
import sys

WIDTH = 160


class Number(float):
    """A number that keeps its original text."""

    def __new__(cls, text):
        self = super().__new__(cls, text)
        self.text = text
        return self


def one_line(value):
    if isinstance(value, Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(k)}: {one_line(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(one_line, value)) + "]"
    return text(value)


def text(value):
    return json.dumps(value, ensure_ascii=False)


def lines(value, indent):
    """Returns `value` as JSON, on one line if it fits. The first line of the text starts at column `indent`."""
    whole = one_line(value)
    if not value or not isinstance(value, (dict, list)) or len(whole) + indent <= WIDTH:
        return whole
    is_object = isinstance(value, dict)
    items = value.items() if is_object else ((None, v) for v in value)
    pad = " " * (indent + 1)
    rows, row = [], ""
    for key, item in items:
        prefix = f"{text(key)}: " if is_object else ""
        short = prefix + one_line(item)
        if len(pad) + len(short) > WIDTH and isinstance(item, (dict, list)):
            rows += [row] if row else []
            rows.append(prefix + lines(item, indent + 1))
            row = ""
        elif row and len(pad) + len(row) + len(short) + 2 > WIDTH:
            rows.append(row)
            row = short
        else:
            row = f"{row}, {short}" if row else short
    rows += [row] if row else []
    opening, closing = "{}" if is_object else "[]"
    return f"{opening}\n" + ",\n".join(pad + r for r in rows) + f"\n{' ' * indent}{closing}"


def dumps(value):
    """Returns a value as JSON, with a final newline."""
    return lines(value, 0) + "\n"


def rewrite(path):
    with open(path, encoding="utf-8", newline="") as f:
        before = f.read()
    after = dumps(json.loads(before, parse_float=Number))
    assert json.loads(after) == json.loads(before), path
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write(after)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        rewrite(path)
