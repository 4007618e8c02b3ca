//! SentencePiece models. A text is normalized and split into the most probable sequence of pieces (unigram), or into the pieces that result
//! from merging neighbors (BPE). Ids must equal those of the library SentencePiece for every text, so the arithmetic of the library is
//! reproduced: sums in f32, normalization by the longest matching rule, and the order of equal scores. The fields are those of
//! `sentencepiece_model.proto`, without those used only in training.
//!
//! Kudo and Richardson, *SentencePiece*, EMNLP 2018; Kudo, *Subword Regularization*, ACL 2018 (unigram).

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap, HashSet},
};

use prost::Message;

/// Maximum number of pieces. Published models have up to 256,000 pieces, not counting those for languages.
const MAX_PIECES: usize = 1 << 20;
/// Maximum size of a piece in bytes. By default, training limits pieces to 16 characters.
const MAX_PIECE_BYTES: usize = 256;
/// Character that represents a space in a piece.
const SPACE: &str = "\u{2581}";
/// Penalty of a character without a piece, relative to the piece with the lowest score.
const UNKNOWN: f32 = 10.0;

#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
    #[prost(message, optional, tag = "5")]
    denormalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, tag = "1")]
    text: String,
    #[prost(float, tag = "2")]
    score: f32,
    /// Number of the kind (see [`Piece::usage`]); normal if missing.
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    /// Number of the type of model; unigram if missing.
    #[prost(int32, optional, tag = "3")]
    model: Option<i32>,
    #[prost(bool, tag = "24")]
    whitespace_as_suffix: bool,
    #[prost(bool, tag = "35")]
    byte_fallback: bool,
    #[prost(string, optional, tag = "44")]
    unknown_surface: Option<String>,
}

/// Flags that are missing in the file are true.
#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", tag = "2")]
    rules: Vec<u8>,
    #[prost(bool, optional, tag = "3")]
    adds_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    removes_spaces: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    escapes_spaces: Option<bool>,
}

/// Kind of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Normal,
    Unknown,
    /// A control token without text, such as begin and end tokens.
    Control,
    /// A user-defined piece, which is matched before all others.
    Defined,
    /// In the vocabulary, but never produced.
    Unused,
}

impl Piece {
    /// Returns the kind of the piece. The number of the kind was checked when the file was read.
    fn usage(&self) -> Use {
        match self.kind {
            Some(2) => Use::Unknown,
            Some(3) => Use::Control,
            Some(4) => Use::Defined,
            Some(5) => Use::Unused,
            _ => Use::Normal,
        }
    }
}

/// Normalization rules: a double-array trie over bytes in the format of Darts-clone. Its values are offsets in `texts`.
#[derive(Debug, Default)]
struct Rules {
    units: Vec<u32>,
    /// Replacement texts, each terminated by a NUL.
    texts: String,
}

impl Rules {
    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() {
            return Some(Self::default());
        }
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let len = u32::from_le_bytes(*len) as usize;
        let (units, texts) = rest.split_at_checked(len)?;
        let texts = std::str::from_utf8(texts).ok()?.to_owned();
        let (units, odd) = units.as_chunks::<4>();
        let units: Vec<u32> = units.iter().map(|u| u32::from_le_bytes(*u)).collect();
        // The top bit marks a unit with a value.
        let mut values = units.iter().filter(|&&u| u >> 31 == 1);
        let is_there = |value: &u32| {
            let text = texts.get((value & 0x7fff_ffff) as usize..);
            text.is_some_and(|text| text.contains('\0'))
        };
        (odd.is_empty() && values.all(is_there)).then_some(Self { units, texts })
    }

    /// Applies the longest matching rule to the beginning of a text. Returns the replacement and the number of bytes it
    /// replaces.
    fn apply(&self, text: &str) -> Option<(&str, usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut at = offset(*self.units.first()?);
        let mut found = None;
        for (i, byte) in text.bytes().enumerate() {
            at ^= usize::from(byte);
            let Some(&unit) = self.units.get(at) else {
                break;
            };
            if unit & 0x8000_00ff != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            let has_value = (unit >> 8) & 1 == 1 && text.is_char_boundary(i + 1);
            if let (true, Some(&value)) = (has_value, self.units.get(at)) {
                found = Some(((value & 0x7fff_ffff) as usize, i + 1));
            }
        }
        let (start, len) = found?;
        let (made, _) = self.texts.get(start..)?.split_once('\0')?;
        Some((made, len))
    }
}

/// A part of a text, as the model splits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// The piece, or adjacent characters that are in no piece.
    pub(super) text: String,
    /// Byte range in the text.
    pub(super) span: (usize, usize),
}

