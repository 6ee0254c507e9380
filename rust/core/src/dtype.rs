//! Element types of encoder outputs, named as torch names them.

/// One element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    /// Its number in an entry; never reused for another type.
    pub code: u8,
    /// Torch's name without `torch.`.
    pub name: &'static str,
    /// Bytes of one element.
    pub size: u8,
}

/// Every element type that an entry can have. Code 0 is kept for "not known yet".
pub const DTYPES: &[Dtype] = &[
    dtype(1, "float32", 4),
    dtype(2, "float16", 2),
    dtype(3, "bfloat16", 2),
    dtype(4, "float64", 8),
    dtype(5, "uint8", 1),
    dtype(6, "int8", 1),
    dtype(7, "int16", 2),
    dtype(8, "int32", 4),
    dtype(9, "int64", 8),
    dtype(10, "bool", 1),
    dtype(11, "float8_e4m3fn", 1),
    dtype(12, "float8_e5m2", 1),
    dtype(13, "float8_e4m3fnuz", 1),
    dtype(14, "float8_e5m2fnuz", 1),
    dtype(15, "complex64", 8),
    dtype(16, "complex128", 16),
    dtype(17, "uint16", 2),
    dtype(18, "uint32", 4),
    dtype(19, "uint64", 8),
];

const fn dtype(code: u8, name: &'static str, size: u8) -> Dtype {
    Dtype { code, name, size }
}

/// The element type of this name.
pub fn by_name(name: &str) -> Option<Dtype> {
    DTYPES.iter().copied().find(|d| d.name == name)
}

/// The element type of this code.
pub fn by_code(code: u8) -> Option<Dtype> {
    DTYPES.get(usize::from(code).checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_lead_to_the_same_type() {
        for d in DTYPES {
            assert_eq!(by_code(d.code), Some(*d));
            assert_eq!(by_name(d.name), Some(*d));
        }
        assert_eq!(by_code(0), None);
        assert_eq!(by_code(200), None);
        assert_eq!(by_name("float31"), None);
    }
}
