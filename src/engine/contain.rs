//! Calls into code of others that panics on bad input: a panic ends the call, not the process.
//!
//! It is caught as it unwinds, so no profile of Cargo.toml may say `panic = "abort"`.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a call runs on this thread whose panics become errors. A panic hook may ask, so that it says
/// nothing of them: the library sets none of its own, as a hook belongs to the whole process.
pub fn panics_are_contained() -> bool {
    CONTAINED.get()
}

/// What `f` returns, or the message that it panicked with.
pub(super) fn contain<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    /// Puts back what was there, also while a panic unwinds.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            CONTAINED.set(self.0);
        }
    }
    let caught = {
        let _restore = Restore(CONTAINED.replace(true));
        // What `f` changed half-way is its callers' to give up or to keep.
        catch_unwind(AssertUnwindSafe(f))
    };
    caught.map_err(|payload| message(&*payload))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it gave no reason").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_its_message_and_the_flag_is_set_for_the_call_only() {
        assert!(!panics_are_contained());
        assert_eq!(contain(panics_are_contained), Ok(true));
        let what = 7;
        assert_eq!(
            contain(|| panic!("it is {what}")),
            Err::<(), _>("it is 7".to_owned())
        );
        assert_eq!(
            contain(|| panic!("plain")),
            Err::<(), _>("plain".to_owned())
        );
        let odd = contain(|| std::panic::panic_any(3));
        assert_eq!(odd, Err::<(), _>("it gave no reason".to_owned()));
        let nested = contain(|| {
            let inner = contain(|| panic!("inner"));
            (inner, panics_are_contained())
        });
        assert_eq!(nested, Ok((Err::<(), _>("inner".to_owned()), true)));
        assert!(!panics_are_contained());
    }
}
