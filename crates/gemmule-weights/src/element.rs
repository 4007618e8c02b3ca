//! Types of the elements of stored tensors.

use std::fmt;

/// Type of the elements of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Element {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E4M3Fnuz,
    F8E5M2,
    F8E5M2Fnuz,
    F8E8M0,
    C128,
    C64,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl Element {
    /// Returns the size of an element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::C128 => 16,
            Self::F64 | Self::C64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::F8E4M3
            | Self::F8E4M3Fnuz
            | Self::F8E5M2
            | Self::F8E5M2Fnuz
            | Self::F8E8M0
            | Self::I8
            | Self::U8
            | Self::Bool => 1,
        }
    }

    /// Returns the type of a legacy torch storage class, such as `FloatStorage`.
    pub(crate) fn of_storage(class: &str) -> Option<Self> {
        Some(match class.strip_suffix("Storage")? {
            "Double" => Self::F64,
            "Float" => Self::F32,
            "Half" => Self::F16,
            "BFloat16" => Self::BF16,
            "ComplexDouble" => Self::C128,
            "ComplexFloat" => Self::C64,
            "Long" => Self::I64,
            "Int" => Self::I32,
            "Short" => Self::I16,
            "Char" => Self::I8,
            "Byte" => Self::U8,
            "Bool" => Self::Bool,
            _ => return None,
        })
    }

    /// Returns the type of a `torch.dtype`, such as `float16`.
    pub(crate) fn of_dtype(name: &str) -> Option<Self> {
        Some(match name {
            "float64" => Self::F64,
            "float32" => Self::F32,
            "float16" => Self::F16,
            "bfloat16" => Self::BF16,
            "float8_e4m3fn" => Self::F8E4M3,
            "float8_e4m3fnuz" => Self::F8E4M3Fnuz,
            "float8_e5m2" => Self::F8E5M2,
            "float8_e5m2fnuz" => Self::F8E5M2Fnuz,
            "float8_e8m0fnu" => Self::F8E8M0,
            "complex128" => Self::C128,
            "complex64" => Self::C64,
            "int64" => Self::I64,
            "int32" => Self::I32,
            "int16" => Self::I16,
            "int8" => Self::I8,
            "uint64" => Self::U64,
            "uint32" => Self::U32,
            "uint16" => Self::U16,
            "uint8" => Self::U8,
            "bool" => Self::Bool,
            _ => return None,
        })
    }
}

/// Writes the type's name in safetensors.
impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::F8E8M0 => "F8_E8M0",
            Self::C128 => "C128",
            Self::C64 => "C64",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I16 => "I16",
            Self::I8 => "I8",
            Self::U64 => "U64",
            Self::U32 => "U32",
            Self::U16 => "U16",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
        })
    }
}
