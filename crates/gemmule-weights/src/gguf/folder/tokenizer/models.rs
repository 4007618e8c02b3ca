//! Tokenizer models: byte-level BPE, SentencePiece BPE, and WordPiece.

use serde_json::{Map, Value as Json, json};

use super::{
    super::{super::error::Result, names::Family, shown, wrong_key},
    parts::{around, before, special, template},
    problem,
    vocabulary::{Kind, Vocabulary},
};

/// Character that replaces a space in SentencePiece tokens and marks the start of a word in the stored tokens of BERT.
const SPACE: char = '▁';
/// Maximum number of characters of a word; WordPiece treats longer words as unknown.
const MAX_WORD: u64 = 100;
/// Maximum number of merges. Gemma 3 has half a million.
const MAX_MERGES: usize = 4 << 20;
/// Maximum size of the merges in bytes.
const MAX_MERGE_BYTES: usize = 256 << 20;

/// Maps the published text of each token to its id. `text` converts the stored text to the published one.
fn vocab(
    vocabulary: &Vocabulary<'_>,
    text: impl Fn(&str, Kind) -> String,
) -> Result<Map<String, Json>> {
    let mut vocab = Map::new();
    for (id, (token, &kind)) in vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate() {
        let text = text(token, kind);
        if let Some(known) = vocab.insert(text, id.into()) {
            return Err(problem(format!(
                "tokens {known} and {id}, `{}`, are the same; expected each token once",
                shown(token)
            )));
        }
    }
    Ok(vocab)
}

fn as_stored(token: &str, _: Kind) -> String {
    token.to_owned()
}

/// Returns a byte-level BPE model like that of GPT-2.
pub(super) fn byte_pairs(vocabulary: &Vocabulary<'_>) -> Result<Json> {
    let before = before(vocabulary)?;
    let mut merges = Vec::new();
    for (index, merge) in vocabulary.merges()?.iter().enumerate() {
        let pair = merge.split_once(' ');
        let known = pair.filter(|&(left, right)| {
            let ids = &vocabulary.ids;
            let is_known = |token: &str| ids.contains_key(token);
            is_known(left) && is_known(right) && is_known(&[left, right].concat())
        });
        let Some((left, right)) = known else {
            let problem = format!(
                "number {index} is `{}`; expected two tokens that make up a third one, with a space between them",
                shown(merge)
            );
            return Err(wrong_key("tokenizer.ggml.merges", problem));
        };
        merges.push(json!([left, right]));
    }
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": false,
        "use_regex": false,
    });
    let post_processor = match around(vocabulary)? {
        None => byte_level.clone(),
        Some(template) => json!({"type": "Sequence", "processors": [byte_level, template]}),
    };
    Ok(json!({
        "normalizer": before.normalizer,
        "pre_tokenizer": before.pre_tokenizer,
        "post_processor": post_processor,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": before.ignores_merges,
            "vocab": vocab(vocabulary, as_stored)?,
            "merges": merges,
        },
    }))
}

/// Returns a SentencePiece BPE model like those of Llama and Gemma. Scores determine the order of merges.
pub(super) fn sentencepiece(vocabulary: &Vocabulary<'_>) -> Result<Json> {
    let unknown = vocabulary.need(vocabulary.unknown()?, "token for unknown characters")?;
    let adds_space = vocabulary.adds_space()?;
    let space = SPACE.to_string();
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": space});
    let normalizer = match adds_space {
        true => json!({
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": space}, replace],
        }),
        false => replace,
    };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": space}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if adds_space {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "post_processor": around(vocabulary)?,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": vocabulary.tokens[unknown],
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": vocabulary.kinds.contains(&Kind::Byte),
            "ignore_merges": false,
            "vocab": vocab(vocabulary, as_stored)?,
            "merges": merges_by_score(vocabulary)?,
        },
    }))
}

/// Returns all pairs of tokens that form another token, highest score first. Gemma's published merges are in the order of its tokens
/// instead.
fn merges_by_score(vocabulary: &Vocabulary<'_>) -> Result<Vec<Json>> {
    let scores = vocabulary.scores()?;
    let is_gemma = matches!(
        vocabulary.settings.architecture.family,
        Family::Gemma | Family::Gemma3
    );
    let score = |id: usize| match is_gemma {
        true => -(id as f32),
        false => scores[id],
    };
    let normal = |token: &str| {
        let id = vocabulary.ids.get(token).copied()?;
        (vocabulary.kinds[id] == Kind::Normal).then_some(id)
    };
    let mut merges = Vec::new();
    let mut bytes = 0;
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if vocabulary.kinds[id] != Kind::Normal {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(left), Some(right)) = (normal(left), normal(right)) {
                merges.push((score(id), left, right));
                bytes += token.len();
            }
        }
        if merges.len() > MAX_MERGES || bytes > MAX_MERGE_BYTES {
            return Err(problem(format!(
                "its tokens up to number {id} are made up of others in {} ways of {bytes} bytes, above the limit of {MAX_MERGES} ways or {MAX_MERGE_BYTES} bytes",
                merges.len()
            )));
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let pair = |(_, left, right): (f32, usize, usize)| {
        json!([vocabulary.tokens[left], vocabulary.tokens[right]])
    };
    Ok(merges.into_iter().map(pair).collect())
}

/// Returns the WordPiece model of BERT. In a GGUF file, tokens that begin a word are marked; in a published vocabulary, all other tokens
/// are marked (`##`).
pub(super) fn wordpiece(vocabulary: &Vocabulary<'_>) -> Result<Json> {
    let unknown = vocabulary.first_unknown()?;
    let (cls, sep) = (vocabulary.cls()?, vocabulary.sep()?);
    let cls = vocabulary.need(cls, "token that begins a text")?;
    let sep = vocabulary.need(sep, "token that ends a text")?;
    // A GGUF file does not state whether texts are lowercased. If they are not, the vocabulary has tokens with capital letters.
    let has_capitals = vocabulary
        .tokens
        .iter()
        .zip(&vocabulary.kinds)
        .any(|(token, &kind)| {
            kind == Kind::Normal && !token.contains('[') && token.chars().any(char::is_uppercase)
        });
    let (a, b) = (
        json!({"Sequence": {"id": "A", "type_id": 0}}),
        json!({"Sequence": {"id": "B", "type_id": 1}}),
    );
    let (first, last) = (special(vocabulary, cls, 0), special(vocabulary, sep, 0));
    let single = vec![first.clone(), a.clone(), last.clone()];
    let pair = vec![first, a, last, b, special(vocabulary, sep, 1)];
    let published = |token: &str, kind: Kind| match token.strip_prefix(SPACE) {
        _ if kind == Kind::Control || kind == Kind::Unknown => token.to_owned(),
        Some(begins) => begins.to_owned(),
        None => format!("##{token}"),
    };
    Ok(json!({
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": true,
            "handle_chinese_chars": true,
            "strip_accents": null,
            "lowercase": !has_capitals,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template(vocabulary, single, pair, &[cls, sep]),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_WORD,
            "vocab": vocab(vocabulary, published)?,
        },
    }))
}
