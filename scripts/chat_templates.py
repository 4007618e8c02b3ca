"""Writes tests/references/chat_templates.json: small chat templates, each with the text that transformers renders, or its error.

Each template is rendered by the Jinja environment that `apply_chat_template` uses. If transformers raises an error, gemmule must also raise
an error. `refused` marks templates that transformers renders, but gemmule refuses, because it does not support a feature in them.

`conversations` are templates that `render_jinja_template` renders with messages. The messages in the file store the arguments of tool calls
as JSON in a string, like OpenAI's API. transformers receives the form that the template expects: objects or strings, as `arguments` states.

    python scripts/chat_templates.py
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

import compact_json

VARIABLES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi 'you' \"é\" <b>\n"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"b": [1, 2.5, None, True], "a": "<é>"}}}],
        },
        {"role": "tool", "content": "3", "name": "f"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "y": {}}}}}],
    "none": None,
    "text": "Hello wide World",
    "list": [3, 1, 2],
    "nested": [[1, 2], [3], []],
    "people": [{"n": "b", "a": 2}, {"n": "A", "a": 1}, {"n": "c", "a": 2}, {"a": 5}],
    "dict": {"b": 1, "a": {"c": [1]}, "items": 7, "_u": 8},
    "number": 7,
    "real": 2.5,
    "yes": True,
    "add_generation_prompt": True,
}

EXPRESSIONS = """
1 + 2 * 3 ** 2 - 7 // 2
7 / 2
-7 // 2
-7 % 3
7 % -3
7.5 % -2
-2 ** 2
2 ** -1
2 ** 100
1e16
1e15
1e-5
0.0001
1.5e300
1/0
3.0
10 // 3.0
True + 1
1 == 1.0
1 == True
1 < 2 < 3
1 < 2 > 3
'a' < 'b'
'a' < 1
[1, 2] < [1, 3]
none == None
1 in list
4 not in list
'ell' in text
'n' in people[0]
1 in text
'x' in undefined_name
undefined_name == undefined_other
undefined_name
undefined_name.x
undefined_name['x']
undefined_name()
undefined_name + 1
undefined_name ~ 'x'
undefined_name < 1
not undefined_name
none.x
none['x']
none()
number.x
text.x
list.x
list[9]
list[-1]
list[true]
list['append']
list.append(3)
list.sort()
dict.update({})
dict.pop('b')
dict.nothing
dict['nothing']
dict.a.c[0]
dict.items
dict['items']
dict._u
dict['_u']
text.__class__
dict.__class__
messages[0].role
messages[0]['role']
messages[-1].content
messages[1].content
messages[1:] | length
messages[:-1] | map(attribute='role') | join(',')
text[0]
text[-1]
text[99]
text[1:4]
text[::-1]
text[-5:]
text[::2]
text[5:1:-1]
list[::-1]
list[:]
list[5:]
list[1:2] + [9]
(1, 2, 3)[1:]
text[1.5]
list[::0]
none[1:]
dict[1:2]
'a' 'b'
"\\x41\\u00e9\\n\\t\\\\"
'it''s'
"é" + 'ü'
'a' + 1
1 + 'a'
'a' ~ 1 ~ none ~ true ~ 2.5
'ab' * 3
3 * 'ab'
'ab' * -1
[1] * 2
[] * 1000000
(1,) * 2
[1] + (2,)
(1,) + (2,)
{'a': 1, 'b': [1, 'x', None, True, 1.0]}
{'a': 'it\\'s', 'b': "q\\"", 'c': "\\n", 'd': 'é', 'e': '\\x00'}
{}
[]
()
(1,)
(1, 'a')
[1, 'a', none, undefined_name]
{1: 2, (1, 2): 3}
{[1]: 2}
true
false
none
True and 'x'
0 or 'y'
'' or none
not 1
1 if yes
1 if not yes
1 if not yes else 2
'a' if 0 else 'b' if 0 else 'c'
yes is true
1 is true
none is none
none is not none
undefined_name is defined
undefined_name is undefined
text is string
number is number
yes is number
yes is integer
number is integer
real is float
dict is mapping
list is sequence
text is sequence
dict is sequence
dict.items() is sequence
number is sequence
undefined_name is sequence
list is iterable
number is iterable
dict.keys() is iterable
range is callable
number is callable
7 is odd
7 is even
9 is divisibleby 3
9 is divisibleby(2)
'abc' is lower
'ABC' is upper
'x' is in ['x']
3 is eq 3
3 is equalto(4)
3 is ne 4
3 is lt 4
3 is ge 4
none is sameas none
yes is boolean
undefined_name is none
number is nothing_known
text is not string
list is defined and 3
text | nothing_known
text | upper
text | lower
text | title
'a-b c(d e_f' | title
text | capitalize
none | upper
undefined_name | upper
number | upper
'  x ' | trim
'xxaxx' | trim('x')
none | trim
undefined_name | trim
text | length
dict | length
undefined_name | length
number | length
none | length
list | first
list | last
[] | first
[] | last
text | first
text | last
list | sort
list | sort(reverse=true)
people | sort(attribute='a') | map(attribute='n') | list
people | rejectattr('n', 'undefined') | sort(attribute='n') | map(attribute='n') | join
people | rejectattr('n', 'undefined') | sort(attribute='n', case_sensitive=true) | map(attribute='n') | join
people[:3] | sort(attribute='a,n') | map(attribute='n') | join
['b', 'A', 'c'] | sort
[1, 'a'] | sort
dict | sort
list | min
list | max
['b', 'A'] | min
[] | max
people | max(attribute='a')
list | sum
people | sum(attribute='a')
[[1], [2]] | sum(start=[])
['a'] | sum
list | join
list | join('-')
people[:2] | join(',', attribute='n')
none | join
undefined_name | join
text | join('.')
list | reverse | list
text | reverse
list | unique | list
['a', 'A', 'b'] | unique | join
people | groupby('a') | list
people | groupby('a') | map(attribute='grouper') | list
(people | groupby('a'))[1].list | length
people | map(attribute='n') | list
people | map(attribute='n', default='?') | list
people | map(attribute='a') | map('string') | join('+')
people | map('nothing_known') | list
people | map | list
list | map('multiply', 2)
messages | selectattr('role', 'equalto', 'user') | list | length
messages | selectattr('tool_calls') | list | length
messages | selectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | join
messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | join(',')
messages | selectattr('tool_calls', 'defined') | first is defined
messages | selectattr('role', 'equalto', 'robot') | first
list | select('odd') | list
list | reject('odd') | list
list | select('greaterthan', 1) | list
[0, 1, '', 'a'] | select | list
(list | select('odd')) and 'true'
(list | select('odd')) | length
list | select('odd')
dict.items()
dict.keys()
dict.values()
dict | items
dict | items | list
dict | items | first
undefined_name | items | list
number | items
dict | dictsort
{'b': 1, 'A': 2} | dictsort
{'b': 1, 'A': 2} | dictsort(true)
{'b': 1, 'A': 0} | dictsort(by='value')
{'b': 1, 'A': 0} | dictsort(reverse=true)
undefined_name | dictsort
dict | list
dict.get('b')
dict.get('zz')
dict.get('zz', 3)
dict.get()
list | batch(2) | list
list | batch(2, 0) | list
range(7) | slice(3) | list
range(7) | slice(3, 'x') | list
range(3)
range(3) | list
range(5, 1, -2) | list
range(1, 9, 3)
range(0)
range(3)[1]
range(100001) | length
range(1, 2, 0)
range('a')
undefined_name | default('d')
none | default('d')
none | default('d', true)
'' | d('e', boolean=true)
undefined_name | default
number | string
none | string
undefined_name | string
'42' | int
'x' | int
'x' | int(7)
'3.7' | int
3.9 | int
'0x1f' | int(base=16)
none | int
undefined_name | int
'3.5' | float
'x' | float
'x' | float(1.5)
number | float
2.5 | round
3.5 | round
2.675 | round(2)
2.1 | round(method='ceil')
-2.1 | round(method='floor')
7 | round
7 | round(1, 'ceil')
-3 | abs
-3.5 | abs
'a' | abs
'a\\nb\\n\\nc' | indent
'a\\nb\\n\\nc' | indent(2, true)
'a\\nb\\n\\nc' | indent(2, blank=true)
'a\\nb' | indent('>>')
'a\\n' | indent
'' | indent
'ab' | center(7)
'abc' | center(8)
'aXbXc' | replace('X', '-')
'aXbXc' | replace('X', '-', 1)
'abc' | replace('', '-')
number | replace('7', '8')
'%s is %d, %.2f %5s|%-5s|%05d %% %r' | format('a', 3, 2.345, 'x', 'y', 42, 'q')
'%(a)s' | format(a=1)
'%s' | format
'%d' | format('x')
'%s %s' % ('a', 'b')
'%s' % 'a'
'%s' % none
'%s' % [1]
'%x %X %o' % (255, 255, 8)
'%+d %i' % (5, 7.9)
'x' % 3
'%s %s' % 'a'
'a very long text that is cut' | truncate(10)
'a very long text that is cut' | truncate(10, true)
'a very long text that is cut' | truncate(10, true, '')
'short' | truncate(10)
'a b_c d' | wordcount
text | list
text | escape
'<b>' | e
('<b>' | safe) + '<i>'
('<b>' | e) ~ '&'
'a' | safe
('<b>' | e) is escaped
'<b>' | forceescape
text | attr('upper')
messages[2].tool_calls[0].function.arguments | tojson
messages[2].tool_calls[0].function.arguments
messages[2].tool_calls[0] | tojson(indent=2)
messages | tojson
tools | tojson(indent=4)
tools[0] | tojson(sort_keys=true)
tools[0] | tojson(separators=(',', ':'))
messages[1].content | tojson
messages[1].content | tojson(ensure_ascii=true)
'\\x00\\x7f\\u2028' | tojson
[1.0, 1e20, 0.1, 100000.0, 1e-7] | tojson
{1: 2, true: 3, none: 4} | tojson
[] | tojson(indent=2)
{} | tojson(indent=2)
[1, [2]] | tojson(indent='--')
[1] | tojson(indent=0)
undefined_name | tojson
range(2) | tojson
(1, 2) | tojson
dict.items() | tojson
text | tojson(nothing=1)
text.upper()
text.lower().capitalize()
'hello wORLD' .title()
'aB'.swapcase()
'  a '.strip() + '|'
'  a '.lstrip() + '|'
'  a '.rstrip() + '|'
'xxaxx'.strip('x')
'abc'.startswith('ab')
'abc'.startswith(('x', 'a'))
'abc'.startswith('b', 1)
'abc'.endswith('bc')
'abc'.startswith(['a'])
'a,b,,c'.split(',')
'a,b,,c'.split(',', 1)
'a,b,,c'.rsplit(',', 1)
'  a b  c '.split()
'  a b  c '.split(none, 1)
'  a b  c '.rsplit(none, 1)
' a b '.split(none, 5)
'a'.split('')
''.split()
''.split(',')
'a\\nb\\r\\nc\\n'.splitlines()
'a\\nb'.splitlines(true)
'aXbX'.replace('X', '')
'aXbX'.replace('X', 'y', 1)
'-'.join(['a', 'b'])
'-'.join([1])
'-'.join('ab')
'abc'.find('c')
'abc'.find('z')
'éabc'.find('b')
'abcb'.rfind('b')
'abc'.index('z')
'abcb'.count('b')
'abc'.count('')
'ab'.center(7, '*')
'ab'.ljust(4) + '|'
'ab'.rjust(4)
'-42'.zfill(6)
'a=b=c'.partition('=')
'a=b=c'.rpartition('=')
'abc'.partition('=')
'abc'.removeprefix('a')
'abc'.removesuffix('c')
'12'.isdigit()
'1a'.isalnum()
'ab'.isalpha()
''.isalpha()
' \\n'.isspace()
'Ab'.islower()
'AB1'.isupper()
'{} {}'.format('a', 1)
'{0} {0}'.format('a')
'{a} {b:>5}|{b:<5}|{b:^5}|{c:05d}|{d:.2f}'.format(a=1, b='x', c=42, d=2.345)
'{:,}'.format(1234567)
'{!r}'.format('a')
'{0[a]} {1.real}'.format({'a': 1}, 2)
'{{}}'.format()
'{}'.format()
'abc'.nothing()
list.index(1)
list.count(3)
list.index(9)
(1, 2).index(2)
namespace(a=1).a
namespace({'a': 1}, b=2).b
namespace(a=1).zz
namespace(_a=1)
joiner(',')() ~ 'x'
cycler('a', 'b').next()
raise_exception('no ' ~ text)
strftime_now('%Y') | length
dict is defined
lipsum is defined
number()
text()
text.upper
range(3, nothing=1)
'a' is defined if 1 else 2
1 if 1 else 2 | string
{'a': 1}.a
{'a': 1}['a']
{'a': {'b': 1}}.a.b
[1, 2, 3][1:][0]
{'get': 5}.get
{'x': 1, **{}}
1, 2
(1, 2) == (1, 2)
[1] == (1,)
{'a': 1} == {'a': 1.0}
'a' in {'a': 1}
'a' in ('a', 'b')
none in [none]
[1, [2]] == [1, [2]]
{'a': 1}.items() | list
{'a': 1} | tojson | length
'a' if undefined_name is not defined
0x1F + 0b11 + 1_000
.5
1.e
'\\d'
"a\\"b"
"""

STATEMENTS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ loop.depth0 }};{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else 'none' }}<{{ m.role }}>{{ loop.nextitem.role if loop.nextitem else 'none' }} {% endfor %}",
    "{% for m in messages %}{% if loop.previtem and loop.previtem.role != 'user' %}{{ m.role }}{% endif %}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role }}{% endfor %}",
    "{% for m in messages %}{{ loop.nothing }}.{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role == 'user') }}{% endfor %}",
    "{% for m in messages if m.role != 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.role }},{% else %}empty{% endfor %}",
    "{% for m in [] %}x{% else %}empty{% endfor %}",
    "{% for k, v in dict.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in dict %}{{ k }}{% endfor %}",
    "{% for k, v in dict | items %}{{ loop.index }}/{{ loop.length }}{{ k }}{% endfor %}",
    "{% for k, v in dict | dictsort %}{{ k }}{% endfor %}",
    "{% for a, b in [[1, 2], [3]] %}{{ a }}{% endfor %}",
    "{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for c in 'añb' %}{{ c }}.{% endfor %}",
    "{% for x in undefined_name %}x{% else %}none{% endfor %}",
    "{% for x in none %}x{% endfor %}",
    "{% for x in 3 %}x{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in nested recursive %}[{{ loop.depth }}{{ loop(x) if x is iterable else x }}]{% endfor %}",
    "{% for x in nested %}{% for y in x %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for y in [1, 2] %}{{ x }}{% set x = y %}{{ x }}{% endfor %}{{ x }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% set d = {} %}{% set d.x = 1 %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}|{{ x | length }}",
    "{% set x | upper | trim %} a {% endset %}{{ x }}|",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}",
    "{% set a = 5 %}{% with a = 1, b = a %}{{ b }}{% endwith %}",
    "{% filter upper %}a{{ text }}{% endfilter %}",
    "{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(b=1, a='x') }} {{ m() }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, z=3) }}",
    "{% macro m() %}<{{ caller('x') }}>{% endmacro %}{% call(v) m() %}c{{ v }}{% endcall %}",
    "{% macro m() %}{{ x }}{% endmacro %}{% set x = 1 %}{{ m() }}{% set x = 2 %}{{ m() }}",
    "{% macro m(t) %}{% if t is mapping %}{{ '{' }}{% for k, v in t.items() %}{{ k }}:{{ m(v) }}{% endfor %}{{ '}' }}{% else %}{{ t }}{% endif %}{% endmacro %}{{ m({'a': {'b': 1}, 'c': 2}) }}",
    "{% macro m() %}{% set x = 3 %}{% endmacro %}{{ m() }}{{ x }}",
    "{% macro m() %}x{% endmacro %}{{ m.name }}{{ m() | length }}{{ m is callable }}",
    "{% macro m(a) -%}\n  {{ a }}\n{%- endmacro %}[{{ m('q') }}]",
    "{% for x in [1, 2] %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% endfor %}",
    "{% if a %}1{% elif messages %}2{% else %}3{% endif %}",
    "{% if messages | selectattr('role', 'equalto', 'robot') %}always{% endif %}",
    "{% if 'tool_calls' in messages[2] and messages[2].tool_calls is not none %}y{% endif %}",
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ add_generation_prompt }}",
    "a\n{% if true %}\nb\n{% endif %}\nc\n",
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n\n",
    "a\n  {%+ if true %}\n  b{% endif +%}\nc",
    "a \n {%- if true -%} \n b {%- endif -%} \n c",
    "a {{- ' b ' -}} c",
    "a\n  {{ 1 }}\n  {# x #}\n  b",
    "a {#- x -#} b",
    "a{# {{ x }} #}b",
    "{% raw %}{{ x }}{% if %}{% endraw %}",
    "a\n  {% raw %}\n {{ x }} \n  {% endraw %}\nb",
    "a {%- raw -%} x {%- endraw -%} b",
    "  {% if true %}x{% endif %}",
    "x  {% if true %}y{% endif %}  \n  {% if true %}z{% endif %}\n",
    "\n\n{{ 1 }}\n\n",
    "a\r\nb\rc",
    "{{ '{{' }} {{ {'a': {'b': 1}} }}",
    "{% for m in messages %}\n{{ m.role }}\n{% endfor %}\n",
    "{% for m in messages -%}\n{{ m.role }}\n{%- endfor %}",
    "{% generation %}a{% set q = 1 %}{% endgeneration %}{{ q }}b",
    "x\n  {%- generation %}\n{{ text }}\n  {%- endgeneration -%}\n.",
    "{% set j = joiner('; ') %}{% for x in list %}{{ j() }}{{ x }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{% for x in list %}{{ c.next() }}{% endfor %}{{ c.current }}",
    "{% set g = list | select('odd') %}{{ g | list }}{{ g | list }}",
    "{% set it = dict | items %}{% for k, v in it %}{{ k }}{% endfor %}{% for k, v in it %}{{ k }}{% endfor %}",
    "{% for grouper, members in people | groupby('a') %}{{ grouper }}:{{ members | length }};{% endfor %}",
    "{% include 'x' %}",
    "{% if false %}{% include 'x' %}{% endif %}ok",
    "{% extends 'x' %}",
    "{% nothing %}",
    "{% if %}",
    "{% if true %}",
    "{% for x in %}{% endfor %}",
    "{{ }}",
    "{{ a b }}",
    "{{ 'a }}",
    "{{ (1 }}",
    "{{ 1 ",
    "{% set x = 1",
    "{# x",
    "{% endif %}",
    "{% break %}",
    "{{ loop.index }}",
    "{{ loop }}",
    "{% set messages = messages[1:] %}{{ messages | length }}",
    "{% set none = 3 %}",
    "{{ caller() }}",
    "{% set content = messages[1].content | trim %}{{ '<|user|>\\n' ~ content }}",
    "{%- for message in messages %}{{- '<|' + message['role'] + '|>' + message['content'] }}{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "{%- if tools %}{{- tools | map(attribute='function') | map(attribute='name') | join(', ') }}{%- endif %}",
    "{% set d = dict(a=1) %}{{ d }}",
    "{%- set ns = namespace(found=false) -%}{%- for m in messages[::-1] -%}{%- if m.role == 'user' and not ns.found -%}{%- set ns.found = loop.index0 -%}{%- endif -%}{%- endfor -%}{{ ns.found }}",
    "{{ '</think>' in 'a</think>b' }}{{ 'a</think>\\nb'.split('</think>')[-1].lstrip('\\n') }}{{ 'a</think>b'.split('</think>')[0].rstrip('\\n').split('<think>')[-1] }}",
    "{{ messages[2].tool_calls[0].function.arguments.items() | list }}",
    "{% for k, v in messages[2].tool_calls[0].function.arguments | items %}{{ k }}={{ v | string if v is not mapping and v is not sequence else v | tojson }};{% endfor %}",
]

# transformers renders these expressions, but gemmule refuses them: the text would be useless in a prompt, or the feature is rarely used.
REFUSED = {
    "dict.items", "text.upper", "list | select('odd')", "dict | items", "text.x.y", "number.__class__", "text.__class__",
    "dict.__class__", "text | attr('upper')", "list['append']", "lipsum is defined", "'a b' | urlize", "'a b c' | wordwrap(1)",
    "'<b>x</b>' | striptags", "1000 | filesizeformat", "'a b' | urlencode", "{'a': 1} | xmlattr", "[1] | pprint",
    "'a' is sameas 'a'", "('a' | safe).upper()", "'upper' is filter", "2 ** 200", "{% block x %}a{% endblock %}",
    "{% autoescape false %}a{% endautoescape %}", "dict.fromkeys('a')", "'\\N{BULLET}'", "12 | round(-1)",
    "list | map('multiply', 2)", "number | items", "'{0[a]} {1.real}'.format({'a': 1}, 2)", "{'get': 5}.get", "text.encode()", "'a\\tb'.expandtabs()", "'abc'.translate({})", "text.istitle()",
}

CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": [1, 2.50],"a": "<é>", "c": {"d": null}}'}}]}
USER = {"role": "user", "content": "Hi"}
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for t in m.tool_calls %}CALL</{{ m.role }}>\n{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
CONVERSATIONS = [
    # Llama 3.x
    ("objects", EACH.replace("CALL", "{{ '{\"name\": \"' + t.function.name + '\", \"parameters\": ' }}{{ t.function.arguments | tojson }}{{ '}' }}"), [USER, CALL], {}),
    # Qwen3
    ("objects", EACH.replace("CALL", "{%- if t.function.arguments is string %}{{ t.function.arguments }}{%- else %}{{ t.function.arguments | tojson }}{%- endif %}"), [USER, CALL], {}),
    # Qwen3-Coder
    ("objects", EACH.replace("CALL", "{% for k, v in t.function.arguments | items %}<{{ k }}>{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}{% endfor %}"), [USER, CALL], {}),
    ("objects", EACH.replace("CALL", "{% for k, v in t.function.arguments.items() %}{{ k }}{{ loop.last }}{% endfor %}{{ t.function.arguments.a }}{{ t.function.arguments | length }}{{ 'a' in t.function.arguments }}"), [USER, CALL], {}),
    # DeepSeek
    ("strings", EACH.replace("CALL", "{{ '```json\\n' + t['function']['arguments'] + '\\n```' }}"), [USER, CALL], {}),
    ("strings", EACH.replace("CALL", "{{ t.function.arguments }}{{ t.function.arguments ~ '' }}{{ t.function.arguments | trim }}{{ t.function.arguments.strip() }}{{ '%s' % t.function.arguments }}"), [USER, CALL], {}),
    ("objects", "{% for m in messages %}{{ m | tojson }}{% endfor %}", [USER, {"role": "assistant", "content": "x", "name": None}], {}),
    ("objects", "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}", [{"role": "assistant", "content": "x", "reasoning": "why"}], {}),
    ("objects", PLAIN, [USER], {"add_generation_prompt": True}),
    ("objects", PLAIN, [USER], {"add_generation_prompt": False}),
    ("objects", PLAIN + "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}", [USER], {"enable_thinking": False}),
    ("objects", PLAIN, [USER, {"role": "assistant", "content": "I am "}], {"continue_final_message": True}),
    ("objects", TRIMMED, [USER, {"role": "assistant", "content": "I am "}], {"continue_final_message": True}),
    ("objects", TRIMMED, [USER, {"role": "assistant", "content": " I am"}], {"continue_final_message": True}),
    ("objects", PLAIN.replace("m.content", "m.content | upper"), [USER, {"role": "assistant", "content": "I am"}], {"continue_final_message": True}),
    ("objects", "{{ messages[0].role }}", [USER], {"continue_final_message": True}),
]


def main() -> None:
    cases = []
    templates = [f"{{{{ {line} }}}}" for line in EXPRESSIONS.strip().split("\n")] + STATEMENTS
    for refused in sorted(REFUSED):
        template = refused if refused.startswith("{%") or refused.startswith("{{") else f"{{{{ {refused} }}}}"
        if template not in templates:
            templates.append(template)
    refused = {r if r.startswith(("{%", "{{")) else f"{{{{ {r} }}}}" for r in REFUSED}
    for template in templates:
        case = {"template": template}
        # The variable `dict` would hide Jinja's global `dict`, so leave it out of templates that call the global.
        variables = {k: v for k, v in VARIABLES.items() if not (k == "dict" and ("dict(" in template or "dict.fromkeys" in template))}
        case["has_dict"] = "dict" in variables
        try:
            case["text"] = _compile_jinja_template(template).render(**variables)
            if template in refused:
                del case["text"]
                case["refused"] = True
        except Exception as error:
            case["error"] = f"{type(error).__name__}: {error}"[:200]
        cases.append(case)
    conversations = []
    for arguments, template, messages, options in CONVERSATIONS:
        case = {"template": template, "messages": messages, "options": options}
        given = json.loads(json.dumps(messages))
        for message in given:
            for key in [key for key, value in message.items() if value is None]:
                del message[key]
            for call in message.get("tool_calls", []):
                if arguments == "objects":
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            case["text"] = render_jinja_template([given], chat_template=template, **options)[0][0]
        except Exception as error:
            case["error"] = f"{type(error).__name__}: {error}"[:200]
        conversations.append(case)
    target = Path(__file__).parent.parent / "tests" / "references" / "chat_templates.json"
    target.write_text(compact_json.dumps({"variables": VARIABLES, "cases": cases, "conversations": conversations}))
    print(len(cases), "templates")


if __name__ == "__main__":
    main()
