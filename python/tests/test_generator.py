import gc

import pytest
from conftest import checkpoint, written

from gemmule import Generator, InputError, TextStream, Translator

STORIES = written("writer")
PROMPT = "One cold morning Ben walked to the f"


def test_texts_are_those_of_transformers(writer):
    prompts = [story["prompt"] for story in STORIES]
    assert writer.generate(prompts, max_new_tokens=60) == [story["text"] for story in STORIES]
    assert writer.generate(prompts[0], max_new_tokens=60) == STORIES[0]["text"]


@pytest.mark.parametrize("stops", [None, ["frog", "."], "e"])
def test_a_stream_returns_the_same_text_in_parts(writer, stops):
    whole = writer.generate(PROMPT, stop_strings=stops)
    stream = writer.generate(PROMPT, stream=True, stop_strings=stops)
    assert isinstance(stream, TextStream) and iter(stream) is stream
    parts = list(stream)
    assert "".join(parts) == whole
    assert all(parts) and all(isinstance(part, str) for part in parts)
    if stops is None:
        assert len(parts) > 20
    with pytest.raises(StopIteration):
        next(stream)


def test_stop_strings_end_the_text_before_them(writer):
    whole = writer.generate(PROMPT)
    assert "." in whole
    assert writer.generate(PROMPT, stop_strings=["."]) == whole[: whole.index(".")]
    both = writer.generate([PROMPT, "One"], stop_strings=".")
    assert both == [writer.generate(PROMPT, stop_strings="."), writer.generate("One", stop_strings=".")]


def test_a_stream_can_be_left(writer):
    stream = writer.generate(PROMPT, stream=True)
    first = next(stream)
    stream.close()
    assert list(stream) == []
    stream = writer.generate(PROMPT, stream=True)
    assert next(stream) == first
    del stream
    gc.collect()
    # The stream keeps the model alive.
    stream = Generator(checkpoint("writer"), device="cpu").generate(PROMPT, stream=True, max_new_tokens=9)
    gc.collect()
    assert "".join(stream) == writer.generate(PROMPT, max_new_tokens=9)


def test_sampling_depends_on_the_seed_alone(writer):
    sample = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 40}
    one = writer.generate(PROMPT, seed=1, **sample)
    assert one == writer.generate([PROMPT, "One"], seed=1, **sample)[0]
    assert one != writer.generate(PROMPT, seed=2, **sample)
    # A sampling parameter implies `do_sample`.
    assert one == writer.generate(PROMPT, seed=1, temperature=1.5, top_k=0, max_new_tokens=40)
    assert writer.generate(PROMPT, seed=1, max_new_tokens=40) == writer.generate(PROMPT, seed=2, max_new_tokens=40)
    assert writer.generate(PROMPT, temperature=5.0, top_k=1, max_new_tokens=40) == writer.generate(
        PROMPT, max_new_tokens=40
    )


def test_beams_and_rules_are_passed_on(writer):
    assert len(writer.generate(PROMPT, max_new_tokens=7)) == 7
    greedy = writer.generate("Lily was bored, so", max_new_tokens=40)
    assert writer.generate("Lily was bored, so", num_beams=1, max_new_tokens=40) == greedy
    beams = writer.generate("Lily was bored, so", num_beams=4, length_penalty=0.0, early_stopping=True, max_new_tokens=40)
    assert isinstance(beams, str) and beams
    assert writer.generate(PROMPT, forced_bos_token="q", max_new_tokens=3)[0] == "q"
    no_pairs = writer.generate(PROMPT, no_repeat_ngram_size=2, max_new_tokens=60)
    pairs = [no_pairs[at : at + 2] for at in range(len(no_pairs) - 1)]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_new_tokens": 0}, InputError, "max_new_tokens is 0; expected at least one token"),
        ({"max_new_tokens": -1}, InputError, "max_new_tokens is -1; expected a whole number"),
        ({"max_new_tokens": "9"}, TypeError, "max_new_tokens is str; expected int"),
        ({"temperature": "hot"}, TypeError, "temperature is str; expected float"),
        ({"temperature": -1.0}, InputError, "temperature"),
        ({"top_p": 7.0}, InputError, "top_p|top-p"),
        ({"num_beams": 300}, InputError, "300 beams; expected at most 256"),
        ({"num_beams": 2, "do_sample": True}, InputError, "beam search and sampling cannot be combined"),
        ({"do_sample": False, "top_k": 3}, InputError, "do_sample is False"),
        ({"length_penalty": 2.0}, InputError, "length_penalty has an effect only with beam search"),
        ({"num_beam_groups": 2}, InputError, "num_beam_groups has an effect only with beam search"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, InputError, "only between groups of beams; set num_beam_groups"),
        ({"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0}, InputError, "groups"),
        ({"early_stopping": "soon", "num_beams": 2}, InputError, '"soon"; expected True, False or "never"'),
        ({"forced_bos_token": "nowhere"}, InputError, "no token `nowhere`"),
        ({"stop_strings": [""]}, InputError, "empty text in stop_strings"),
        ({"stop_strings": [1]}, TypeError, r"stop_strings\[0\] is int; expected str"),
        ({"max_length": 3}, TypeError, "no option `max_length`; expected max_new_tokens, "),
    ],
)
def test_options_are_checked(writer, options, error, text):
    with pytest.raises(error, match=text):
        writer.generate(PROMPT, **options)


