#!/usr/bin/env python3
"""Writes translations that transformers computes with languages, prefixes and several hypotheses, with the folders of `translators.py`.

Each case in a folder's `translations.json` has the arguments of a request, the ids of its source, and the translations found by beam search
with their scores, best first. A case with a `prefix` uses greedy search. The prefix contains the first tokens of the translation after the
language token.

    pip install torch==2.15.0 transformers==5.23.0 sentencepiece==0.2.3 protobuf
    python3 scripts/translations.py tests/checkpoints

Nothing is downloaded.
"""
import os, sys

os.environ |= {"HF_HUB_OFFLINE": "1"}
import torch, transformers as tf
from pieces import write

SOURCES = ["The river runs to the sea.", "Das Wetter ist schön", "El niño bebió agua"]
N = 3


def translate(model, ids, **options):
    with torch.no_grad():
        return model.generate(ids, max_length=None, output_scores=True, return_dict_in_generate=True, **options)


def texts(own, out):
    return [own.decode(row, skip_special_tokens=True) for row in out.sequences]


def main(root):
    for name in ["hf-m2m", "hf-marian"]:
        path = os.path.join(root, name)
        model = tf.AutoModelForSeq2SeqLM.from_pretrained(path, attn_implementation="eager").eval()
        cases = []
        pairs = [(None, None), ("en", "de"), ("ja", "es")] if name == "hf-m2m" else [(None, None)]
        for source_lang, target_lang in pairs:
            own = tf.AutoTokenizer.from_pretrained(path)
            forced = {}
            if source_lang:
                own.src_lang = source_lang
                forced = {"forced_bos_token_id": own.get_lang_id(target_lang)}
            for source in SOURCES:
                ids = own(source, return_tensors="pt")["input_ids"]
                case = {"text": source, "source_lang": source_lang, "target_lang": target_lang, "ids": ids[0].tolist()}
                out = translate(model, ids, max_new_tokens=12, num_beams=4, num_return_sequences=N + 1, **forced)
                scores = out.sequences_scores
                # Skip cases with nearly equal scores. gemmule sums in another order, so the last digits of scores differ. This could
                # change the order of the translations.
                if (scores[:-1] - scores[1:]).min() > 1e-4:
                    cases.append(case | {"texts": texts(own, out)[:N], "scores": scores[:N].tolist()})
                # Force the first tokens of the decoder: the start token, the language token, and a prefix.
                prefix = own(text_target="El niño", add_special_tokens=False)["input_ids"]
                prefix = [i for i in prefix if own.convert_ids_to_tokens(i) not in own.all_special_tokens]
                start = [model.generation_config.decoder_start_token_id]
                language = forced.get("forced_bos_token_id", model.generation_config.forced_bos_token_id)
                begin = torch.tensor([start + ([language] if language is not None else []) + prefix])
                greedy = dict(num_beams=1, length_penalty=None, early_stopping=None)
                out = translate(model, ids, decoder_input_ids=begin, max_new_tokens=8, **greedy, **forced)
                tokens = own.convert_ids_to_tokens(prefix)
                cases.append(case | {"prefix": "El niño", "prefix_tokens": tokens, "n": begin.shape[1] - 1 + 8, "texts": texts(own, out)})
        write(cases, path, "translations.json")


main(sys.argv[1])