pub(super) struct Model {
    pieces: Vec<Piece>,
    /// Index in `pieces` by the text of a piece.
    numbers: HashMap<String, usize>,
    longest: usize,
    /// Minimum score of normal pieces.
    least: f32,
    most: f32,
    defined: HashSet<String>,
    /// Lengths in bytes of user-defined pieces, longest first.
    defined_lens: Vec<usize>,
    is_bpe: bool,
    rules: Rules,
    adds_prefix: bool,
    removes_spaces: bool,
    unknown_surface: String,
}

impl Model {
    /// Reads a file and validates it.
    ///
    /// # Errors
    /// Returns an error with the reason if the file is invalid.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let file = File::decode(bytes)
            .map_err(|e| format!("it is not a SentencePiece model, or is damaged: {e}"))?;
        let n = file.pieces.len();
        if n == 0 || n > MAX_PIECES {
            return Err(format!(
                "it has {n} pieces; expected 1 to {MAX_PIECES}, as a SentencePiece model has"
            ));
        }
        let trainer = file.trainer.unwrap_or_default();
        if !matches!(trainer.model, None | Some(1 | 2)) {
            let kind = trainer.model.unwrap_or_default();
            return Err(format!(
                "it is a model of type {kind}; gemmule reads unigram (1) and BPE (2)"
            ));
        }
        if trainer.byte_fallback || trainer.whitespace_as_suffix {
            return Err(
                "it uses byte fallback or spaces after words, which gemmule supports only with a tokenizer.json"
                    .to_owned(),
            );
        }
        let normalizer = file.normalizer.unwrap_or_default();
        if normalizer.escapes_spaces == Some(false) {
            return Err(
                "its pieces contain plain spaces, which gemmule supports only with a tokenizer.json"
                    .to_owned(),
            );
        }
        if file.denormalizer.is_some_and(|d| !d.rules.is_empty()) {
            return Err("it has normalization rules for decoded text, which gemmule supports only with a tokenizer.json".to_owned());
        }
        let rules =
            Rules::read(&normalizer.rules).ok_or("its rules of normalization are damaged")?;
        let mut model = Self {
            pieces: Vec::new(),
            numbers: HashMap::new(),
            longest: 0,
            least: f32::MAX,
            most: f32::MIN_POSITIVE,
            defined: HashSet::new(),
            defined_lens: Vec::new(),
            is_bpe: trainer.model == Some(2),
            rules,
            adds_prefix: normalizer.adds_prefix.unwrap_or(true),
            removes_spaces: normalizer.removes_spaces.unwrap_or(true),
            unknown_surface: trainer.unknown_surface.unwrap_or(" \u{2047} ".to_owned()),
        };
        let mut seen = HashSet::new();
        for (index, piece) in file.pieces.iter().enumerate() {
            check(index, piece)?;
            if !seen.insert(piece.text.as_str()) {
                return Err(format!("the piece `{}` occurs twice", piece.text));
            }
            model.take(index, piece);
        }
        let unknown = file.pieces.iter().filter(|p| p.usage() == Use::Unknown);
        let n_unknown = unknown.count();
        if n_unknown != 1 {
            return Err(format!(
                "{n_unknown} pieces have the type UNKNOWN; expected one"
            ));
        }
        model.defined_lens.sort_unstable_by_key(|&len| Reverse(len));
        model.defined_lens.dedup();
        model.pieces = file.pieces;
        Ok(model)
    }

    fn take(&mut self, index: usize, piece: &Piece) {
        self.numbers.insert(piece.text.clone(), index);
        match piece.usage() {
            Use::Unknown | Use::Control => return,
            Use::Normal => {
                self.least = self.least.min(piece.score);
                self.most = self.most.max(piece.score);
            }
            Use::Defined => {
                self.defined.insert(piece.text.clone());
                self.defined_lens.push(piece.text.len());
            }
            Use::Unused => {}
        }
        self.longest = self.longest.max(piece.text.len());
    }

    /// Returns the normal, user-defined or unused piece whose text is `part`.
    fn found(&self, part: &str) -> Option<&Piece> {
        let piece = &self.pieces[*self.numbers.get(part)?];
        (!matches!(piece.usage(), Use::Unknown | Use::Control)).then_some(piece)
    }

    /// Splits a text.
    pub(super) fn cut(&self, text: &str) -> Vec<Cut> {
        let (normal, origins) = self.normalize(text);
        let parts = match self.is_bpe {
            true => self.join(&normal),
            false => self.top_tokens(&normal),
        };
        let mut cuts: Vec<Cut> = Vec::with_capacity(parts.len());
        let mut was_unknown = false;
        let mut start = 0;
        for len in parts {
            let part = &normal[start..start + len];
            let span = (origins[start], origins[start + len]);
            let is_unknown = self.found(part).is_none();
            match cuts.last_mut() {
                Some(last) if is_unknown && was_unknown => {
                    last.text.push_str(part);
                    last.span.1 = span.1;
                }
                _ => cuts.push(Cut {
                    text: part.to_owned(),
                    span,
                }),
            }
            (was_unknown, start) = (is_unknown, start + len);
        }
        cuts
    }

    /// Returns the length of the longest user-defined piece at the beginning of a text.
    fn defined_at(&self, text: &str) -> Option<usize> {
        let mut lens = self.defined_lens.iter().copied();
        lens.find(|&len| text.get(..len).is_some_and(|t| self.defined.contains(t)))
    }

    /// Normalizes the first unit of a text: a user-defined piece, the longest match of a rule, or one character. Returns the normal form of
    /// the unit, and the number of bytes that the unit has in `text`.
    fn normal_prefix<'t>(&'t self, text: &'t str) -> (&'t str, usize) {
        if let Some(len) = self.defined_at(text) {
            return (&text[..len], len);
        }
        self.rules.apply(text).unwrap_or_else(|| {
            let len = text.chars().next().map_or(0, char::len_utf8);
            (&text[..len], len)
        })
    }

    /// Returns the normal form of a text, and the position in the text for each byte of the normal form and for its end.
    fn normalize(&self, text: &str) -> (String, Vec<usize>) {
        let (mut normal, mut origins) = (String::new(), Vec::new());
        let mut at = 0;
        let put = |normal: &mut String, origins: &mut Vec<usize>, text: &str, at: usize| {
            normal.push_str(text);
            origins.resize(normal.len(), at);
        };
        while self.removes_spaces && at < text.len() {
            let (made, len) = self.normal_prefix(&text[at..]);
            if made != " " {
                break;
            }
            at += len;
        }
        if at < text.len() && self.adds_prefix {
            put(&mut normal, &mut origins, SPACE, at);
        }
        let mut after_space = self.removes_spaces;
        while at < text.len() {
            let (mut made, len) = self.normal_prefix(&text[at..]);
            if after_space {
                made = made.trim_start_matches(' ');
            }
            if !made.is_empty() {
                put(&mut normal, &mut origins, &made.replace(' ', SPACE), at);
                after_space = self.removes_spaces && made.ends_with(' ');
            }
            at += len;
        }
        if self.removes_spaces {
            while normal.ends_with(SPACE) {
                normal.truncate(normal.len() - SPACE.len());
                at = origins[normal.len()];
            }
            origins.truncate(normal.len());
        }
        origins.push(at);
        (normal, origins)
    }

    /// Returns the length in bytes of each piece of the most probable sequence.
    fn top_tokens(&self, text: &str) -> Vec<usize> {
        // For each byte of the text: the best score of a split that ends there, and the start of the last part of that split.
        let mut ends = vec![(f32::NEG_INFINITY, 0); text.len() + 1];
        ends[0].0 = 0.0;
        for (start, first) in text.char_indices() {
            let before = f64::from(ends[start].0);
            let mut take = |end: usize, score: f64| {
                let score = score + before;
                if score > f64::from(ends[end].0) {
                    ends[end] = (score as f32, start);
                }
            };
            let single = start + first.len_utf8();
            let most = text.len().min(start + self.longest);
            let mut has_single = false;
            for end in single..=most {
                let piece = text.get(start..end).and_then(|t| self.found(t));
                let Some(piece) = piece else {
                    continue;
                };
                let score = match piece.usage() {
                    Use::Unused => continue,
                    Use::Defined => f64::from((end - start) as f32 * self.most) - 0.1,
                    _ => f64::from(piece.score),
                };
                take(end, score);
                has_single |= end == single;
            }
            if !has_single {
                take(single, f64::from(self.least - UNKNOWN));
            }
        }
        let (mut lens, mut end) = (Vec::new(), text.len());
        while end > 0 {
            let start = ends[end].1;
            lens.push(end - start);
            end = start;
        }
        lens.reverse();
        lens
    }

    /// Repeatedly merges the pair of neighbors with the best score. Returns the length in bytes of each resulting part.
    fn join(&self, text: &str) -> Vec<usize> {
        let mut line = Line::new(self, text);
        let mut pairs = BinaryHeap::new();
        // For each merged piece of the kind `Unused`: its text, and the length of its left part. These merges are undone below.
        let mut made: HashMap<&str, usize> = HashMap::new();
        for right in 1..line.parts.len() {
            line.pair(right - 1, right, &mut pairs, &mut made);
        }
        while let Some(Pair {
            left, right, len, ..
        }) = pairs.pop()
        {
            let (l, r) = (&line.parts[left], &line.parts[right]);
            if l.len == 0 || r.len == 0 || l.len + r.len != len {
                continue;
            }
            let next = r.next;
            line.parts[right].len = 0;
            line.parts[left].len = len;
            line.parts[left].next = next;
            if let Some(next) = next {
                line.parts[next].previous = Some(left);
                line.pair(left, next, &mut pairs, &mut made);
            }
            if let Some(previous) = line.parts[left].previous {
                line.pair(previous, left, &mut pairs, &mut made);
            }
        }
        let mut lens = Vec::new();
        for part in line.parts.iter().filter(|p| p.len > 0) {
            self.part_again(&text[part.start..part.start + part.len], &made, &mut lens);
        }
        lens
    }

    fn is_unused(&self, part: &str) -> bool {
        let piece = self.found(part);
        piece.is_some_and(|p| p.usage() == Use::Unused)
    }

    /// Appends to `lens` the lengths of the pieces of `part`, after undoing merges that gave unused pieces.
    fn part_again(&self, part: &str, made: &HashMap<&str, usize>, lens: &mut Vec<usize>) {
        match made.get(part) {
            Some(&left) if self.is_unused(part) => {
                self.part_again(&part[..left], made, lens);
                self.part_again(&part[left..], made, lens);
            }
            _ => lens.push(part.len()),
        }
    }

    /// Joins `pieces` to the beginning of a text. Removes a leading space if the normalization adds one or removes spaces.
    pub(super) fn text<'p>(&self, pieces: impl IntoIterator<Item = &'p str>) -> String {
        let mut text = String::new();
        let mut is_begun = false;
        for piece in pieces {
            is_begun |= !text.is_empty();
            let usage = self.numbers.get(piece).map(|&n| self.pieces[n].usage());
            match usage {
                // The token is from another vocabulary, so it is appended unchanged.
                None => text.push_str(piece),
                Some(Use::Control) => {}
                Some(Use::Unknown) => text.push_str(&self.unknown_surface),
                Some(Use::Normal | Use::Defined | Use::Unused) => {
                    let strips = !is_begun && (self.adds_prefix || self.removes_spaces);
                    let rest = strips.then(|| piece.strip_prefix(SPACE)).flatten();
                    is_begun |= rest.is_some() && !self.removes_spaces;
                    text.push_str(&rest.unwrap_or(piece).replace(SPACE, " "));
                }
            }
        }
        text
    }
}

