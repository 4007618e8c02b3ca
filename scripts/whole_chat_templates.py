"""Writes `tests/references/whole_chat_templates.json`: conversations rendered by transformers with published chat templates.

Each template of `tests/references/chat_templates` renders each conversation of `CONVERSATIONS` with each of its options. If a case
has no text, transformers or the template refuses the conversation.

    python3 scripts/whole_chat_templates.py
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

import compact_json

FOLDER = Path(__file__).parent.parent / "tests" / "references"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

SYSTEM = {"role": "system", "content": "Answer in one short sentence."}
USER = {"role": "user", "content": "What is the weather in Graz & Linz?\n\n<b>Now</b>"}
ANSWER = {"role": "assistant", "content": "It rains in both."}
THOUGHT = {"role": "assistant", "content": "It is \"wet\".", "reasoning_content": "Rain is wet.\nSo it is wet."}
THINKS = {"role": "assistant", "content": "<think>\nIt rains.\n</think>\n\nIt is wet."}
MORE = {"role": "user", "content": "  And tomorrow?  "}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Graz", "days": 2, "units": None, "sky": True}}}]}
CALLS = {"role": "assistant", "content": "Let me look.", "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Graz"}}},
    {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Linz äöü", "at": [1, 2.5, {"x": "y"}]}}}]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call_1", "content": "{\"rain\": true}"}
OTHER_RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call_2", "content": "sunny"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather of a city <now>.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "It's name"}, "days": {"type": "integer"}}, "required": ["city"]}}}]

PROMPT = {"add_generation_prompt": True}
NONE = {"add_generation_prompt": False}
GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}
CONVERSATIONS = [
    ([USER], None, [PROMPT, NONE, PROMPT | {"enable_thinking": False}, PROMPT | {"enable_thinking": True}]),
    ([SYSTEM, USER], None, [PROMPT, NONE]),
    ([USER, ANSWER], None, [NONE, GOES_ON, PROMPT]),
    ([SYSTEM, USER, ANSWER, MORE], None, [PROMPT, PROMPT | {"enable_thinking": False}]),
    ([USER, THOUGHT], None, [NONE, GOES_ON]),
    ([USER, THOUGHT, MORE], None, [PROMPT]),
    ([USER, THINKS, MORE], None, [PROMPT, NONE]),
    ([USER], TOOLS, [PROMPT, NONE]),
    ([SYSTEM, USER], TOOLS, [PROMPT]),
    ([SYSTEM, USER, CALL, RESULT], TOOLS, [PROMPT, NONE]),
    ([USER, CALLS, RESULT, OTHER_RESULT, ANSWER, MORE], TOOLS, [PROMPT]),
    ([USER, CALL, RESULT, ANSWER], TOOLS, [NONE, GOES_ON]),
    ([USER, CALL], TOOLS, [NONE]),
    ([ANSWER, USER], None, [PROMPT]),
    ([USER, USER], None, [PROMPT]),
    ([USER, SYSTEM], None, [PROMPT]),
    ([SYSTEM], None, [PROMPT]),
]


def main() -> None:
    cases = []
    for file in sorted((FOLDER / "chat_templates").glob("*.jinja")):
        template = file.read_text()
        for index, (messages, tools, choices) in enumerate(CONVERSATIONS):
            for options in choices:
                case = {"template": file.stem, "conversation": index, "options": options}
                try:
                    given = json.loads(json.dumps(messages))
                    case["text"] = render_jinja_template([given], tools=tools, chat_template=template, **options, **TOKENS)[0][0]
                except Exception as error:
                    case["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:120]
                cases.append(case)
    conversations = [{"messages": messages, "tools": tools} for messages, tools, _ in CONVERSATIONS]
    stored = {"tokens": TOKENS, "conversations": conversations, "cases": cases}
    (FOLDER / "whole_chat_templates.json").write_text(compact_json.dumps(stored))
    print(len(cases), "cases,", sum("error" in case for case in cases), "refused")


if __name__ == "__main__":
    main()
