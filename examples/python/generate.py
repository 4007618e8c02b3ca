"""Continues a prompt, and prints the text while it is generated.

    python generate.py openai-community/gpt2 "One day"
"""

import sys

from gemmule import Generator

model, prompt = sys.argv[1:]
print(prompt, end="")
for part in Generator(model).generate(prompt, max_new_tokens=60, stream=True):
    print(part, end="", flush=True)
print()
