#!/usr/bin/env python3
"""Changes each key of generation_config.json in copies of small checkpoints, and stores the tokens that transformers then generates.

`tests/references/generation_sweep.json` contains prompts (as token ids) and a list of cases for each checkpoint folder. A case has the key
that it tests, the settings that it changes in generation_config.json (`null` removes a key), and the new tokens after each prompt. If
transformers refuses the settings, the case has its error instead of tokens. For sampling settings, the case only says that transformers
accepts them, because sampled tokens are not compared.

    pip install torch==2.15.0 transformers==5.24.0
    python3 scripts/generation_sweep.py tests/checkpoints tests/references/generation_sweep.json

Nothing is downloaded.
"""
import json, os, shutil, sys, tempfile, warnings

os.environ |= {"HF_HUB_OFFLINE": "1"}
import torch, transformers as tf

tf.logging.set_verbosity_error()
warnings.simplefilter("ignore")

WRITER = {"prompts": ["One day", "Lily was bored, so she"], "base": {"max_new_tokens": 24}, "class": tf.AutoModelForCausalLM}
TRANSLATOR = {"prompts": ["4217", "90"], "base": {"max_new_tokens": 24, "num_beams": None}, "class": tf.AutoModelForSeq2SeqLM}


def cases(ids, seq2seq):
    """Yields each key with changed settings: each value of the key, without and with beam search. `ids` are ordinary tokens, for rules."""
    a, b, c, d = ids
    both = {
        "max_length": [12, 30, 40], "max_new_tokens": [1, 7], "min_length": [0, 20, 40], "min_new_tokens": [0, 10, 24],
        "stop_strings": [["e"], []], "max_time": [60.0], "do_sample": [False], "use_mtp": [False], "use_cache": [False, True],
        "cache_implementation": ["dynamic", "hybrid"], "max_cache_len": [200], "prefill_chunk_size": [4],
        "repetition_penalty": [0.8, 1.0, 1.3], "encoder_repetition_penalty": [1.0, 1.5], "no_repeat_ngram_size": [0, 1, 2, 3],
        "encoder_no_repeat_ngram_size": [0, 2], "bad_words_ids": [[[a]], [[a], [b]], [[a, b]]], "renormalize_logits": [False, True],
        "forced_bos_token_id": [a, b], "forced_eos_token_id": [a, [b, c], []], "remove_invalid_values": [False, True],
        "exponential_decay_length_penalty": [[5, 1.0], [3, 1.5]], "suppress_tokens": [[], [a], [a, b, c]], "begin_suppress_tokens": [[], [a, c]],
        "sequence_bias": [[[[a], 6.0]], [[[b], -6.0]], [[[a, b], 3.0]]], "token_healing": [False], "guidance_scale": [1.0, 1.5],
        "watermarking_config": [{"greenlist_ratio": 0.25, "bias": 4.0}], "num_return_sequences": [1, 2], "output_attentions": [True],
        "output_hidden_states": [True], "output_scores": [True], "output_logits": [True], "return_dict_in_generate": [False],
        "pad_token_id": [a, None], "bos_token_id": [a, None], "eos_token_id": [a, [b, c], [a, d]], "decoder_start_token_id": [a] if seq2seq else [],
        "is_assistant": [False, True], "num_assistant_tokens": [20], "num_assistant_tokens_schedule": ["constant"],
        "assistant_confidence_threshold": [0.4], "assistant_lookbehind": [10], "target_lookbehind": [10], "max_matching_ngram_size": [2],
        "disable_compile": [True, False], "low_memory": [False, True], "penalty_alpha": [0, 0.6], "dola_layers": ["low"],
        "diversity_penalty": [0.0], "num_beam_groups": [1], "constraints": [], "force_words_ids": [[[a]]], "return_legacy_cache": [True, False],
        "transformers_version": ["4.40.0"], "_from_model_config": [False], "prompt_lookup_num_tokens": [3],
        "early_stopping": [False, True, "never"], "length_penalty": [-1.0, 0.0, 1.0, 2.0], "num_beams": [1, 2, 4],
        "temperature": [0.5, 1.0], "top_k": [1, 5, 50], "top_p": [0.5, 1.0], "min_p": [0.0, 0.2], "top_h": [0.4], "typical_p": [0.5, 1.0],
        "epsilon_cutoff": [0.0, 0.01], "eta_cutoff": [0.0, 0.01],
    }
    for key, values in both.items():
        for value in values:
            # max_length is only used if the number of new tokens is not given.
            alone = {"max_new_tokens": None} if key == "max_length" else {}
            yield key, alone | {key: value}
            if key != "num_beams":
                yield key, alone | {"num_beams": 3} | {key: value}
    for key in ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"):
        for value in both[key]:
            yield key, {"do_sample": True, key: value}


def write(folder, settings, tokenizer, model_class, prompts):
    own = json.load(open(os.path.join(folder, "generation_config.json")))
    changed = {k: v for k, v in (own | settings).items() if v is not None}
    with tempfile.TemporaryDirectory() as copy:
        for name in os.listdir(folder):
            shutil.copy(os.path.join(folder, name), copy)
        json.dump(changed, open(os.path.join(copy, "generation_config.json"), "w"))
        model = model_class.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager").eval()
        config = tf.GenerationConfig.from_pretrained(copy)
        model.generation_config = config
        more = {"tokenizer": tokenizer} if settings.get("stop_strings") is not None else {}
        written = []
        for ids in prompts:
            with torch.no_grad():
                found = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **more)
            before = 1 if model.config.is_encoder_decoder else len(ids)
            new = found[0, before:].tolist()
            ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
            end = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
            written.append(new[:end])
    return written


def main(root, out):
    folders = {}
    for name, how in (("writer", WRITER), ("translator", TRANSLATOR)):
        folder = os.path.join(root, name)
        tokenizer = tf.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"))
        prompts = [tokenizer(prompt)["input_ids"] for prompt in how["prompts"]]
        plain = write(folder, how["base"], tokenizer, how["class"], prompts)
        print(name, plain)
        # Use tokens that occur in the output, so that rules for them have an effect.
        ids = list(dict.fromkeys(plain[0] + plain[1]))[:4]
        rows = []
        for key, settings in cases(ids, name == "translator"):
            settings = how["base"] | settings
            case = {"key": key, "settings": settings}
            try:
                tokens = write(folder, settings, tokenizer, how["class"], prompts)
                case |= {"draws": True} if settings.get("do_sample") else {"tokens": tokens}
            except Exception as error:
                case |= {"error": str(error).splitlines()[0][:120]}
                print(name, key, settings, case["error"])
            rows.append(case)
        folders[name] = {"prompts": prompts, "cases": rows}
    with open(out, "w") as file:
        lines = [f'"{name}": {{"prompts": {json.dumps(f["prompts"])}, "cases": [\n' + ",\n".join(json.dumps(c) for c in f["cases"]) + "\n]}" for name, f in folders.items()]
        file.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
