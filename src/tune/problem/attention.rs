//! The single kernels of fused attention.

use super::{Choice, Problem};
use crate::kernels::{
    Instructions, KernelSpec,
    attention::{MhaOnline, MhaShort, MhaSplitKeys, MhaWgmma},
};

/// The kernel for any length and card; `None` where the problem is another.
fn online(problem: &Problem) -> Option<MhaOnline> {
    let &Problem::Attention {
        heads,
        head,
        scale,
        q,
        k,
        v,
        dtype,
        instructions: _,
    } = problem
    else {
        return None;
    };
    Some(MhaOnline {
        heads,
        head,
        scale,
        q,
        k,
        v,
        dtype,
    })
}

/// The kernel of a choice; `None` where the choice is none of attention, or the problem another.
pub(super) fn kernel(problem: &Problem, choice: Choice) -> Option<KernelSpec> {
    let online = online(problem)?;
    let MhaOnline {
        heads,
        head,
        scale,
        q,
        k,
        v,
        dtype,
    } = online;
    match choice {
        Choice::MhaOnline => Some(online.into()),
        Choice::MhaShort { max_len } => {
            let short = MhaShort {
                heads,
                head,
                scale,
                q,
                k,
                v,
                max_len,
                dtype,
            };
            Some(short.into())
        }
        Choice::MhaWgmma(tile) => {
            let wgmma = MhaWgmma {
                heads,
                head,
                scale,
                q,
                k,
                v,
                dtype,
                tile,
            };
            Some(wgmma.into())
        }
        _ => None,
    }
}

impl Problem {
    /// What is launched for few tokens, where that was measured to be faster than any choice: on Hopper.
    pub fn attention_of_few_tokens(&self) -> Option<MhaSplitKeys> {
        let Problem::Attention {
            instructions: Instructions::Hopper,
            ..
        } = self
        else {
            return None;
        };
        let few = MhaSplitKeys {
            plain: online(self)?,
        };
        few.check().is_ok().then_some(few)
    }
}
