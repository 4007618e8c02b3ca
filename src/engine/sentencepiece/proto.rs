//! The wire format of protocol buffers: fields with a number and a value. Groups, which no SentencePiece model has, are refused.

/// The reason why bytes are no message.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Damaged {
    #[error("{message} ends within a field")]
    End { message: &'static str },
    #[error("{message} has a number of more than 64 bits")]
    Varint { message: &'static str },
    #[error("{message} has a field with the invalid number or type {key}")]
    Key { message: &'static str, key: u64 },
    #[error("field {number} of {message} holds {found}; expected {expected}")]
    Type {
        message: &'static str,
        number: u32,
        expected: &'static str,
        found: &'static str,
    },
    #[error("field {number} of {message} is not UTF-8")]
    Text { message: &'static str, number: u32 },
}

/// The fields of a message.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
    /// Name of the message for errors.
    message: &'static str,
}

/// The value of a field.
pub(super) struct Value<'a> {
    raw: Raw<'a>,
    number: u32,
    message: &'static str,
}

enum Raw<'a> {
    Varint(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32([u8; 4]),
}

impl<'a> Fields<'a> {
    pub fn of(bytes: &'a [u8], message: &'static str) -> Self {
        Self {
            rest: bytes,
            message,
        }
    }

    /// Calls `take` with the number and the value of each field in order.
    ///
    /// # Errors
    /// Returns the first error of a field or of `take`.
    pub fn each(
        mut self,
        mut take: impl FnMut(u32, Value<'a>) -> Result<(), Damaged>,
    ) -> Result<(), Damaged> {
        while !self.rest.is_empty() {
            let message = self.message;
            let key = self.varint()?;
            let invalid = Damaged::Key { message, key };
            let number = u32::try_from(key >> 3).ok().filter(|number| *number > 0);
            let Some(number) = number else {
                return Err(invalid);
            };
            let raw = match key & 7 {
                0 => Raw::Varint(self.varint()?),
                1 => {
                    self.bytes(8)?;
                    Raw::Fixed64
                }
                2 => {
                    let len = self.varint()?;
                    Raw::Bytes(self.bytes(len)?)
                }
                5 => {
                    let mut value = [0; 4];
                    value.copy_from_slice(self.bytes(4)?);
                    Raw::Fixed32(value)
                }
                _ => return Err(invalid),
            };
            take(
                number,
                Value {
                    raw,
                    number,
                    message,
                },
            )?;
        }
        Ok(())
    }

    fn bytes(&mut self, len: u64) -> Result<&'a [u8], Damaged> {
        let message = self.message;
        let split = usize::try_from(len)
            .ok()
            .and_then(|len| self.rest.split_at_checked(len));
        let (bytes, rest) = split.ok_or(Damaged::End { message })?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Reads a number of 7 bits per byte, the lowest first.
    fn varint(&mut self) -> Result<u64, Damaged> {
        let message = self.message;
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.bytes(1)? else {
                return Err(Damaged::End { message });
            };
            // The tenth byte has one bit left.
            if shift == 63 && *byte > 1 {
                break;
            }
            number |= u64::from(byte & 0x7f) << shift;
            if *byte < 0x80 {
                return Ok(number);
            }
        }
        Err(Damaged::Varint { message })
    }
}

impl<'a> Value<'a> {
    pub fn bytes(&self) -> Result<&'a [u8], Damaged> {
        match self.raw {
            Raw::Bytes(bytes) => Ok(bytes),
            _ => Err(self.expected("bytes")),
        }
    }

    pub fn text(&self) -> Result<String, Damaged> {
        let (message, number) = (self.message, self.number);
        let text = std::str::from_utf8(self.bytes()?);
        text.map(str::to_owned)
            .map_err(|_| Damaged::Text { message, number })
    }

    pub fn float(&self) -> Result<f32, Damaged> {
        match self.raw {
            Raw::Fixed32(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(self.expected("32 bits")),
        }
    }

    /// Returns an integer of 32 bits. Higher bits are ignored.
    pub fn int(&self) -> Result<i32, Damaged> {
        self.varint().map(|number| number as i32)
    }

    pub fn flag(&self) -> Result<bool, Damaged> {
        self.varint().map(|number| number != 0)
    }

    fn varint(&self) -> Result<u64, Damaged> {
        match self.raw {
            Raw::Varint(number) => Ok(number),
            _ => Err(self.expected("an integer")),
        }
    }

    fn expected(&self, expected: &'static str) -> Damaged {
        Damaged::Type {
            message: self.message,
            number: self.number,
            expected,
            found: match self.raw {
                Raw::Varint(_) => "an integer",
                Raw::Fixed64 => "64 bits",
                Raw::Bytes(_) => "bytes",
                Raw::Fixed32(_) => "32 bits",
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields as text.
    fn read(bytes: &[u8]) -> Result<Vec<String>, Damaged> {
        let mut fields = Vec::new();
        Fields::of(bytes, "a test").each(|number, value| {
            fields.push(match number {
                1 => value.text()?,
                2 => value.float()?.to_string(),
                3 => value.int()?.to_string(),
                4 => value.flag()?.to_string(),
                _ => "skipped".to_owned(),
            });
            Ok(())
        })?;
        Ok(fields)
    }

    #[test]
    fn fields_of_each_type_are_read_and_unknown_ones_are_skipped() {
        let bytes = [
            &[0x0a, 2, 0xc3, 0xa9][..],
            &[0x15, 0, 0, 0xc0, 0x3f],
            &[0x18, 0xac, 2],
            // −1, in ten bytes.
            &[
                0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1,
            ],
            &[0x20, 1],
            &[0x79, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0x82, 1, 0],
        ];
        let fields = read(&bytes.concat()).expect("it is a message");
        let expected = ["é", "1.5", "300", "-1", "true", "skipped", "skipped"];
        assert_eq!(fields, expected);
        assert_eq!(read(&[]), Ok(Vec::new()));
    }

    #[test]
    fn damaged_messages_are_errors() {
        let error = |bytes: &[u8]| read(bytes).expect_err("it is damaged").to_string();
        assert_eq!(error(&[0x0a, 3, b'a']), "a test ends within a field");
        assert_eq!(error(&[0x18]), "a test ends within a field");
        assert_eq!(error(&[0x18, 0x80]), "a test ends within a field");
        let long = [&[0x18][..], &[0xff; 10]].concat();
        assert_eq!(error(&long), "a test has a number of more than 64 bits");
        assert_eq!(
            error(&[2]),
            "a test has a field with the invalid number or type 2"
        );
        assert_eq!(
            error(&[0x0b]),
            "a test has a field with the invalid number or type 11"
        );
        assert_eq!(error(&[0x0a, 1, 0xff]), "field 1 of a test is not UTF-8");
        assert_eq!(
            error(&[0x1a, 0]),
            "field 3 of a test holds bytes; expected an integer"
        );
        assert_eq!(
            error(&[0x08, 0]),
            "field 1 of a test holds an integer; expected bytes"
        );
    }
}