def test_prompts_are_checked(writer):
    with pytest.raises(InputError, match="the prompt has no tokens"):
        writer.generate("")
    with pytest.raises(InputError, match="text 1: the prompt has no tokens"):
        writer.generate([PROMPT, ""])
    with pytest.raises(InputError, match=r"text 1: the prompt's \d+ tokens"):
        writer.generate([PROMPT, "a" * 5000], max_new_tokens=5)
    with pytest.raises(InputError, match="prompts is a list of 1; give a single str"):
        writer.generate([PROMPT], stream=True)


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + '. ' + message['content'] + '. ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ start | default('One') }}{% endif %}"
)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The writer with a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    for file in checkpoint("writer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Generator(folder, device="cpu")


def test_a_conversation_is_written_by_the_template(talker, writer):
    said = [{"role": "user", "content": "Lily was bored"}, {"role": "assistant", "content": "so"}]
    reply = talker.chat(said, max_new_tokens=20)
    assert reply == writer.generate("user. Lily was bored. assistant. so. One", max_new_tokens=20)
    assert "".join(talker.chat(said, max_new_tokens=20, stream=True)) == reply
    other = talker.chat(said, max_new_tokens=20, chat_template_kwargs={"start": "Ben"})
    assert other == writer.generate("user. Lily was bored. assistant. so. Ben", max_new_tokens=20)


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([], InputError, "messages is empty"),
        ("hello", TypeError, "messages is str; expected a list of dicts"),
        (["hello"], InputError, r"messages\[0\] is .*; expected a dict"),
        ([{"role": "user"}], InputError, r'messages\[0\] has no "content"'),
        ([{"content": "a"}], InputError, r'messages\[0\] has no "role"'),
        ([{"role": "user", "content": {1, 2}}], InputError, r"messages\[0\] cannot be written as JSON"),
    ],
)
def test_conversations_are_checked(talker, messages, error, text):
    with pytest.raises(error, match=text):
        talker.chat(messages)


def test_a_folder_without_a_template_cannot_chat(writer):
    with pytest.raises(InputError, match="chat template"):
        writer.chat([{"role": "user", "content": "a"}])


def test_groups_of_beams_differ(writer):
    greedy = writer.generate("Ben", max_new_tokens=24)
    together = writer.generate("Ben", num_beams=4, max_new_tokens=24)
    assert together != greedy
    # With one beam per group, the first group is a greedy search, and the other groups avoid its tokens.
    apart = {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 5.0}
    assert writer.generate("Ben", max_new_tokens=24, **apart) == greedy


def test_a_cache_in_fp8_is_rounded(writer, translator):
    assert (writer.kv_dtype, translator.kv_dtype) == ("f32", "f32")
    rounded = Generator(checkpoint("writer"), device="cpu", kv_dtype="fp8")
    assert rounded.kv_dtype == "e4m3"
    prompts = ["One cold morning Ben walked to the f", "Lily was bored, so", "The"]
    # The trained model is confident, so rounding does not change its texts. With a high temperature, rounding changes some tokens.
    assert rounded.generate(prompts) == writer.generate(prompts)
    plain, drawn = (model.generate(prompts, max_new_tokens=60, temperature=3.0) for model in (writer, rounded))
    assert plain != drawn
    auto = Generator(checkpoint("writer"), device="cpu", kv_dtype="auto")
    assert auto.kv_dtype == "f32" and auto.generate(prompts, max_new_tokens=60, temperature=3.0) == plain
    numbers = Translator(checkpoint("translator"), device="cpu", kv_dtype="fp8")
    assert numbers.kv_dtype == "e4m3" and numbers.translate("7") == "seven"
    for kind in (Generator, Translator):
        with pytest.raises(InputError, match="`int8` is not a format of a KV cache; expected auto .* or fp8"):
            kind(checkpoint("writer"), device="cpu", kv_dtype="int8")
