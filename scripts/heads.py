"""Writes small checkpoints with task heads, and the results of transformers' pipelines for them.

    pip install torch transformers==5.24.0
    python3 scripts/heads.py tests/pipelines

transformers 5 has no pipeline for question answering. Compute the answers with version 4 in a separate environment. They replace those in
`expected.json`:

    pip install torch transformers==4.57.3
    python3 scripts/heads.py tests/pipelines answers

Nothing is downloaded. Weights are exact in f16 and stored in f16. Results are computed in f32. Two runs with the same versions write the
same bytes. `expected.json` has the results for folders in `tests/pipelines` and in `tests/checkpoints`.
"""
import json, os, shutil, sys, warnings

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import torch, transformers as tf

import compact_json

warnings.filterwarnings("ignore")
tf.logging.set_verbosity_error()
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CHECKPOINTS = os.path.join(ROOT, "tests", "checkpoints")
TOKENIZER = os.path.join(CHECKPOINTS, "ce-nli")
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=64)

ENTITIES = [
    "Who wrote the first letter by the river?",
    "The  café in Montréal sells bread,\ncheese (and 日本 apples) near the harbour.",
    "The museum by the harbour keeps maps, coins and bells, and in summer the boats carry people from the town along the river to the sea "
    "and back before the evening train leaves for the hills, unless snow or rain has closed the road, in which case nobody travels.",
]
LABELED = ["The train to the coast leaves at eight.", ENTITIES[2]]
CONTEXT = (
    "It rained all afternoon, so the picnic was moved indoors. The letter was found in a box under the floor of an old house by the "
    "river, and the museum in Montréal keeps it. About nine thousand people live there; a third of them work at the harbour."
)
QUESTIONS = ["Where was the letter found?", "How many people live there?", "Who is sorry?"]


def saved(out, name, model, tokenizer):
    """Saves a model with random weights, which are large enough to give different results for different tokens."""
    generator = torch.Generator().manual_seed(len(name))
    for own, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        is_head = own.startswith(("classifier", "qa_outputs", "classification_head"))
        scale = (0.6 if is_head else 0.3) if parameter.dim() > 1 else 0.05
        shift = 1.0 if parameter.dim() == 1 and parameter.data.mean() > 0.5 else 0.0
        parameter.data = (values * scale + shift).half().float()
    if hasattr(model, "classifier"):
        # Check that each label is the best one for some tokens.
        ids = [tokenizer(text, truncation=True, return_tensors="pt") for text in ENTITIES]
        with torch.no_grad():
            logits = torch.cat([model.eval()(**own).logits[0] for own in ids])
            model.classifier.bias -= logits.mean(0)
            model.classifier.weight.mul_(4)
            model.classifier.bias.mul_(4)
    folder = os.path.join(out, name)
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    for file in ["generation_config.json", "special_tokens_map.json", "vocab.txt"]:
        if os.path.exists(os.path.join(folder, file)):
            os.remove(os.path.join(folder, file))
    return folder


def pipe(task, folder, cls):
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    model = cls.from_pretrained(folder).float().eval()
    return tf.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(own) for own in value]
    if isinstance(value, str) or isinstance(value, bool) or value is None:
        return value
    value = value.item() if hasattr(value, "item") else value
    return round(value, 6) if isinstance(value, float) else value


def entities(folder):
    run = pipe("token-classification", os.path.join(ROOT, folder), tf.AutoModelForTokenClassification)
    runs = []
    for text in ENTITIES:
        for rule in ["none", "simple", "first", "average", "max"]:
            for ignored in [["O"], []] if text is ENTITIES[1] else [["O"]]:
                found = run(text, aggregation_strategy=rule, ignore_labels=ignored)
                runs.append({"text": text, "aggregation": rule, "ignored": ignored, "entities": rounded(found)})
    return {"folder": folder, "runs": runs}


def masks(folder):
    run = pipe("fill-mask", os.path.join(ROOT, folder), tf.AutoModelForMaskedLM)
    mask = run.tokenizer.mask_token
    runs = []
    for text, options in [
        (f"The train to the {mask} leaves at eight.", {}),
        (f"The {mask} was found in a {mask} by the river.", {"top_k": 2}),
        (f"Who {mask} the letter?", {"top_k": 3, "targets": sorted(run.tokenizer.get_vocab())[40:44]}),
    ]:
        found = run(text, **options)
        found = found if isinstance(found[0], list) else [found]
        runs.append({"text": text, **options, "masks": rounded(found)})
    return {"folder": folder, "runs": runs}