fn check(index: usize, piece: &Piece) -> Result<(), String> {
    let Piece { text, score, kind } = piece;
    if text.is_empty() || text.len() > MAX_PIECE_BYTES {
        let len = text.len();
        return Err(format!(
            "piece {index} has {len} bytes; expected 1 to {MAX_PIECE_BYTES}"
        ));
    }
    if !score.is_finite() {
        return Err(format!(
            "piece {index}, `{text}`, has the score {score}; expected a finite one"
        ));
    }
    if !matches!(kind, None | Some(1..=5)) {
        let kind = kind.unwrap_or_default();
        return Err(format!(
            "piece {index}, `{text}`, is of kind {kind}; expected 1 to 5: normal, unknown, control, user-defined or unused"
        ));
    }
    Ok(())
}

/// A part of a text during merging. A part with length 0 was merged into the previous one.
struct Part {
    start: usize,
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
    /// Whether the part is a user-defined piece, which is never merged.
    is_whole: bool,
}

/// Two neighbors that form a piece.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Pair {
    /// Orders by score, and pairs of equal score by position.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.partial_cmp(&other.score);
        let by_score = by_score.unwrap_or(Ordering::Equal);
        by_score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

struct Line<'t, 'm> {
    model: &'m Model,
    text: &'t str,
    parts: Vec<Part>,
}

