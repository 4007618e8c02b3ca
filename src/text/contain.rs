//! Calls into third-party code that panics on bad input. A panic becomes an error of the call.
//!
//! Panics are caught by unwinding, so no profile of Cargo.toml may set `panic = "abort"`.

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether this thread runs a call whose panics become errors. A panic hook can call this function to stay silent about such
/// panics. The library itself sets no hook, since hooks are process-wide.
pub fn panics_are_contained() -> bool {
    CONTAINED.get()
}

/// Calls `f` and returns its result, or the message of its panic.
pub(super) fn contain<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    /// Restores the previous value, also while a panic unwinds.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            CONTAINED.set(self.0);
        }
    }
    let caught = {
        let _restore = Restore(CONTAINED.replace(true));
        // `AssertUnwindSafe`: the caller decides whether to keep or drop values that `f` left partially modified.
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
    fn a_panic_becomes_its_message_and_the_flag_is_reset() {
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
