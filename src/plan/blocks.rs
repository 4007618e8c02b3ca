//! Ownership of the blocks of a KV cache.

/// A pool of blocks, each with at most one owner.
#[derive(Clone, Debug)]
pub struct Blocks {
    free: Vec<u32>,
    total: u32,
}

/// Error of a request for more blocks than are available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache is full: {missing} more free blocks are needed")]
pub struct Full {
    pub missing: u32,
}

impl Blocks {
    pub fn new(total: u32) -> Self {
        Self {
            // Blocks with the lowest numbers are handed out first.
            free: (0..total).rev().collect(),
            total,
        }
    }

    /// Hands out `n` blocks.
    ///
    /// # Errors
    /// Returns [`Full`], and hands out none, if fewer than `n` blocks are free.
    pub fn admit(&mut self, n: u32) -> Result<Vec<u32>, Full> {
        match self.free.len().checked_sub(n as usize) {
            Some(rest) => {
                let mut granted = self.free.split_off(rest);
                granted.reverse();
                Ok(granted)
            }
            None => Err(Full {
                missing: n - self.free.len() as u32,
            }),
        }
    }

    /// Returns blocks to the pool. They must be from [`admit`](Self::admit).
    pub fn free(&mut self, granted: Vec<u32>) {
        self.free.extend(granted.into_iter().rev());
        debug_assert!(self.free.len() <= self.total as usize);
    }

    /// Returns the number of blocks that have an owner.
    pub fn held(&self) -> u32 {
        self.total - self.free.len() as u32
    }

    pub fn total(&self) -> u32 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Checks that no block has two owners, that all blocks are returned, and that `Full` reports exactly the number of missing blocks.
        #[test]
        fn no_block_has_two_owners(total in 0u32..40, steps in prop::collection::vec((any::<bool>(), 0u32..20), 0..60)) {
            let mut blocks = Blocks::new(total);
            let mut grants: Vec<Vec<u32>> = Vec::new();
            for (admit, n) in steps {
                if !admit && !grants.is_empty() {
                    let given = grants.remove(n as usize % grants.len());
                    blocks.free(given);
                    continue;
                }
                let free = total - blocks.held();
                match blocks.admit(n) {
                    Ok(given) => {
                        prop_assert_eq!(given.len() as u32, n);
                        grants.push(given);
                    }
                    Err(full) => prop_assert_eq!(full.missing, n - free),
                }
                let owned: Vec<u32> = grants.concat();
                let distinct: BTreeSet<u32> = owned.iter().copied().collect();
                prop_assert_eq!(distinct.len(), owned.len());
                prop_assert!(owned.iter().all(|&b| b < total));
                prop_assert_eq!(blocks.held() as usize, owned.len());
            }
            grants.into_iter().for_each(|given| blocks.free(given));
            prop_assert_eq!(blocks.admit(total).map(|all| all.len() as u32), Ok(total));
        }
    }
}
