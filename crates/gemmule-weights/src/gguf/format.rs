//! Types of tensors, which determine how elements are stored.

use std::fmt;

/// Type of a tensor: plain elements, or blocks of quantized ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
}

/// Supported types: code in the file, name, elements per block and bytes per block.
const READ: [(u32, Format, &str, u64, u64); 15] = [
    (0, Format::F32, "F32", 1, 4),
    (1, Format::F16, "F16", 1, 2),
    (30, Format::BF16, "BF16", 1, 2),
    (2, Format::Q4_0, "Q4_0", 32, 18),
    (3, Format::Q4_1, "Q4_1", 32, 20),
    (6, Format::Q5_0, "Q5_0", 32, 22),
    (7, Format::Q5_1, "Q5_1", 32, 24),
    (8, Format::Q8_0, "Q8_0", 32, 34),
    (10, Format::Q2K, "Q2_K", 256, 84),
    (11, Format::Q3K, "Q3_K", 256, 110),
    (12, Format::Q4K, "Q4_K", 256, 144),
    (13, Format::Q5K, "Q5_K", 256, 176),
    (14, Format::Q6K, "Q6_K", 256, 210),
    (20, Format::IQ4NL, "IQ4_NL", 32, 18),
    (23, Format::IQ4XS, "IQ4_XS", 256, 136),
];

/// Unsupported types, by code, for messages.
const OTHERS: [(u32, &str); 26] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl Format {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        let found = READ.iter().find(|&&(known, ..)| known == code);
        found.map(|&(_, format, ..)| format)
    }

    fn row(self) -> (&'static str, u64, u64) {
        let found = READ.iter().find(|&&(_, format, ..)| format == self);
        let &(_, _, name, elements, bytes) = found.expect("the table has each variant");
        (name, elements, bytes)
    }

    /// Returns the number of elements of a block; 1 for plain elements.
    pub fn block_elements(self) -> u64 {
        self.row().1
    }

    /// Returns the size of a block in bytes.
    pub fn block_bytes(self) -> u64 {
        self.row().2
    }
}

/// Writes the type's name in ggml, such as `Q4_K`.
impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().0)
    }
}

/// Returns the name of an unsupported type, for messages.
pub(super) fn name_of(code: u32) -> String {
    match OTHERS.iter().find(|&&(known, _)| known == code) {
        Some((_, name)) => format!("`{name}`"),
        None => format!("number {code}, which is unknown"),
    }
}

/// Returns the names of the supported types, for messages.
pub(super) fn names_read() -> String {
    READ.map(|(_, _, name, ..)| name).join(", ")
}

#[cfg(test)]
pub(super) fn all() -> impl Iterator<Item = Format> {
    READ.into_iter().map(|(_, format, ..)| format)
}