def zero_shot(folder):
    run = pipe("zero-shot-classification", os.path.join(ROOT, folder), tf.AutoModelForSequenceClassification)
    runs = []
    for text in LABELED:
        for labels, options in [
            (["travel", "food", "the weather"], {}),
            (["travel", "food", "the weather"], {"multi_label": True}),
            (["travel"], {"hypothesis_template": "It is about {}, not {}."}),
            (["snow", "bread"], {"hypothesis_template": "text about {}"}),
        ]:
            template = options.get("hypothesis_template")
            if template and template.count("{}") > 1:
                # Number the placeholders, because Python's `format` would require an argument for each `{}`.
                options = options | {"hypothesis_template": template.replace("{}", "{0}")}
            found = run(text, labels, **options)
            runs.append({"text": text, "labels": labels, "template": template, "multi_label": options.get("multi_label", False),
                         "ranked": rounded(found["labels"]), "scores": rounded(found["scores"])})
    return {"folder": folder, "runs": runs}


def answers(folder):
    run = pipe("question-answering", os.path.join(ROOT, folder), tf.AutoModelForQuestionAnswering)
    runs = []
    for question in QUESTIONS:
        for options in [
            {"top_k": 1},
            {"top_k": 4, "max_answer_len": 4},
            {"top_k": 3, "handle_impossible_answer": True},
            {"top_k": 3, "align_to_words": False, "max_seq_len": 40, "doc_stride": 10},
            {"top_k": 3, "max_seq_len": 32, "doc_stride": 8, "handle_impossible_answer": True},
        ]:
            found = run(question=question, context=CONTEXT, **options)
            found = found if isinstance(found, list) else [found]
            runs.append({"question": question, "context": CONTEXT, **options, "answers": rounded(found)})
    return {"folder": folder, "runs": runs}


def main(out, part=None):
    file = os.path.join(out, "expected.json")
    if part == "answers":
        expected = json.load(open(file))
        expected["answers"] = [answers("tests/pipelines/qa"), answers("tests/pipelines/qa-roberta")]
        expected["answers_made_with"] = {"torch": torch.__version__.split("+")[0], "transformers": tf.__version__}
    else:
        os.makedirs(out, exist_ok=True)
        tokenizer = tf.AutoTokenizer.from_pretrained(TOKENIZER)
        n = len(tokenizer)
        names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: at for at, label in enumerate(LABELS)}}
        saved(out, "ner", tf.BertForTokenClassification(tf.BertConfig(vocab_size=n, **SIZES, **names)), tokenizer)
        saved(out, "qa", tf.BertForQuestionAnswering(tf.BertConfig(vocab_size=n, **SIZES)), tokenizer)
        bpe = tf.AutoTokenizer.from_pretrained(os.path.join(CHECKPOINTS, "hf-roberta-mlm"))
        config = tf.RobertaConfig(vocab_size=len(bpe), type_vocab_size=1, pad_token_id=bpe.pad_token_id, bos_token_id=bpe.bos_token_id,
                                  eos_token_id=bpe.eos_token_id, **SIZES | {"max_position_embeddings": 66})
        saved(out, "qa-roberta", tf.RobertaForQuestionAnswering(config), bpe)
        verdicts = dict(enumerate(["contradiction", "neutral", "entailment"]))
        config = tf.BartConfig(vocab_size=len(bpe), d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48,
                               decoder_ffn_dim=40, max_position_embeddings=96, pad_token_id=bpe.pad_token_id, bos_token_id=bpe.bos_token_id, eos_token_id=bpe.eos_token_id,
                               decoder_start_token_id=bpe.eos_token_id, forced_eos_token_id=None, id2label=verdicts, label2id={label: at for at, label in verdicts.items()})
        saved(out, "nli-bart", tf.BartForSequenceClassification(config), bpe)
        old = json.load(open(file)) if os.path.exists(file) else {}
        expected = {
            "made_with": {"torch": torch.__version__.split("+")[0], "transformers": tf.__version__},
            "entities": [entities("tests/pipelines/ner"), entities("tests/checkpoints/hf-xlmr-token")],
            "masks": [masks("tests/checkpoints/hf-roberta-mlm"), masks("tests/checkpoints/hf-electra-mlm")],
            "zero_shot": [zero_shot("tests/checkpoints/ce-nli"), zero_shot("tests/pipelines/nli-bart")],
        } | {key: old[key] for key in ["answers", "answers_made_with"] if key in old}
    with open(file, "w") as out:
        out.write(compact_json.dumps(expected))


main(*sys.argv[1:])
