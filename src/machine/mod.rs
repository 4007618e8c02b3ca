//! Descriptions of cards: the properties that launches and kernel selection depend on.
//!
//! Each file of `machines/` describes one card. Properties that the driver reports for the present card ([`Live`]) replace those of the
//! file. A MIG instance therefore has the number of SMs that the driver reports. A card without a file uses the file of the most similar
//! card, and [`Served`] reports this.

mod cost;
mod error;
#[cfg(test)]
mod tests;

use std::{cmp::Reverse, sync::LazyLock};

use serde::{Deserialize, Serialize};

pub use cost::{Costs, GemmNorm, Hopper, MmaSync, Norm, SMALL_M, SmallM, SplitK, Wgmma};
pub use error::MachineError;

/// Names and contents of the files in `machines/`, as listed by the build script.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/machines.rs"));

/// The card for which programs are lowered if no card is named or present. It has the oldest compute capability, so its kernels run on all
/// cards.
const DEFAULT: &str = "a100";

/// Instruction set of a kernel. Each set includes all sets before it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum Instructions {
    /// Instructions that all cards from compute capability 8.0 on have: `mma.sync`, `cp.async`.
    #[default]
    Ampere,
    /// `mma.sync` of E4M3 elements, and conversions to E4M3. Tensor cores of compute capability 8.9 and 12.x have such MMAs. For 9.0 and
    /// 10.0, the assembler (`ptxas`) replaces these MMAs by conversions to f16 and MMAs in f16, which are not faster.
    /// [`Instructions::Hopper`] nevertheless includes this set, for the conversions and to check the kernels on Hopper. Cards of capability
    /// 10.x do not have this set.
    Ada,
    /// Instructions of compute capability 9.0a: `wgmma`, TMA, clusters. No other capability has all of these.
    Hopper,
}

impl Instructions {
    /// Returns the newest instruction set that kernels for cards of a compute capability may use.
    pub fn of_capability(capability: (u32, u32)) -> Self {
        match capability {
            (9, 0) => Self::Hopper,
            (8, 9) | (12, _) => Self::Ada,
            _ => Self::Ampere,
        }
    }

    /// Returns whether a card with these instructions also has `needed`.
    pub fn includes(self, needed: Self) -> bool {
        self >= needed
    }
}

/// Description of a card.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name of the file without its extension; the value of `--card`.
    #[serde(default)]
    pub name: String,
    /// The driver's names of the cards that the file describes.
    pub cards: Vec<String>,
    /// Compute capability, (major, minor).
    pub capability: (u32, u32),
    /// The newest instruction set that kernels for the card may use.
    pub instructions: Instructions,
    pub sms: u32,
    pub threads_per_sm: u32,
    /// Number of 32-bit registers per SM.
    pub registers_per_sm: u32,
    /// Bytes of shared memory per SM, including the 1 KiB per resident CTA that the driver reserves.
    pub shared_per_sm: u32,
    /// Maximum bytes of shared memory that a CTA may opt into.
    pub shared_per_cta: u32,
    pub l2_bytes: u64,
    /// Clock in MHz by which the cost model converts between times and cycles.
    pub clock_mhz: u32,
    /// Max numbers of clusters of 2, 3, … 8 CTAs that are resident at once, with one CTA per SM; empty on cards without clusters.
    pub clusters: Vec<u32>,
    pub rates: Rates,
    pub fit: Fit,
    pub costs: Costs,
}

/// Source of the cost model's constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fit {
    /// Fitted to timings on the card.
    Timings,
    /// Fitted to timings on another card of the same capability.
    Relative,
    /// Estimated from the card's data sheet.
    DataSheet,
}

/// Peak rates of a card from its data sheet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Multiply-adds of 16-bit elements with f32 accumulation in tensor cores, per cycle and SM.
    pub tensor: f64,
    /// Multiply-adds of f32 outside tensor cores, per cycle and SM.
    pub fma: f64,
    /// Bandwidth of shared memory, in bytes per cycle and SM.
    pub shared: f64,
    /// Bandwidth of device memory for all SMs together, in bytes per cycle.
    pub dram: f64,
}

/// Properties of a card as reported by the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    /// The driver's name of the card.
    pub name: String,
    pub capability: (u32, u32),
    pub sms: u32,
    pub threads_per_sm: u32,
    pub registers_per_sm: u32,
    pub shared_per_sm: u32,
    pub shared_per_cta: u32,
    pub l2_bytes: u64,
}

/// Relation between a card and the file that describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The file describes the card itself.
    Own,
    /// The file describes another card of the same compute capability or, if no such card is described, of the newest older capability.
    Nearest,
}

static ALL: LazyLock<Result<Vec<Machine>, MachineError>> = LazyLock::new(|| {
    let mut machines = FILES
        .iter()
        .map(|(name, text)| Machine::parse(name.trim_end_matches(".ron"), text))
        .collect::<Result<Vec<_>, _>>()?;
    machines.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(machines)
});

