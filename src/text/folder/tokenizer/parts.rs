//! Accessors for the parts of a tokenizer.

use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer, decoders,
    normalizers::BertNormalizer, pre_tokenizers::metaspace::PrependScheme,
};

pub(super) fn set_normalizer(
    tokenizer: &mut Tokenizer,
    normalizer: Option<NormalizerWrapper>,
) -> tokenizers::Result<()> {
    tokenizer.with_normalizer(normalizer).map(drop)
}

/// Returns the normalizers of a sequence, or the only normalizer.
pub(super) fn normalizers_of(tokenizer: &Tokenizer) -> Vec<NormalizerWrapper> {
    match tokenizer.get_normalizer().cloned() {
        Some(NormalizerWrapper::Sequence(all)) => all.into_iter().collect(),
        one => one.into_iter().collect(),
    }
}

/// Returns BERT's normalizer, which may be `normalizer` itself or an element of a sequence; `None` if there is none.
pub(super) fn bert_in(normalizer: &mut NormalizerWrapper) -> Option<&mut BertNormalizer> {
    match normalizer {
        NormalizerWrapper::BertNormalizer(bert) => Some(bert),
        NormalizerWrapper::Sequence(all) => all.as_mut().iter_mut().find_map(bert_in),
        _ => None,
    }
}

pub(super) fn strips_accents(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::StripAccents(_) => true,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().any(strips_accents),
        _ => false,
    }
}

/// Returns the index of SentencePiece's normalizer, or the number of normalizers if there is none. Callers insert further normalizers at
/// this index.
pub(super) fn before_precompiled(all: &[NormalizerWrapper]) -> usize {
    let is_precompiled = |n: &NormalizerWrapper| matches!(n, NormalizerWrapper::Precompiled(_));
    all.iter().position(is_precompiled).unwrap_or(all.len())
}

/// Sets whether a space is put before texts.
pub(super) fn set_space(
    pre_tokenizer: &mut PreTokenizerWrapper,
    adds: bool,
    scheme: PrependScheme,
) {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(bytes) => {
            bytes.add_prefix_space = adds;
        }
        PreTokenizerWrapper::Metaspace(space) => {
            space.set_prepend_scheme(scheme);
        }
        PreTokenizerWrapper::Sequence(all) => {
            let all = all.as_mut().iter_mut();
            all.for_each(|p| set_space(p, adds, scheme));
        }
        _ => {}
    }
}

pub(super) fn has_byte_level(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(has_byte_level),
        _ => false,
    }
}

/// Makes the decoder drop exactly the space that Metaspace puts before texts.
pub(super) fn set_decoder_space(tokenizer: &mut Tokenizer, scheme: PrependScheme) {
    let decoder = match tokenizer.get_decoder().cloned() {
        Some(DecoderWrapper::Metaspace(mut space)) => {
            space.set_prepend_scheme(scheme);
            DecoderWrapper::Metaspace(space)
        }
        Some(DecoderWrapper::Sequence(all)) if scheme == PrependScheme::Never => {
            let all = all.get_decoders().iter();
            let all = all.filter(|d| !matches!(d, DecoderWrapper::Strip(_)));
            decoders::sequence::Sequence::new(all.cloned().collect()).into()
        }
        _ => return,
    };
    tokenizer.with_decoder(Some(decoder));
}