impl<'t, 'm> Line<'t, 'm> {
    fn new(model: &'m Model, text: &'t str) -> Self {
        let mut parts: Vec<Part> = Vec::new();
        let mut start = 0;
        while let Some(first) = text[start..].chars().next() {
            let defined = model.defined_at(&text[start..]);
            let len = defined.unwrap_or(first.len_utf8());
            let index = parts.len();
            let next = (start + len < text.len()).then_some(index + 1);
            parts.push(Part {
                start,
                len,
                previous: index.checked_sub(1),
                next,
                is_whole: defined.is_some(),
            });
            start += len;
        }
        Self { model, text, parts }
    }

    fn pair(
        &self,
        left: usize,
        right: usize,
        pairs: &mut BinaryHeap<Pair>,
        made: &mut HashMap<&'t str, usize>,
    ) {
        let (l, r) = (&self.parts[left], &self.parts[right]);
        if l.is_whole || r.is_whole {
            return;
        }
        let len = l.len + r.len;
        let whole = &self.text[l.start..l.start + len];
        let Some(piece) = self.model.found(whole) else {
            return;
        };
        pairs.push(Pair {
            score: piece.score,
            left,
            right,
            len,
        });
        if piece.usage() == Use::Unused {
            made.insert(whole, l.len);
        }
    }
}