impl Machine {
    /// Returns all described cards, sorted by name.
    ///
    /// # Errors
    /// Returns [`MachineError::File`] for a file that does not parse. Tests check all files.
    pub fn all() -> Result<&'static [Self], MachineError> {
        match &*ALL {
            Ok(machines) => Ok(machines),
            Err(error) => Err(error.clone()),
        }
    }

    fn parse(name: &str, text: &str) -> Result<Self, MachineError> {
        let options = ron::Options::default()
            .with_default_extension(ron::extensions::Extensions::IMPLICIT_SOME);
        let mut machine: Self = options.from_str(text).map_err(|e| MachineError::File {
            name: name.to_owned(),
            problem: e.to_string(),
        })?;
        machine.name = name.to_owned();
        Ok(machine)
    }

    /// Returns the card whose file has this name.
    ///
    /// # Errors
    /// Returns [`MachineError::Unknown`], with the most similar name.
    pub fn named(name: &str) -> Result<Self, MachineError> {
        let all = Self::all()?;
        match all.iter().find(|machine| machine.name == name) {
            Some(machine) => Ok(machine.clone()),
            None => Err(MachineError::unknown(name, all)),
        }
    }

    /// Returns the default card, for which programs are lowered if no card is named or present.
    ///
    /// # Errors
    /// Returns the errors of [`Machine::all`].
    pub fn usual() -> Result<Self, MachineError> {
        Self::named(DEFAULT)
    }

    /// Returns the card that represents a compute capability: the card whose costs were fitted to its own timings, otherwise the first card
    /// by name. Returns `None` if no card of the capability is described.
    ///
    /// # Errors
    /// Returns the errors of [`Machine::all`].
    pub fn of_capability(capability: (u32, u32)) -> Result<Option<Self>, MachineError> {
        let all = Self::all()?
            .iter()
            .filter(|machine| machine.capability == capability);
        Ok(all
            .min_by_key(|machine| machine.fit != Fit::Timings)
            .cloned())
    }

    /// Returns the description of the present card, and whether a file describes this card. If none does, the file of another card is used.
    /// The other card has the same compute capability or, if no such card is described, the newest older capability. If several cards have
    /// this capability, the card with the nearest number of SMs is used.
    ///
    /// # Errors
    /// Returns the errors of [`Machine::all`], and [`MachineError::TooOld`] for a card older than
    /// all described cards.
    pub fn of(live: &Live) -> Result<(Self, Served), MachineError> {
        let all = Self::all()?;
        let own = all
            .iter()
            .find(|machine| machine.cards.contains(&live.name));
        if let Some(own) = own {
            return Ok((own.with(live), Served::Own));
        }
        let older = all
            .iter()
            .filter(|machine| machine.capability <= live.capability);
        let nearness =
            |machine: &&Self| (machine.capability, Reverse(machine.sms.abs_diff(live.sms)));
        match older.max_by_key(nearness) {
            Some(nearest) => Ok((nearest.with(live), Served::Nearest)),
            None => Err(MachineError::TooOld {
                card: live.name.clone(),
                capability: live.capability,
            }),
        }
    }

    /// Replaces the file's properties with those that the driver reports.
    fn with(&self, live: &Live) -> Self {
        let mut machine = self.with_sms(live.sms);
        if machine.capability != live.capability {
            // Code for an architecture-specific target such as sm_90a does not run on cards of another capability.
            machine.instructions =
                Instructions::of_capability(live.capability).min(self.instructions);
            machine.clusters.clear();
        }
        machine.capability = live.capability;
        machine.threads_per_sm = live.threads_per_sm;
        machine.registers_per_sm = live.registers_per_sm;
        machine.shared_per_sm = live.shared_per_sm;
        machine.shared_per_cta = live.shared_per_cta;
        machine.l2_bytes = live.l2_bytes;
        machine
    }

    /// Returns whether kernels for the card multiply E4M3 elements faster than 16-bit elements.
    pub fn has_e4m3_products(&self) -> bool {
        self.instructions.includes(Instructions::Ada)
    }

    /// Returns the card with `sms` SMs instead. The numbers of resident clusters are scaled in proportion.
    pub fn with_sms(&self, sms: u32) -> Self {
        let mut machine = self.clone();
        let scaled = |&at_once: &u32| {
            let part = u64::from(at_once) * u64::from(sms) / u64::from(self.sms.max(1));
            u32::try_from(part).unwrap_or(u32::MAX)
        };
        machine.sms = sms.max(1);
        machine.clusters = self.clusters.iter().map(scaled).collect();
        machine
    }

    /// Returns the number of clusters of `ctas` CTAs that can be resident at the same time, with one CTA per SM; 0 if none fits.
    pub fn clusters_at_once(&self, ctas: u32) -> u64 {
        match ctas {
            0 | 1 => self.sms.into(),
            ctas if ctas > self.sms => 0,
            ctas => {
                let known = self.clusters.get(ctas as usize - 2);
                known.copied().unwrap_or_default().into()
            }
        }
    }

    /// Returns the number of CTAs with `bytes` of dynamic shared memory that can be resident on an SM at the same time.
    pub fn ctas_by_shared(&self, bytes: u32) -> u32 {
        /// Bytes that the driver reserves for each CTA.
        const RESERVED: u32 = 1024;
        self.shared_per_sm / (bytes + RESERVED)
    }
}

/// Cards for tests.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// Returns a card with Hopper instructions whose costs were fitted to its own timings.
    pub(crate) fn hopper() -> Machine {
        let found = Machine::of_capability((9, 0)).expect("the cards are described");
        found.expect("a card with Hopper's instructions is described")
    }

    /// Returns a card that multiplies E4M3 elements with `mma.sync` and has no Hopper instructions.
    pub(crate) fn ada() -> Machine {
        let found = Machine::of_capability((8, 9)).expect("the cards are described");
        found.expect("a card with the instructions of Ada is described")
    }

    /// Returns a card without Hopper instructions.
    pub(crate) fn usual() -> Machine {
        Machine::usual().expect("the cards are described")
    }
}
