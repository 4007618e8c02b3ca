//! Values that a pickle builds.

use std::ops::Range;

use crate::element::Element;

/// Index of a value in `Pickle::values`. Values refer to each other by index, so deep nesting and cycles cannot overflow the stack.
pub(crate) type Id = usize;

/// A supported function or class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Global {
    OrderedDict,
    RebuildTensor,
    /// Like `RebuildTensor`, but the element type is an argument.
    RebuildTypedTensor,
    RebuildParameter,
    Size,
    Storage(Element),
    /// A storage of bytes. Its element type is an argument of `RebuildTypedTensor`.
    UntypedStorage,
    DType(Element),
}

impl Global {
    pub(super) fn find(module: &str, name: &str) -> Option<Self> {
        Some(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_tensor_v3") => Self::RebuildTypedTensor,
            // The state of a parameter has attributes that a program has set on it. They are ignored.
            ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
                Self::RebuildParameter
            }
            ("torch", "Size") => Self::Size,
            ("torch.storage", "UntypedStorage") => Self::UntypedStorage,
            ("torch", name) => match Element::of_storage(name) {
                Some(element) => Self::Storage(element),
                None => Self::DType(Element::of_dtype(name)?),
            },
            _ => return None,
        })
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OrderedDict => "collections.OrderedDict",
            Self::RebuildTensor => "torch._utils._rebuild_tensor_v2",
            Self::RebuildTypedTensor => "torch._utils._rebuild_tensor_v3",
            Self::RebuildParameter => "torch._utils._rebuild_parameter",
            Self::Size => "torch.Size",
            Self::Storage(_) | Self::UntypedStorage => "a storage",
            Self::DType(_) => "a torch.dtype",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A value that no tensor depends on: `None`, a boolean, a real number, or an integer with more than 64 bits.
    Other,
    Int(i64),
    /// Range of a string in the bytes of the pickle. The string is valid UTF-8.
    Text(Range<usize>),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Global(Global),
    Storage(Storage),
    Tensor(Box<View>),
}

/// A storage: the elements that the archive has under one key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Storage {
    /// Type of the elements; `None` for a storage of bytes.
    pub(crate) element: Option<Element>,
    /// A [`Value::Text`].
    pub(crate) key: Id,
    /// Number of elements, or of bytes.
    pub(crate) n: i64,
}

/// A view of a storage, as stored in the pickle.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct View {
    pub(crate) element: Element,
    pub(crate) storage: Storage,
    /// Index of the view's first element in the storage.
    pub(crate) offset: i64,
    pub(crate) dims: Vec<i64>,
    pub(crate) strides: Vec<i64>,
}
