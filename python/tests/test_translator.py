import pytest
from conftest import checkpoint, written

from gemmule import Generator, InputError, Translator

NUMBERS = written("translator")
SOURCES = [one["source"] for one in NUMBERS]
TEXTS = [one["text"] for one in NUMBERS]


def test_translations_are_those_of_transformers(translator):
    assert translator.translate(SOURCES) == TEXTS
    assert translator.translate(SOURCES[0]) == TEXTS[0]
    assert translator.translate(SOURCES[::-1]) == TEXTS[::-1]


def test_blank_texts_stay_blank(translator):
    assert translator.translate(["", SOURCES[1], " \n", SOURCES[0]]) == ["", TEXTS[1], "", TEXTS[0]]
    assert translator.translate("") == ""


def test_options_are_passed_on(translator):
    assert translator.translate(SOURCES, num_beams=1) == TEXTS
    forced = translator.translate(SOURCES, forced_bos_token="nine")
    assert all(text.startswith("nine") for text in forced)
    assert len(translator.translate(SOURCES[-1], max_new_tokens=2).split()) <= 2


def test_an_error_names_the_text(translator):
    with pytest.raises(InputError, match="text 2: the source has .* tokens, more than the model's"):
        translator.translate(["", SOURCES[0], "1" * 5000])


def test_a_folder_of_random_weights_with_sentence_pieces():
    translator = Translator(checkpoint("hf-marian"), device="cpu")
    runs = written("hf-marian")
    assert translator.translate([run["source"] for run in runs], max_new_tokens=30) == [run["text"] for run in runs]


def test_languages_are_those_of_transformers():
    translator = Translator(checkpoint("hf-m2m"), device="cpu")
    for case in written("hf-m2m", "translations.json"):
        if "scores" in case:
            languages = {"source_lang": case["source_lang"], "target_lang": case["target_lang"]}
            assert translator.translate(case["text"], num_beams=4, max_new_tokens=12, **languages) == case["texts"][0]
    with pytest.raises(InputError, match="the target language `eng` is unknown .* en, "):
        translator.translate("a", target_lang="eng")
    with pytest.raises(InputError, match="target_lang and forced_bos_token"):
        translator.translate("a", target_lang="de", forced_bos_token="__fr__")


def test_models_of_prompts_do_not_translate():
    with pytest.raises(InputError, match="use Generator"):
        Translator(checkpoint("writer"), device="cpu")
    generator = Generator(checkpoint("translator"), device="cpu")
    assert generator.generate(SOURCES) == TEXTS
