use super::{EngineError, Outputs};

impl Outputs {
    /// Checks that all values of all outputs are finite. A run does not check this. Callers should, because NaN values propagate to
    /// everything computed from them, and JSON cannot represent them.
    ///
    /// # Errors
    /// Returns [`EngineError::NotFinite`] with the first output that has NaN or infinite values, their number, and the
    /// position of the first.
    pub fn check_finite(&self) -> Result<(), EngineError> {
        for output in &self.outputs {
            let Some(first) = output.values.iter().position(|v| !v.is_finite()) else {
                continue;
            };
            let bad = output.values.iter().filter(|v| !v.is_finite());
            return Err(EngineError::NotFinite {
                output: output.name.clone(),
                n_bad: bad.count(),
                n_values: output.values.len(),
                first: self.place(first, &output.shape),
            });
        }
        Ok(())
    }

    /// Describes the position of a value, by sequence and token if the shape has them.
    fn place(&self, at: usize, shape: &[u64]) -> String {
        let n_tokens: u64 = self.lens.iter().map(|&n| u64::from(n)).sum();
        let n_rows = shape.first().copied().unwrap_or(0);
        let row = at as u64 / shape.iter().skip(1).product::<u64>().max(1);
        if n_rows == self.lens.len() as u64 {
            return format!("sequence {row}");
        }
        if n_rows != n_tokens {
            return format!("value {at}");
        }
        let mut token = row;
        for (sequence, &n) in self.lens.iter().enumerate() {
            if token < u64::from(n) {
                return format!("sequence {sequence}, token {token}");
            }
            token -= u64::from(n);
        }
        format!("token {row}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Output;

    #[test]
    fn non_finite_values_are_reported_with_their_position() {
        let outputs = |shape: &[u64], bad: &[usize]| {
            let n = shape.iter().product::<u64>() as usize;
            let mut values = vec![0.5; n];
            for &at in bad {
                values[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][at % 3];
            }
            let output = |name: &str, values| Output {
                name: name.to_owned(),
                shape: shape.to_vec(),
                values,
            };
            Outputs {
                outputs: vec![output("fine", vec![0.0; n]), output("x", values)],
                lens: vec![3, 2],
            }
        };
        let text = |shape: &[u64], bad: &[usize]| {
            let checked = outputs(shape, bad).check_finite();
            checked.map_err(|e| e.to_string())
        };
        assert_eq!(text(&[5, 4], &[]), Ok(()));
        insta::assert_snapshot!(text(&[5, 4], &[17, 18]).unwrap_err(), @"the output `x` contains NaN or infinite values: 2 of 20, the first in sequence 1, token 1; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16");
        insta::assert_snapshot!(text(&[2, 4], &[5]).unwrap_err(), @"the output `x` contains NaN or infinite values: 1 of 8, the first in sequence 1; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16");
        insta::assert_snapshot!(text(&[2, 13], &[14]).unwrap_err(), @"the output `x` contains NaN or infinite values: 1 of 26, the first in sequence 1; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16");
        insta::assert_snapshot!(text(&[7, 2], &[3]).unwrap_err(), @"the output `x` contains NaN or infinite values: 1 of 14, the first in value 3; check that the checkpoint is undamaged and that the storage type can hold its values: bf16 and f32 have a wider range than f16");
    }
}
